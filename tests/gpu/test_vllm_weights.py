"""Weights in a running engine: what vLLM loads from a folder is what we put there, from the host and on the device."""

import itertools
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
from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.layout import Mesh
from beamline.rollout.vllm.messages import Asked, Submit
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.runtime.vllm import say
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from tests.gpu.engines import launch
from tests.tiny_beam import random_beam

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 256,
    "sliding_window": 32,
}
"""Large enough for kernels of 8 bits."""
QUANTIZATIONS = ("none", "fp8_per_tensor")
POSITIONS = 128

_steps = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model"
    model.save(random_beam(**SIZES), path, "bfloat16")
    return path


@pytest.fixture(scope="module")
def loaded_by_vllm(fleets: dict[str, Fleet]) -> dict[str, list[Completion]]:
    """What engines drew before they were given anything."""
    return {name: drawn(fleet) for name, fleet in fleets.items()}


@pytest.fixture(scope="module")
def fleets(folder: Path) -> Iterator[dict[str, Fleet]]:
    """An engine for each quantization, with the weights that vLLM loaded from the folder."""
    launches = {}
    for name in QUANTIZATIONS:
        vllm = VllmConfig(quantization=name, memory_share=0.15, max_sequences=16, engine_args={"enforce_eager": True})
        log = folder.parent / f"{name}.log"
        launches[name] = launch(folder, log, POSITIONS, RolloutConfig(engine="vllm", vllm=vllm))
    started = {name: Fleet([each], 0, say) for name, each in launches.items()}
    yield started
    for fleet in started.values():
        fleet.close()


def ask() -> list[Request]:
    """Requests that no engine has seen, with the same prompts and, by their samples, the same seeds as ever."""
    step = next(_steps)
    prompts = [np.random.default_rng(i).integers(0, 512, 20).astype(np.int32) for i in range(8)]
    return [Request(Key("train", step, str(i), 0), ids, SamplingParams(24)) for i, ids in enumerate(prompts)]


def drawn(fleet: Fleet) -> list[Completion]:
    """What an engine draws with whatever weights it has."""
    asked = ask()
    engine = fleet.replicas[0]
    engine.send(Submit([Asked(each, seed=100 + i) for i, each in enumerate(asked)]))
    done: dict[Key, Completion] = {}
    while len(done) < len(asked):
        done |= {c.key: c for finished in engine.take(60.0) for c in finished.completions}
    return [done[each.key] for each in asked]


def given(fleet: Fleet, module: torch.nn.Module, bucket_bytes: int = 1 << 16) -> None:
    """Bring a module's weights into an engine."""
    channel = LocalChannel()
    shape = BeamShape.from_config(module.config.to_dict())  # type: ignore[union-attr, operator]
    sampler = VllmSampler(fleet, shape, Mesh(), "bfloat16", POSITIONS, 0, channel, bucket_bytes)
    moves = plan(module_layout(module), sampler.layout("full"))
    channel.send(moves, named_tensors(module))
    sampler.receive(moves, 1, unfinished="abort")


def same_bits(one: list[Completion], other: list[Completion]) -> bool:
    return all(
        a.token_ids.tobytes() == b.token_ids.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_we_put_there_is_what_vllm_loads_from_the_folder(
    fleets: dict[str, Fleet], loaded_by_vllm: dict[str, list[Completion]], folder: Path, quantization: str
) -> None:
    """Other weights in between, and those of the folder again: the same bits. Quantized on arrival, where it is."""
    fleet = fleets[quantization]
    given(fleet, random_beam(1, **SIZES))
    assert not same_bits(loaded_by_vllm[quantization], drawn(fleet))
    given(fleet, model.load(folder, "bfloat16"))
    assert same_bits(loaded_by_vllm[quantization], drawn(fleet))


def test_8_bits_are_near_16(fleets: dict[str, Fleet], folder: Path) -> None:
    """The first token of each response, whose prefix both have: what it costs in log-probability to round."""
    for fleet in fleets.values():
        given(fleet, model.load(folder, "bfloat16"))
    pairs = zip(drawn(fleets["none"]), drawn(fleets["fp8_per_tensor"]), strict=True)
    same = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs if a.token_ids[0] == b.token_ids[0]]
    assert len(same) >= 4
    assert 0 < np.mean(same) < 0.5


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 26])
def test_tensors_on_the_device_arrive_like_those_of_the_host(
    fleets: dict[str, Fleet], folder: Path, quantization: str, bucket_bytes: int
) -> None:
    fleet, stored = fleets[quantization], model.load(folder, "bfloat16")
    given(fleet, stored)
    from_host = drawn(fleet)
    given(fleet, random_beam(1, **SIZES))
    given(fleet, stored.cuda(), bucket_bytes)
    assert same_bits(from_host, drawn(fleet))
