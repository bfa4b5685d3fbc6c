"""Engines of two ranks, and two engines: with the same weights they find what one rank finds."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.model.beam import BeamShape
from beamline.policy import model
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.runtime.vllm import mesh, say
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from tests.contract.sampling import run
from tests.gpu.engines import SIDE_BY_SIDE, launch, launch_on_one_device
from tests.gpu.test_vllm_weights import POSITIONS, SIZES
from tests.tiny_beam import random_beam

SPREADS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor parallel": {"tensor_parallel": 2},
    "experts apart": {"tensor_parallel": 2, "expert_parallel": True},
    "two replicas": {"replicas": 2},
}
LENGTH = 64
ROUNDING = 1e-3  # least mean |delta log p| that another order of additions makes in BF16

Found = dict[tuple[str, int], Completion]


class Difference(NamedTuple):
    """Of the same tokens after the same beginnings: mean |delta log p|, and the share of rows with other experts."""

    logprobs: float
    routes: float


def start(folder: Path, shared: bool, spread: dict[str, Any]) -> VllmSampler:
    """A sampler whose engines have loaded the weights of the folder; ``shared``: on one GPU, whatever their ranks."""
    vllm = VllmConfig(max_sequences=64, engine_args={"enforce_eager": True}, **spread)
    rollout = RolloutConfig(engine="vllm", vllm=vllm)
    name = "-".join(map(str, (*spread.values(), shared)))
    logs = [folder.parent / f"{name}-{replica}.log" for replica in range(vllm.replicas)]
    if shared:
        launches = [launch_on_one_device(folder, log, POSITIONS, rollout, **SIDE_BY_SIDE) for log in logs]
    else:
        launches = [launch(folder, log, POSITIONS, rollout, i, **SIDE_BY_SIDE) for i, log in enumerate(logs)]
    shape, fleet = BeamShape.from_folder(folder), Fleet(launches, 0, say)
    return VllmSampler(fleet, shape, mesh(rollout), "bfloat16", POSITIONS, 0, LocalChannel(), 1 << 18)


def give(sampler: VllmSampler, module: torch.nn.Module) -> None:
    moves = plan(module_layout(module), sampler.layout("full"))
    sampler._channel.send(moves, named_tensors(module))
    sampler.receive(moves, 1, unfinished="abort")


@pytest.fixture(scope="module")
def samplers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], VllmSampler]]:
    """By spread and number of GPUs; the engines begin with other weights than those that they are given then."""
    folder = tmp_path_factory.mktemp("ranks") / "model"
    model.save(random_beam(1, **SIZES), folder, "bfloat16")
    gpus = [1] if torch.cuda.device_count() == 1 else [1, 2]
    wanted = [(name, count) for name in SPREADS for count in gpus]
    with ThreadPoolExecutor(len(wanted)) as pool:
        started = list(pool.map(lambda each: start(folder, each[1] == 1, SPREADS[each[0]]), wanted))
    module = random_beam(**SIZES).to("cuda", torch.bfloat16)
    for sampler in started:
        give(sampler, module)
    yield dict(zip(wanted, started, strict=True))
    for sampler in started:
        sampler.close()


def forced(sampler: VllmSampler, order: int = 1) -> Found:
    """A token after each beginning of given sequences, by sequence and position."""
    sequences = [np.random.default_rng(i).integers(0, SIZES["vocab_size"], LENGTH).astype(np.int32) for i in range(8)]
    asked = [
        Request(Key("eval", 0, str(i), at), ids[:at], SamplingParams(1))
        for i, ids in enumerate(sequences)
        for at in range(1, LENGTH)
    ]
    return {(each.key.problem, each.key.sample): each for each in run(sampler, asked[::order])}


def difference(one: Found, other: Found) -> Difference:
    """Between two that drew with the same seeds, so that most tokens are the same."""
    pairs = [(one[key], other[key]) for key in one]
    same = [(a, b) for a, b in pairs if a.token_ids.tolist() == b.token_ids.tolist()]
    assert len(same) > 0.9 * len(pairs)
    routes = [(np.sort(a.routes) != np.sort(b.routes)).any(-1).mean() for a, b in pairs]  # type: ignore[arg-type]
    return Difference(float(np.mean([abs(a.logprobs[0] - b.logprobs[0]) for a, b in same])), float(np.mean(routes)))
