"""What the explanation rests on: a sampler finds again what it sampled, and a learner on its kernels finds the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.config.schema import RunConfig
from beamline.learner.torch import TorchLearner
from beamline.mismatch.frozen import FrozenBatch
from beamline.mismatch.setup import learner_setup, sampler_setup
from beamline.policy.weights import named_tensors
from beamline.rollout.local import worker
from beamline.rollout.local.beam import BeamDecoder, Numerics
from beamline.rollout.local.worker import NotFiniteError, Worker
from beamline.runtime.subject import Weights
from beamline.transfer.local import LocalChannel
from tests.tiny_beam import CONTEXT, THETA, beam_shape
from tests.unit.mismatch.cases import config_of, evaluator, frozen, weights_of

LORA = ("policy.lora.rank=8",)
SAMPLERS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("rollout.dtype=bfloat16",),
    "8-bit cache": ("rollout.kv_dtype=float8_e4m3",),
    "bfloat16 logits": ("rollout.head_dtype=bfloat16",),
    "all of it": ("rollout.dtype=bfloat16", "rollout.kv_dtype=float8_e4m3", "rollout.head_dtype=bfloat16"),
    "adapters": LORA,
    "adapters in bfloat16": (*LORA, "rollout.dtype=bfloat16"),
    "cooler": ("rollout.temperature=0.7", "rollout.dtype=bfloat16"),
}
samplers = pytest.mark.parametrize("settings", SAMPLERS.values(), ids=SAMPLERS.keys())


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is evaluated in parts: here in as many as the long ones of a real model."""
    monkeypatch.setattr(worker, "ROWS", 11)


def drawn(tmp_path: Path, *settings: str, **params: Any) -> tuple[RunConfig, Weights, FrozenBatch]:
    config = config_of(tmp_path, *settings)
    weights = weights_of(config)
    return config, weights, frozen(config, weights, **params)


@samplers
def test_the_sampler_finds_the_bits_and_routes_that_it_recorded(settings: tuple[str, ...], tmp_path: Path) -> None:
    config, weights, batch = drawn(tmp_path, *settings)
    evaluate = evaluator(config, batch, weights)
    found, routes = evaluate.chosen(sampler_setup(config))
    np.testing.assert_array_equal(found, batch.logprobs)
    for theirs, ours in zip(batch.routes, routes, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@samplers
def test_replayed_routes_of_its_own_change_no_bit(settings: tuple[str, ...], tmp_path: Path) -> None:
    config, weights, batch = drawn(tmp_path, *settings)
    np.testing.assert_array_equal(evaluator(config, batch, weights)(sampler_setup(config)), batch.logprobs)


@pytest.mark.parametrize(
    "params", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"min_tokens": 9, "stop_ids": (1, 2)}]
)
def test_what_was_renormalized_is_renormalized_again(params: dict[str, Any], tmp_path: Path) -> None:
    config, weights, batch = drawn(tmp_path, "rollout.dtype=bfloat16", record_support=True, **params)
    assert any(r.support is not None and r.support.sizes.any() for r in batch.rollouts)
    np.testing.assert_array_equal(evaluator(config, batch, weights)(sampler_setup(config)), batch.logprobs)


@pytest.mark.parametrize(
    "settings", [(), LORA, ("policy.r3=true", "rollout.dtype=bfloat16"), (*LORA, "policy.r3=true")]
)
@pytest.mark.parametrize("packed", [True, False])
def test_the_learner_on_kernels_finds_the_bits_of_a_float32_sampler(
    settings: tuple[str, ...], packed: bool, tmp_path: Path
) -> None:
    config, weights, batch = drawn(tmp_path, *settings)
    evaluate, learner = evaluator(config, batch, weights), replace(learner_setup(config), packed=packed)
    np.testing.assert_array_equal(evaluate(learner), evaluate(replace(learner, engine="sampler", packed=False)))


def test_prompts_are_evaluated_too(tmp_path: Path) -> None:
    config, weights, batch = drawn(tmp_path)
    decoder = BeamDecoder(beam_shape(), Numerics(), THETA, CONTEXT)
    given = named_tensors(weights.module)
    for name, tensor in decoder.tensors.items():
        tensor.copy_(given[name])
    learner = TorchLearner(weights.module, config.policy, config.learner, LocalChannel())
    learned = learner.forward(batch.experiences, ["logprobs"]).logprobs
    assert learned is not None
    for rollout, expected in zip(batch.rollouts, learned, strict=True):
        found, _ = Worker(decoder, CONTEXT).evaluate(rollout.token_ids, rollout.temperature, None, None)
        np.testing.assert_array_equal(found, expected)


def test_logits_that_are_not_finite_are_an_error() -> None:
    decoder = BeamDecoder(beam_shape(), Numerics(), THETA, CONTEXT)
    decoder.weights.norm[:] = np.inf
    tokens: NDArray[np.int32] = np.arange(5, dtype=np.int32)
    with pytest.raises(NotFiniteError):
        Worker(decoder, CONTEXT).evaluate(tokens, 1.0, None, None)
