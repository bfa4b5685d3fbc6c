"""Engines of two ranks, and two engines: with the same weights they find what one rank finds."""

from collections.abc import Callable, Iterator
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
from tests.gpu.engines import launch, launch_on_one_device
from tests.gpu.test_vllm_weights import POSITIONS, SIZES
from tests.tiny_beam import random_beam

SPREADS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_parallel": 2},
    "experts apart": {"tensor_parallel": 2, "expert_parallel": True},
    "two replicas": {"replicas": 2},
}
LENGTH = 64
ROUNDING = 1e-3  # least mean |delta log p| that another order of additions makes in BF16

Found = dict[tuple[str, int], Completion]
SamplerMaker = Callable[..., VllmSampler]


class Difference(NamedTuple):
    """Of the same tokens after the same beginnings: mean |delta log p|, and the share of rows with other experts."""

    logprobs: float
    routes: float


@pytest.fixture(scope="module")
def make_sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplerMaker]:
    """Samplers whose engines begin with other weights than those that they are given, from the device.

    Only one has engines at a time.
    """
    folder = tmp_path_factory.mktemp("ranks")
    model.save(random_beam(1, **SIZES), folder / "model", "bfloat16")
    module = random_beam(**SIZES).to("cuda", torch.bfloat16)
    made: list[VllmSampler] = []

    def make(shared: bool, **spread: Any) -> VllmSampler:
        while made:
            made.pop().close()
        vllm = VllmConfig(memory_share=0.15, max_sequences=64, engine_args={"enforce_eager": True}, **spread)
        rollout = RolloutConfig(engine="vllm", vllm=vllm)
        name = "-".join(map(str, (*spread.values(), shared)))
        logs = [folder / f"{name}-{replica}.log" for replica in range(vllm.replicas)]
        if shared:
            launches = [launch_on_one_device(folder / "model", log, POSITIONS, rollout) for log in logs]
        else:
            launches = [launch(folder / "model", log, POSITIONS, rollout, i) for i, log in enumerate(logs)]
        fleet = Fleet(launches, 0, say)
        shape, channel = BeamShape.from_folder(folder / "model"), LocalChannel()
        sampler = VllmSampler(fleet, shape, mesh(rollout), "bfloat16", POSITIONS, 0, channel, 1 << 18)
        made.append(sampler)
        moves = plan(module_layout(module), sampler.layout("full"))
        channel.send(moves, named_tensors(module))
        sampler.receive(moves, 1, unfinished="abort")
        return sampler

    yield make
    for sampler in made:
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


@pytest.fixture(scope="module")
def alone(make_sampler: SamplerMaker) -> tuple[Found, Difference]:
    """What one rank finds, and by how much it differs from itself where the batches are others."""
    sampler = make_sampler(False)
    found = forced(sampler)
    return found, difference(found, forced(sampler, order=-1))


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("spread", SPREADS)
def test_several_ranks_find_what_one_finds(
    make_sampler: SamplerMaker,
    alone: tuple[Found, Difference],
    spread: str,
    gpus: int,
    record_property: Callable[[str, object], None],
) -> None:
    """Within twice of what rounding does to one of them."""
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two GPUs")
    expected, floor = alone
    found = difference(expected, forced(make_sampler(gpus == 1, **SPREADS[spread])))
    record_property(f"{spread} on {gpus} GPU, difference from one rank", found._asdict() | {"floor": floor._asdict()})
    assert found.logprobs <= 2 * max(floor.logprobs, ROUNDING)
    assert found.routes <= 2 * max(floor.routes, 0.01)
