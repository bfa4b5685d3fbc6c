"""Weights of several learner ranks in engines of several ranks, and in a sampler of the first rank's process."""

import os
import signal
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamline.checkpoint import ShardWriter
from beamline.learner.learner import Learner
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Experience
from beamline.rollout.vllm import worker
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.layout import Mesh, engine_layout, parameters, placed
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.rollout.vllm.worker import Loader
from beamline.runtime.probe import probe
from beamline.transfer.memory import attach
from beamline.transfer.plan import plan, shares_of
from tests.cluster.learner import weights_of, with_learner
from tests.cluster.ranks import on_ranks
from tests.cluster.test_updates import MESHES, OPTIMIZER, ROWS, run_on, saved, size_of
from tests.contract.learning import batch, update
from tests.contract.process_engines import LONG, MESH, cpu_launches
from tests.contract.sampling import assert_same_bits, requests, run
from tests.tiny_beam import CONTEXT, beam_config, beam_shape, random_beam
from tests.unit.rollout.test_vllm_loader import tree
from tests.unit.rollout.vllm_meshes import assembled, name_of

ENGINES = (Mesh(), Mesh(2), Mesh(2, experts=True), Mesh(1, 2))
BUCKET_BYTES = 4096


def in_engine(learner: Any, sizes: Mapping[str, Any]) -> tuple[list[dict[str, NDArray[np.float32]]], int]:
    """The parameters of each rank of an engine that was given the learner's weights; and how many ranks gave any."""
    worker.lies_as_stored = lambda module: True
    mesh, shape = Mesh(**sizes), beam_shape()
    layout = engine_layout(shape, mesh, "float32")
    moves = plan(learner.layout("full"), layout)
    learner.send(moves)
    source = learner._channel.take(moves)
    assert source.not_finite(moves) is None
    types = {part.name: part.dtype for rank in layout.ranks for part in rank}
    shares = shares_of(moves, source.size, mesh.size, types)
    supply = source.supply(shares, BUCKET_BYTES)
    modules = [tree({n: s for n, (s, _) in parameters(shape, mesh, r, "float32").items()}) for r in range(mesh.size)]
    loaders = [Loader(modules[r], placed(shape, mesh, r, "float32"), shares[r], BUCKET_BYTES) for r in range(mesh.size)]
    for _ in range(2):  # memory is taken anew for an engine that takes the place of another
        supply.take_memory([()] * mesh.size)
        for number in range(supply.rounds):
            for loader, descriptors in zip(loaders, supply.pack(number), strict=True):
                for given_by, descriptor in enumerate(descriptors):
                    if descriptor:
                        memory = attach(descriptor)
                        with torch.no_grad():
                            loader.fill(given_by, number, memory.buffer)
                        memory.close()
        assert [loader.finish() for loader in loaders] == supply.checksums()
    supply.close()
    givers = {number for rank in shares for number, share in enumerate(rank) if share}
    return [{n: x.detach().numpy() for n, x in module.named_parameters()} for module in modules], len(givers)


def given(learner: Learner[Any], folder: Path) -> dict[str, tuple[list[dict[str, NDArray[np.float32]]], int]]:
    """What engines hold of a learner that has made an update, and has saved what it holds."""
    update(learner, batch())
    learner.save(ShardWriter(folder, 0))
    return {name_of(mesh): in_engine(learner, asdict(mesh)) for mesh in ENGINES}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_of_an_engine_holds_the_bits_of_the_learner(mesh: str, tmp_path: Path) -> None:
    found = run_on(mesh, given, tmp_path)
    expected = {name: array.astype(np.float32) for name, array in saved(tmp_path).items()}
    for engine in ENGINES:
        ranks, givers = found[name_of(engine)]
        assert givers == size_of(MESHES[mesh])
        for rank, held in enumerate(ranks):
            wanted = assembled(beam_shape(), engine, rank, expected)
            assert held.keys() == wanted.keys()
            for name, array in wanted.items():
                np.testing.assert_array_equal(held[name], array, err_msg=f"{engine}, rank {rank}: {name}")


