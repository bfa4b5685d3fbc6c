"""Engine processes for the contract of samplers. Samplers take turns, each with its own weights."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
from torch import nn

from beamline.model.layout import DType
from beamline.model.lora import LoraShape
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Completion, Key, Request
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.layout import Mesh
from beamline.rollout.vllm.messages import Submit, Wake
from beamline.rollout.vllm.replica import Launch
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.runtime.vllm import say
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors
from tests.contract.engines import PairBench, SamplerBench, Unfinished, torch_learner
from tests.tiny_beam import CONTEXT, beam_shape

BUCKET_BYTES = 1 << 14


class InTurn(VllmSampler):
    """One of several samplers over one fleet.

    An engine may wait when something has ended, as ``tests/cpu_engine.py`` does if it is told to. It goes on with the
    next submission, or with the poll after the one that has returned what ended.
    """

    last: "InTurn | None" = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._waiting = set[int]()

    def take_turn(self) -> None:
        """Put this sampler's weights back, if another one has put its own there."""
        if InTurn.last is not self and self._weights is not None:
            for replica, delivery in enumerate(self._weights.deliveries):
                delivery.deliver(self._fleet, replica, self._weights.version)
        InTurn.last = self

    def submit(self, requests: Sequence[Request]) -> None:
        if not self._asleep:
            self.take_turn()
        self._go_on()
        super().submit(requests)

    def poll(self, timeout: float) -> list[Completion]:
        self._go_on()
        return self._ended(lambda: super(InTurn, self).poll(timeout))

    def abort(self, keys: Collection[Key]) -> list[Completion]:
        return self._ended(lambda: super(InTurn, self).abort(keys))

    def end(self) -> None:
        """Leave the engines as they were found."""
        self.abort(list(self._in_flight))
        self._ask_all(lambda number: Wake(number, ["weights", "cache"]))
        self._close_deliveries()

    def _ended(self, action: Callable[[], list[Completion]]) -> list[Completion]:
        flights = self._in_flight.copy()
        completions = action()
        self._waiting |= {flights[completion.key].replica for completion in completions}
        return completions

    def _go_on(self) -> None:
        for replica in self._waiting:
            self._fleet.replicas[replica].send(Submit([]))
        self._waiting = set()


class SharedEngines:
    """A fleet for each type of weights, of engines with the tiny Beam of the contract.

    Args:
        launches: how the engines of a fleet are started.
        mesh: the ranks of each.
        max_restarts: of a fleet.
    """

    def __init__(
        self, launches: Callable[[DType], Iterable[Launch]], mesh: Mesh | None = None, max_restarts: int = 0
    ) -> None:
        self._launches, self._mesh, self._max_restarts = launches, mesh or Mesh(), max_restarts
        self._fleets: dict[DType, Fleet] = {}
        self._samplers: list[InTurn] = []

    def fleet(self, dtype: DType = "float32") -> Fleet:
        if dtype not in self._fleets:
            self._fleets[dtype] = Fleet(list(self._launches(dtype)), self._max_restarts, say)
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
        bucket_bytes: int = BUCKET_BYTES,
        group_seconds: float | None = None,
    ) -> SamplerBench:
        """Slots and threads are the engine's own affair."""
        if lora is not None:
            pytest.skip("vLLM serves no adapters of Beam yet")
        channel = LocalChannel()
        sampler = self._new(seed, channel, dtype, bucket_bytes, group_seconds)

        def give(module: nn.Module, version: int, unfinished: Unfinished) -> None:
            moves = plan(module_layout(module), sampler.layout("full"))
            channel.send(moves, Tensors(named_tensors(module)))
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
        sampler = self._new(0, channel, "float32", BUCKET_BYTES)
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

    def _new(
        self, seed: int, channel: LocalChannel, dtype: DType, bucket_bytes: int, group_seconds: float | None = None
    ) -> InTurn:
        fleet = self.fleet(dtype)
        sampler = InTurn(fleet, beam_shape(), self._mesh, dtype, CONTEXT, seed, channel, bucket_bytes, group_seconds)
        self._samplers.append(sampler)
        return sampler
