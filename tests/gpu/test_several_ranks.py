"""Engines of two ranks, and two engines: with the same weights they find what one rank finds."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.runtime.vllm import mesh, say
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors
from tests.contract.sampling import run
from tests.gpu.engines import launch, launch_on_one_device
from tests.gpu.test_vllm_weights import POSITIONS
from tests.tiny_beam import LARGER, random_beam

SPREADS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor parallel": {"tensor_parallel": 2},
    "experts apart": {"tensor_parallel": 2, "expert_parallel": True},
    "two replicas": {"replicas": 2},
}
EAGER = {"enforce_eager": True}
LENGTH = 64
TOLERANCE = 1e-4
"""In float32, where rounding makes 1e-6 or so. A slice that lies in the place of another makes whole nats."""


def start(folder: Path, shared: bool, spread: dict[str, Any]) -> VllmSampler:
    """A sampler whose engines have loaded the weights of the folder; ``shared``: on one GPU, whatever their ranks."""
    vllm = VllmConfig(dtype="float32", memory_share=0.1, max_sequences=64, engine_args=EAGER, **spread)
    rollout = RolloutConfig(engine="vllm", vllm=vllm)
    name = "-".join(map(str, (*spread.values(), shared)))
    logs = [folder.parent / f"{name}-{replica}.log" for replica in range(vllm.replicas)]
    if shared:
        launches = [launch_on_one_device(folder, log, POSITIONS, rollout) for log in logs]
    else:
        launches = [launch(folder, log, POSITIONS, rollout, i) for i, log in enumerate(logs)]
    shape, fleet = BeamShape.from_folder(folder), Fleet(launches, 0, say)
    return VllmSampler(fleet, shape, mesh(rollout), "float32", POSITIONS, 0, LocalChannel(), 1 << 18)


def give(sampler: VllmSampler, module: torch.nn.Module) -> None:
    moves = plan(module_layout(module), sampler.layout("full"))
    sampler._channel.send(moves, Tensors(named_tensors(module)))
    sampler.receive(moves, 1, unfinished="abort")


@pytest.fixture(scope="module")
def samplers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], VllmSampler]]:
    """By spread and number of GPUs; the engines begin with other weights than those that they are given then."""
    folder = tmp_path_factory.mktemp("ranks") / "model"
    model.save(random_beam(1, **LARGER), folder, "float32")
    gpus = [1] if torch.cuda.device_count() == 1 else [1, 2]
    wanted = [(name, count) for name in SPREADS for count in gpus]
    with ThreadPoolExecutor(len(wanted)) as pool:
        started = list(pool.map(lambda each: start(folder, each[1] == 1, SPREADS[each[0]]), wanted))
    module = random_beam(**LARGER).to("cuda")
    for sampler in started:
        give(sampler, module)
    yield dict(zip(wanted, started, strict=True))
    for sampler in started:
        sampler.close()


def forced(sampler: VllmSampler) -> list[Completion]:
    """A token after each beginning of given sequences."""
    sequences = [np.random.default_rng(i).integers(0, LARGER["vocab_size"], LENGTH).astype(np.int32) for i in range(8)]
    return run(
        sampler,
        [
            Request(Key("eval", 0, str(i), at), ids[:at], SamplingParams(1))
            for i, ids in enumerate(sequences)
            for at in range(1, LENGTH)
        ],
    )


@pytest.fixture(scope="module")
def alone(samplers: dict[tuple[str, int], VllmSampler]) -> list[Completion]:
    return forced(samplers["one rank", 1])


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("spread", SPREADS)
def test_several_ranks_find_what_one_finds(
    samplers: dict[tuple[str, int], VllmSampler],
    alone: list[Completion],
    spread: str,
    gpus: int,
    record_property: Callable[[str, object], None],
) -> None:
    if (spread, gpus) not in samplers:
        pytest.skip("needs two GPUs")
    found = forced(samplers[spread, gpus])
    differences = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(found, alone, strict=True)]
    record_property(f"{spread}, {gpus} GPU: mean |delta log p| from one rank", float(np.mean(differences)))
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in alone]
    assert max(differences) < TOLERANCE
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.routes is not None
        np.testing.assert_array_equal(np.sort(ours.routes), np.sort(theirs.routes))  # type: ignore[arg-type]
