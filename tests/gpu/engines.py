"""Engines for tests on a GPU. They are shared: a sampler that works takes its turn, with its own weights put back."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.model.layout import DType
from beamline.model.lora import LoraShape
from beamline.policy import model
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Request
from beamline.rollout.vllm.arguments import engine_arguments, environment
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.layout import Mesh
from beamline.rollout.vllm.messages import DeviceMemory, Wake
from beamline.rollout.vllm.replica import Launch
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.runtime.vllm import COMMAND
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from tests.contract.engines import PairBench, SamplerBench, Unfinished, torch_learner
from tests.tiny_beam import CONTEXT, beam_shape, random_beam


def launch(model_folder: Path, log: Path, positions: int, rollout: RolloutConfig, **changes: Any) -> Launch:
    """How an engine is started as a run would start it; ``changes`` replace arguments of vLLM."""
    arguments = engine_arguments(rollout, True, model_folder, positions) | changes
    return Launch(COMMAND, arguments, environment(rollout, 0), log, start_seconds=500.0, token_seconds=120.0)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _InTurn(VllmSampler):
    """One of several samplers over one fleet."""

    last: "_InTurn | None" = None

    def take_turn(self) -> None:
        """Put this sampler's weights back, if another one has put its own there."""
        if _InTurn.last is not self and self._weights is not None:
            for replica, delivery in enumerate(self._weights.deliveries):
                delivery.deliver(self._fleet, replica, self._weights.version)
        _InTurn.last = self

    def submit(self, requests: Sequence[Request]) -> None:
        if not self._asleep:
            self.take_turn()
        super().submit(requests)

    def end(self) -> None:
        """Leave the engines as they were found."""
        self.abort(list(self._in_flight))
        wake = Wake(self._fleet.number(), ["weights", "cache"])
        self._fleet.replicas[0].ask(wake, DeviceMemory)


class SharedEngines:
    """One engine for each type of weights, with the tiny Beam of the contract."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fleets: dict[DType, Fleet] = {}
        self._samplers: list[_InTurn] = []
        model.save(random_beam(), folder / "model", "float32")

    def fleet(self, dtype: DType = "float32") -> Fleet:
        if dtype not in self._fleets:
            rollout = RolloutConfig(
                engine="vllm",
                record_support=True,
                top_k=1,
                vllm=VllmConfig(dtype=dtype, memory_share=0.2, max_sequences=64, engine_args={"enforce_eager": True}),
            )
            started = launch(self._folder / "model", self._folder / f"{dtype}.log", CONTEXT, rollout)
            self._fleets[dtype] = Fleet([started], 0, say)
        return self._fleets[dtype]

    def sampler(
        self,
        weights: nn.Module | None,
        slots: int = 4,
        seed: int = 0,
        threads: int = 1,
        *,
        lora: LoraShape | None = None,
        dtype: DType = "float32",
    ) -> SamplerBench:
        """Slots and threads are the engine's own affair."""
        if lora is not None:
            pytest.skip("vLLM serves no adapters of Beam yet")
        channel = LocalChannel()
        sampler = self._new(seed, channel, dtype)

        def give(module: nn.Module, version: int, unfinished: Unfinished) -> None:
            moves = plan(module_layout(module), sampler.layout("full"))
            channel.send(moves, named_tensors(module))
            sampler.take_turn()
            sampler.receive(moves, version, unfinished)

        if weights is not None:
            give(weights, 1, "keep")
        return SamplerBench(sampler, give)

    def pair(self, module: nn.Module, *, lora: LoraShape | None = None, **settings: Any) -> PairBench:
        if lora is not None:
            pytest.skip("vLLM serves no adapters of Beam yet")
        channel = LocalChannel()
        learner = torch_learner(module, channel=channel, **settings)
        sampler = self._new(0, channel, "float32")
        moves = plan(learner.layout("full"), sampler.layout("full"))

        def sync(version: int) -> None:
            learner.send(moves)
            sampler.take_turn()
            sampler.receive(moves, version, unfinished="abort")

        return PairBench(learner, sampler, sync)

    def end_test(self) -> None:
        """Leave the engines to the next test as they were found."""
        for sampler in self._samplers:
            sampler.end()
        self._samplers = []

    def close(self) -> None:
        for fleet in self._fleets.values():
            fleet.close()

    def _new(self, seed: int, channel: LocalChannel, dtype: DType) -> _InTurn:
        fleet = self.fleet(dtype)
        sampler = _InTurn(fleet, beam_shape(), Mesh(), dtype, CONTEXT, seed, channel, bucket_bytes=1 << 14)
        self._samplers.append(sampler)
        return sampler
