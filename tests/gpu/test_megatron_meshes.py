"""The learner over Megatron-Core on two ranks: over NCCL where there are two GPUs, else both on one, over gloo."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from beamline.learner.learner import Learner
from beamline.model.layout import DType
from beamline.records import Experience
from tests.cluster.learner import weights_of, with_learner
from tests.contract.engines import torch_learner
from tests.contract.learning import of_lengths, update
from tests.gpu.meshes import on_gpus
from tests.tiny_beam import beam_config, random_beam, reference, teacher_forced

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

MESHES = {
    "tensor": {"tensor": 2},
    "tensor and expert": {"tensor": 2, "expert": 2},
    "data and expert": {"data": 2, "expert": 2},
    "data": {"data": 2},
    "pipeline": {"pipeline": 2},
}
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 512,
}
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "eps": 0.1}
ROWS = 256
DEVICE = "cuda"

Found = tuple[np.ndarray, list[tuple[float, float]]]


def sequences() -> list[Experience]:
    lengths = [2, 300, *np.random.default_rng(0).integers(3, 120, 14).tolist()]
    return of_lengths(lengths)


def scenario(learner: Learner[Any]) -> Found:
    """Log-probabilities, and what each of two updates finds."""
    logprobs = learner.forward(sequences(), ["logprobs"]).logprobs
    assert logprobs is not None
    stats = [update(learner, sequences()[number:]) for number in range(2)]
    return np.concatenate(logprobs), [(each.loss, each.grad_norm or 0.0) for each in stats]


@cache
def on_mesh(mesh: str, dtype: DType) -> Found:
    sizes = MESHES.get(mesh, {})
    module = random_beam(0, **SIZES)
    arguments = (scenario, sizes, beam_config(**SIZES), weights_of(module), OPTIMIZER, ROWS, dtype, "none", (), DEVICE)
    found: Found = on_gpus(2 if sizes else 1, with_learner, *arguments)[0]
    return found


@cache
def in_float32() -> Found:
    """By the torch learner on the CPU."""
    return scenario(torch_learner(random_beam(0, **SIZES), ROWS, parity=False, **OPTIMIZER))


@pytest.mark.parametrize("mesh", MESHES)
def test_in_float32_two_ranks_find_what_the_torch_learner_finds(
    mesh: str, record_property: Callable[[str, object], None]
) -> None:
    (logprobs, updates), (expected, theirs) = on_mesh(mesh, "float32"), in_float32()
    record_property(f"{mesh}: largest |delta log p| in float32", float(np.abs(logprobs - expected).max()))
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)
    errors = np.abs(np.array(updates) / np.array(theirs) - 1)
    record_property(f"{mesh}: relative errors of loss and norm of two updates in float32", errors.tolist())
    assert errors[:, 1].max() < 1e-3
    assert errors[:, 0].max() < 1e-2  # losses are sums of both signs


@pytest.mark.parametrize("mesh", MESHES)
def test_in_bfloat16_two_ranks_are_as_near_to_float32_as_one(
    mesh: str, record_property: Callable[[str, object], None]
) -> None:
    """In the middle, because rounding turns over the choice of some routers."""
    plain = reference(random_beam(0, **SIZES))
    expected = np.concatenate([teacher_forced(plain, each.rollout.token_ids) for each in sequences()])
    (logprobs, updates), (alone, by_one) = on_mesh(mesh, "bfloat16"), on_mesh("alone", "bfloat16")
    two, one = (float(np.median(np.abs(each - expected))) for each in (logprobs, alone))
    record_property(f"{mesh}: median |delta log p| to float32, two ranks and one", [two, one])
    assert two < 1.2 * one
    np.testing.assert_allclose(np.array(updates)[:, 1], np.array(by_one)[:, 1], rtol=0.05)