def received(learner: Any, folder: Path) -> dict[str, NDArray[np.float32]]:
    """What a sampler of this process receives after an update, the second time into the same memory."""
    module = random_beam(1)
    tensors, moves = named_tensors(module), plan(learner.layout("full"), module_layout(module))
    for _ in range(2):
        update(learner, batch())
        learner.send(moves)
        with torch.no_grad():
            learner._channel.receive(moves, tensors)
    learner.save(ShardWriter(folder, 0))
    assert learner._rank._packers == {}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("mesh", ["one rank", "data and expert", "all"])
def test_a_sampler_of_the_first_rank_holds_the_bits_of_the_learner(mesh: str, tmp_path: Path) -> None:
    found, expected = run_on(mesh, received, tmp_path), saved(tmp_path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array.astype(np.float32), err_msg=name)


def drawn_with_a_kill(learner: Any, folder: Path, group_seconds: float | None) -> dict[str, Any]:
    """What two engines draw under the weights of an update, before and after one of them was killed."""
    update(learner, batch())
    fleet = Fleet(cpu_launches(folder, 2, mesh=MESH)("float32"), 1, lambda _: None)
    channel = learner._channel
    settings = "float32", CONTEXT, 0, channel, BUCKET_BYTES, group_seconds
    with closing(VllmSampler(fleet, beam_shape(), MESH, *settings)) as sampler:
        moves = plan(learner.layout("full"), sampler.layout("full"))
        for version in (1, 2):
            learner.send(moves)
            sampler.receive(moves, version, unfinished="abort")
            update(learner, batch())
        learner.send(moves)
        sampler.receive(moves, 3, unfinished="abort")

        def evaluate(sequences: list[Experience]) -> list[NDArray[np.float32]]:
            found: list[NDArray[np.float32]] = learner.forward(sequences, ["logprobs"]).logprobs
            return found

        difference = probe(sampler, evaluate, beam_shape(), CONTEXT, LONG)
        before = run(sampler, requests())
        os.kill(fleet.replicas[0].pid, signal.SIGKILL)
        after = run(sampler, requests())
        learner.send(moves)
        sampler.receive(moves, 4, unfinished="abort")
        return {
            "difference": difference,
            "before": before,
            "after": after,
            "restarts": sampler.statistics()["rollout/engine_restarts"],
            "last": run(sampler, requests()),
        }


@pytest.mark.parametrize("group_seconds", [None, 60.0])
def test_an_engine_that_takes_the_place_of_another_is_given_the_weights_of_all_ranks(
    group_seconds: float | None, tmp_path: Path
) -> None:
    """Through memory of the host, and through a group of four learner ranks and the four of an engine."""
    found = run_on("all", drawn_with_a_kill, tmp_path, group_seconds)
    assert found["difference"] < 1e-5
    assert found["restarts"] == 1
    assert_same_bits(found["before"], found["after"])
    assert {version for each in found["last"] for version in each.versions.tolist()} == {4}


def not_finite(learner: Any) -> str | None:
    moves = plan(learner.layout("full"), engine_layout(beam_shape(), Mesh(), "float32"))
    learner.send(moves)
    name: str | None = learner._channel.take(moves).not_finite(moves)
    return name


@pytest.mark.parametrize("name", ["model.layers.2.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.gate.weight"])
def test_a_value_that_is_not_finite_is_found_on_whichever_rank_holds_it(name: str) -> None:
    weights = dict(weights_of(random_beam()))
    weights[name][-1, -1] = torch.nan
    sizes = MESHES["all"]
    shared = (not_finite, sizes, beam_config(), weights, OPTIMIZER, ROWS, "float32", "none", ())
    assert on_ranks(size_of(sizes), with_learner, *shared)[0] == name
