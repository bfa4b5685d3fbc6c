"""Engines over two GPUs: tensor parallel, and two replicas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.model.beam import BeamShape
from beamline.policy import model
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Key, Request, SamplingParams
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.runtime.vllm import vllm_sampler
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from tests.contract.sampling import run
from tests.gpu.test_vllm_weights import POSITIONS, SIZES
from tests.tiny_beam import random_beam

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SPREAD: dict[str, dict[str, Any]] = {"tensor parallel": {"tensor_parallel": 2}, "two replicas": {"replicas": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "model"
    model.save(random_beam(**SIZES), path, "bfloat16")
    return path


def sampler_of(folder: Path, **vllm: Any) -> VllmSampler:
    """A sampler with the folder's weights, given to it by us."""
    settings = VllmConfig(memory_share=0.2, max_sequences=64, engine_args={"enforce_eager": True}, **vllm)
    channel, shape, stored = LocalChannel(), BeamShape.from_folder(folder), model.load(folder, "bfloat16")
    rollout = RolloutConfig(engine="vllm", vllm=settings)
    sampler = vllm_sampler(rollout, shape, folder, POSITIONS, 0, channel, False, folder.parent)
    moves = plan(module_layout(stored), sampler.layout("full"))
    channel.send(moves, named_tensors(stored))
    sampler.receive(moves, 1, unfinished="abort")
    return sampler


def forced(sampler: VllmSampler, step: int, order: int = 1) -> dict[tuple[str, int, int], float]:
    """Log-probabilities of a token after each beginning of given sequences, by sequence, position and token."""
    sequences = [np.random.default_rng(i).integers(0, SIZES["vocab_size"], 64).astype(np.int32) for i in range(8)]
    asked = [
        Request(Key("eval", step, str(i), t), ids[:t], SamplingParams(1))
        for i, ids in enumerate(sequences)
        for t in range(1, 64)
    ][::order]
    return {(c.key.problem, c.key.sample, int(c.token_ids[0])): float(c.logprobs[0]) for c in run(sampler, asked)}


def difference(one: dict[Any, float], other: dict[Any, float]) -> float:
    """Mean |delta log p| of the tokens that both drew, which are most."""
    shared = one.keys() & other.keys()
    assert len(shared) > 0.9 * len(one)
    return float(np.mean([abs(one[key] - other[key]) for key in shared]))


@pytest.fixture(scope="module")
def floor(folder: Path) -> Iterator[tuple[dict[Any, float], float]]:
    """What one GPU finds, and by how much it differs from itself where the batches are others."""
    sampler = sampler_of(folder)
    found = forced(sampler, 0)
    yield found, difference(found, forced(sampler, 0, order=-1))
    sampler.close()


@pytest.mark.parametrize("spread", SPREAD)
def test_two_gpus_find_what_one_finds(folder: Path, floor: tuple[dict[Any, float], float], spread: str) -> None:
    """Within twice of what rounding does, of which a BF16 model has 1e-3 at least."""
    sampler = sampler_of(folder, **SPREAD[spread])
    try:
        found = forced(sampler, 0)
    finally:
        sampler.close()
    assert difference(found, floor[0]) <= 2 * max(floor[1], 1e-3)
