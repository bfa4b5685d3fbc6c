"""An engine process without vLLM that computes: ``python tests/cpu_engine.py [--waits] [--fault NAME] ... FD``.

The embedded sampler draws, with weights that come the way that they come into vLLM. Like that one it goes on by itself
between two words of its controller; ``--waits`` stops it when something has ended, until the next word.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from beamline.model.beam import BeamShape
from beamline.model.layout import TensorSlice
from beamline.records import Completion, Key
from beamline.rollout.local import LocalSampler, Numerics
from beamline.rollout.vllm.messages import Asked, DeviceMemory, Loaded, Memory, Prepared, Started
from beamline.rollout.vllm.process import attach, serve
from beamline.transfer.buckets import Bucket, Copier, buckets, checksum, samples
from beamline.transfer.dtypes import TORCH_DTYPES
from beamline.transfer.group import Group, Meeting
from beamline.transfer.local import LocalChannel
from beamline.transfer.memory import attach as attach_memory
from beamline.transfer.plan import Shares, plan
from beamline.transfer.source import Tensors
from tests.stub_engine import FAULTS, MEMORY

PROGRAM = (sys.executable, str(Path(__file__)))
SLOTS = 64
GARBLED = "lm_head.weight"


def internal_key(seed: int) -> Key:
    """What the embedded sampler knows a request by; its random stream depends on nothing else."""
    return Key("train", 0, str(seed), 0)


class CpuEngine:
    """Implements :class:`beamline.rollout.vllm.process.Engine`.

    It stands for engines of any mesh: whatever their ranks are given is put together into whole tensors.

    Args:
        options: how it fails.
        arguments: ``model``: its folder; ``rope_theta``; ``positions``; ``dtype``; ``mesh``: the fields of a Mesh.
    """

    def __init__(self, options: argparse.Namespace, arguments: Mapping[str, Any]) -> None:
        self._options, self._calls, self._channel = options, 0, LocalChannel()
        shape, dtype = BeamShape.from_folder(Path(arguments["model"])), arguments["dtype"]
        theta, positions = arguments["rope_theta"], arguments["positions"]
        self._sampler = LocalSampler(shape, Numerics(dtype), theta, SLOTS, positions, 0, self._channel)
        self._layout = self._sampler.layout("full")
        # Where weights arrive. Tokens are drawn from them once all have.
        self._arrived = {
            each.name: torch.empty(each.shape, dtype=TORCH_DTYPES[each.dtype]) for each in self._layout.ranks[0]
        }
        self._asked: dict[Key, Key] = {}
        self._awake = set[Memory](get_args(Memory))
        self._shares: Shares = []
        self._buckets: list[list[list[Bucket]]] = []
        self._copiers: list[list[list[Copier]]] = []
        self._groups: list[Group] = []
        self._loading, self._may_step = False, True
        self.started = Started({"torch": str(torch.__version__)}, "cpu", SLOTS * positions, 0.0)

    @property
    def busy(self) -> bool:
        return bool(self._asked) and not self._loading and self._may_step

    def submit(self, asked: Sequence[Asked]) -> None:
        """Begin with requests. None at all is a word, too."""
        self._may_step = True
        self._asked |= {internal_key(each.seed): each.request.key for each in asked}
        self._sampler.submit([replace(each.request, key=internal_key(each.seed)) for each in asked])

    def step(self) -> tuple[list[Completion], int]:
        assert not self._loading, "a step while weights arrive"
        self._fail("step")
        ended = self._sampler.poll(0.0)
        self._may_step = not (ended and self._options.waits)
        return self._renamed(ended), 1

    def abort(self, keys: Collection[Key]) -> list[Completion]:
        return self._renamed(self._sampler.abort([mine for mine, key in self._asked.items() if key in keys]))

    def prepare(self, shares: Shares, bucket_bytes: int) -> Prepared:
        self._shares = shares
        self._buckets = [[buckets(share, bucket_bytes) for share in rank] for rank in shares]
        self._copiers = [[[Copier(each, self._place) for each in cut] for cut in rank] for rank in self._buckets]
        return Prepared([[] for _ in shares])

    def join(self, meeting: Meeting) -> None:
        numbers = range(meeting.sources, meeting.size)
        with ThreadPoolExecutor(len(numbers)) as pool:  # each waits for all
            self._groups = list(pool.map(meeting.join, numbers))

    def fill(self, bucket: int, memory: Sequence[Sequence[bytes]] | None) -> None:
        if not self._loading:
            for each in self._arrived.values():
                each.fill_(torch.nan)  # what does not arrive is noticed
        self._loading = True
        self._fail("fill")
        if memory is None:
            self._receive(bucket)
            return
        pairs = (zip(*rank, strict=True) for rank in zip(self._copiers, memory, strict=True))
        for copiers, descriptor in chain.from_iterable(pairs):
            assert bool(descriptor) == (bucket < len(copiers)), f"bucket {bucket} of {len(copiers)}"
            if descriptor:
                shared = attach_memory(descriptor)
                copiers[bucket].unpack(shared.buffer)
                shared.close()

    def _receive(self, number: int) -> None:
        for group, of_rank, copiers in zip(self._groups, self._buckets, self._copiers, strict=True):
            for source, cut in enumerate(of_rank):
                if number < len(cut):
                    buffer = torch.empty(cut[number].nbytes, dtype=torch.uint8)
                    group.receive(buffer, source)
                    copiers[source][number].unpack(buffer)

    def finish(self, version: int) -> Loaded:
        self._fail("finish")
        if self._options.fault == "garble":
            self._arrived[GARBLED].zero_()
        moves = plan(self._layout, self._layout)
        self._channel.send(moves, Tensors(self._arrived))
        self._sampler.receive(moves, version, "keep")
        self._loading = False
        held = cast(Any, self._sampler)._decoder.named
        return Loaded(
            [
                [checksum(held[part.name][part.index], part.dtype) for part in chain.from_iterable(samples(rank))]
                for rank in self._shares
            ]
        )

    def sleep(self, level: int) -> DeviceMemory:
        self._sampler.sleep(level)
        return self._memory(self._awake - {"cache"} if level == 1 else set())

    def wake(self, what: Collection[Memory]) -> DeviceMemory:
        self._sampler.wake(what)
        return self._memory(self._awake | set(what))

    def stop(self) -> None:
        self._sampler.close()

    def _place(self, part: TensorSlice) -> Tensor:
        return self._arrived[part.name][part.index]

    def _renamed(self, completions: Sequence[Completion]) -> list[Completion]:
        return [replace(each, key=self._asked.pop(each.key)) for each in completions]

    def _memory(self, awake: set[Memory]) -> DeviceMemory:
        before, self._awake = self._awake, awake
        return DeviceMemory(sum(MEMORY[each] for each in before), sum(MEMORY[each] for each in awake), 0.0)

    def _fail(self, at: str) -> None:
        """Fail if it is time to, and this is not an engine that takes the place of one that has."""
        options = self._options
        if options.fault not in FAULTS or options.at != at:
            return
        self._calls += 1
        if self._calls > options.after and (options.once is None or _made(options.once)):
            FAULTS[options.fault]()


def _made(path: Path) -> bool:
    """Whether the file was not there; now it is."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--waits", action="store_true", help="when something has ended, for the next submission")
    parser.add_argument("--fault", choices=[*FAULTS, "garble"], help="garble: of weights")
    parser.add_argument("--at", choices=["step", "fill", "finish"], default="step", help="where it fails")
    parser.add_argument("--after", type=int, default=0, help="calls before the fault")
    parser.add_argument("--once", type=Path, help="fail only if there is no such file yet, which is made then")
    parser.add_argument("descriptor", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    build: Callable[[dict[str, Any]], CpuEngine] = lambda arguments: CpuEngine(options, arguments)  # noqa: E731
    serve(attach(options.descriptor), build)


if __name__ == "__main__":
    main()
