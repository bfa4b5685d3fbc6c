"""A cause that was put in on purpose is found, under its own name, and nothing is left of the difference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beamline.config.schema import RunConfig
from beamline.learner.torch import TorchLearner
from beamline.mismatch.causes import causes, size
from beamline.mismatch.evaluator import Evaluator
from beamline.mismatch.routing import routing
from beamline.mismatch.setup import learner_setup, sampler_setup
from beamline.report.mismatch import Cause, Size
from beamline.transfer.local import LocalChannel
from tests.tiny_beam import random_beam
from tests.unit.mismatch.cases import MANY_EXPERTS, config_of, evaluator, frozen, perturbed, weights_of

LAST_ROUTER = "model.layers.2.mlp.gate"
ALL_TYPES = ("rollout.dtype=bfloat16", "rollout.kv_dtype=float8_e4m3", "rollout.head_dtype=bfloat16")


Explain = Callable[..., tuple[dict[str, Cause], Evaluator, RunConfig]]


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explain:
    """The causes by name, and what they were measured with, of a sampler and a learner with these settings.

    They are computed once for equal settings; not to be changed.
    """
    known: dict[str, tuple[dict[str, Cause], Evaluator, RunConfig]] = {}

    def explain(*settings: str, **changes: Any) -> tuple[dict[str, Cause], Evaluator, RunConfig]:
        key = repr((settings, changes))
        if key not in known:
            config = config_of(tmp_path_factory.mktemp("explained"), *settings, **changes)
            weights = weights_of(config, **changes)
            evaluate = evaluator(config, frozen(config, weights), weights)
            known[key] = named(config, evaluate), evaluate, config
        return known[key]

    return explain


def named(config: RunConfig, evaluate: Evaluator, other: str | None = None) -> dict[str, Cause]:
    return {cause.name: cause for cause in causes(config, evaluate, other)[0]}


def mean(cause: Cause) -> float:
    assert cause.alone is not None
    return cause.alone.mean


def steps(found: dict[str, Cause]) -> list[str]:
    """The causes on the way from learner to sampler."""
    return [cause.name for cause in found.values() if cause.change is not None]


def left(found: dict[str, Cause]) -> float:
    """What is left after the last of them."""
    last = found[steps(found)[-1]].left
    assert last is not None
    return last


def observed(config: RunConfig, evaluate: Evaluator) -> Size:
    return size(evaluate(learner_setup(config)) - evaluate.recorded)


def test_engines_that_agree_have_nothing_to_explain(explained: Explain) -> None:
    found, evaluate, config = explained()
    assert observed(config, evaluate) == Size(0.0, 0.0, 0.0)
    assert steps(found) == ["batch composition"]
    assert left(found) == 0
    assert [name for name, cause in found.items() if cause.alone is None] == ["weights"]


def test_what_the_engines_do_not_differ_in_is_shown_as_what_if(explained: Explain) -> None:
    found, _, _ = explained()
    switched = {name: cause.switched for name, cause in found.items() if not cause.differs}
    assert switched == {
        "kernels": "Hugging Face module",
        "attention kernel": "torch's fused attention",
        "routing": "as a bfloat16 sampler",
        "compute type": "bfloat16",
        "KV cache type": "float8_e4m3",
        "logits type": "bfloat16",
        "temperature": "0.7",
        "weights": "there is no earlier checkpoint",
    }
    # Other operations in float32 move the last bits, everything else far more.
    assert 0 < mean(found["kernels"]) < 1e-5
    assert 0 < mean(found["attention kernel"]) < 1e-5
    assert all(mean(found[name]) > 1e-4 for name in ("compute type", "KV cache type", "logits type", "temperature"))


@pytest.mark.parametrize("settings", [(), ("policy.lora.rank=8",), ("policy.parity=false",)])
def test_a_cause_that_was_put_in_is_found_and_explains_all_of_it(settings: tuple[str, ...], explained: Explain) -> None:
    kernels = ["batch composition"] + ["kernels"] * ("policy.parity=false" in settings)
    for name, setting in zip(("compute type", "KV cache type", "logits type"), ALL_TYPES, strict=True):
        found, evaluate, config = explained(*settings, setting)
        assert steps(found) == [*kernels, *(["routing"] if found["routing"].differs else []), name]
        assert mean(found[name]) > 0.3 * observed(config, evaluate).mean
        assert left(found) == 0


def test_several_causes_are_told_apart(explained: Explain) -> None:
    found, _, _ = explained(*ALL_TYPES, **MANY_EXPERTS)
    assert steps(found) == ["batch composition", "routing", "compute type", "KV cache type", "logits type"]
    assert left(found) == 0
    for name, setting in zip(("compute type", "KV cache type", "logits type"), ALL_TYPES, strict=True):
        alone, _, _ = explained(setting, **MANY_EXPERTS)
        # Alone, it is measured on tokens that another sampler drew, so that the figures are only alike.
        assert mean(found[name]) == pytest.approx(mean(alone[name]), rel=0.5)


def test_a_router_that_chooses_otherwise_is_found_in_its_layer(tmp_path: Path) -> None:
    """Its bias has a part in the choice of experts, and in nothing else."""
    config = config_of(tmp_path)
    batch, weights = frozen(config, weights_of(config)), weights_of(config)
    perturbed(weights.module, [f"{LAST_ROUTER}.e_score_correction_bias"], 0.3)
    evaluate = evaluator(config, batch, weights)
    found = named(config, evaluate)
    assert steps(found) == ["batch composition", "routing"]
    assert found["routing"].change == observed(config, evaluate).mean == mean(found["routing"])
    assert left(found) == 0
    routes = routing(config, evaluate)
    assert routes is not None
    assert [layer.layer for layer in routes.layers if layer.share > 0] == [2]
    assert routes.any_layer == routes.layers[1].share
    assert routes.replayed == 0


def test_what_the_settings_do_not_tell_is_left_as_the_residual(tmp_path: Path) -> None:
    """A sampler that draws at another temperature than it says: what is left is what that temperature does alone."""
    config = config_of(tmp_path)
    weights = weights_of(config)
    batch = frozen(config, weights, temperature=0.7)
    claimed = replace(batch, rollouts=tuple(replace(rollout, temperature=1.0) for rollout in batch.rollouts))
    found = named(config, evaluator(config, claimed, weights))
    assert steps(found) == ["batch composition"]
    assert left(found) == mean(found["temperature"]) > 0.1


def test_learners_weights_that_the_sampler_does_not_have_are_left_as_the_residual(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    before = weights_of(config)
    now = perturbed(random_beam(), ["lm_head.weight"], 0.05)
    evaluate = evaluator(config, frozen(config, before), before._replace(module=now), before)
    found = named(config, evaluate, "step 1")
    assert found["weights"].switched == "step 1"
    assert left(found) == mean(found["weights"]) > 0.01


def test_replay_leaves_routing_no_part(explained: Explain) -> None:
    found, evaluate, config = explained("policy.r3=true", "rollout.dtype=bfloat16", **MANY_EXPERTS)
    assert steps(found) == ["batch composition", "compute type"]
    assert (found["routing"].differs, found["routing"].switched) == (False, "its own choice")
    assert left(found) == 0
    free, _, _ = explained("rollout.dtype=bfloat16", **MANY_EXPERTS)
    assert mean(found["routing"]) == mean(free["routing"])
    routes = routing(config, evaluate)
    assert routes is not None
    assert routes.replayed == observed(config, evaluate).mean


@pytest.mark.parametrize("r3", [False, True])
def test_a_learner_in_bfloat16_is_explained_to_the_end(r3: bool, tmp_path: Path) -> None:
    frozen_base = ("policy.lora.rank=8", "policy.parity=false", "policy.dtype=bfloat16", f"policy.r3={r3}")
    config = config_of(tmp_path, *frozen_base, "rollout.kv_dtype=float8_e4m3")
    weights = weights_of(config, dtype="bfloat16")
    found = named(config, evaluator(config, frozen(config, weights), weights))
    assert steps(found)[:2] == ["batch composition", "kernels"]
    assert steps(found)[-2:] == ["compute type", "KV cache type"]
    assert left(found) == 0
    assert found["attention kernel"].alone is None


def test_a_model_without_experts_has_no_routing(explained: Explain) -> None:
    found, evaluate, config = explained("rollout.dtype=bfloat16", mlp_layer_types=["dense"] * 3)
    assert (found["routing"].alone, found["routing"].switched) == (None, "the model has no experts")
    assert steps(found) == ["batch composition", "compute type"]
    assert left(found) == 0
    assert routing(config, evaluate) is None


def test_the_way_goes_from_the_learner_to_the_sampler(explained: Explain) -> None:
    found, evaluate, config = explained(*ALL_TYPES)
    end = causes(config, evaluate, None)[1]
    assert end == sampler_setup(config)
    np.testing.assert_array_equal(evaluate(end), evaluate.recorded)
    sizes: Sequence[float] = [cause.left for cause in found.values() if cause.left is not None]
    assert sizes[0] == observed(config, evaluate).mean  # batch composition moves no bit


def test_batch_composition_is_each_sequence_alone(tmp_path: Path) -> None:
    """With the operations of torch a sequence's last bits depend on what it is packed with."""
    config = config_of(tmp_path, "policy.parity=false")
    weights = weights_of(config)
    batch = frozen(config, weights)
    learner = TorchLearner(weights.module, config.policy, config.learner, LocalChannel())
    alone = [learner.forward([experience], ["logprobs"]).logprobs for experience in batch.experiences]
    expected = [found[0][r.policy_mask[1:]] for found, r in zip(alone, batch.rollouts, strict=True) if found]
    evaluate, packed = evaluator(config, batch, weights), learner_setup(config)
    np.testing.assert_array_equal(evaluate(replace(packed, packed=False)), np.concatenate(expected))
    assert not np.array_equal(evaluate(packed), np.concatenate(expected))
