"""Where weights come from: what a learner offers, and what one of its ranks hands over bucket by bucket."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from beamline.model.layout import TensorSlice
from beamline.transfer.buckets import Copier, buckets, checksum, samples
from beamline.transfer.dtypes import DTYPE_NAMES
from beamline.transfer.group import Group, Meeting
from beamline.transfer.memory import SharedMemory, attach, gpu_of, memory_for
from beamline.transfer.plan import Shares, TransferPlan, shares_of

SLOTS = 2  # buckets under way between two ranks: one is packed while another is taken
_BUCKET_BYTES = 1 << 26  # between processes of which one is a sampler itself


@dataclass(frozen=True, slots=True)
class _InGroup:
    """The group that a source rank is in with those of its destination, which have the numbers from ``sources`` on."""

    group: Group
    sources: int
    buffer: Tensor


class Packer:
    """What one source rank hands over to the ranks of a destination; see :class:`Supply`.

    Args:
        shares: of all ranks.
        source: the number of this one.
        view_of: the place of a part in this process, in the part's shape.
        device: where all parts are.
        bucket_bytes: most bytes of a bucket.
    """

    def __init__(
        self,
        shares: Shares,
        source: int,
        view_of: Callable[[TensorSlice], Tensor],
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self._view_of, self._device, own = view_of, device, [rank[source] for rank in shares]
        cut = [buckets(share, bucket_bytes) for share in own]
        self._copiers = [[Copier(bucket, view_of) for bucket in each] for each in cut]
        self._nbytes = [[bucket.nbytes for bucket in each] for each in cut]
        self._sizes = [max(each, default=0) for each in self._nbytes]
        self._samples = [samples(rank)[source] for rank in shares]
        self._memory: list[list[SharedMemory]] = []
        self._source = source
        self._in_group: _InGroup | None = None
        self.rounds = max(map(len, cut), default=0)

    def take_memory(self, gpus: Sequence[Collection[str]]) -> None:
        """Take two slots for each destination rank that is given anything."""
        self.close()
        for nbytes, seen in zip(self._sizes, gpus, strict=True):
            self._memory.append([memory_for(nbytes, self._device, seen) for _ in range(SLOTS)] if nbytes else [])

    def pack(self, number: int) -> list[bytes]:
        """Fill the bucket of this number for each destination rank; empty for ranks that have no so many."""
        described = [
            self._packed(copiers[number], slots[number % SLOTS]) if number < len(copiers) else b""
            for copiers, slots in zip(self._copiers, self._memory, strict=True)
        ]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return described

    def gpu(self) -> str:
        """The UUID of the GPU that the weights are on; empty where they are on none."""
        return gpu_of(self._device)

    def join(self, meeting: Meeting) -> None:
        """Meet the ranks of the destination in a group, and take memory for one bucket.

        Raises:
            TransferError: they are not there in time.
        """
        self.close()
        place = self._device if meeting.backend == "nccl" else torch.device("cpu")
        buffer = torch.empty(max(self._sizes, default=0), dtype=torch.uint8, device=place)
        self._in_group = _InGroup(meeting.join(self._source), meeting.sources, buffer)

    def send(self, number: int) -> None:
        """Send the bucket of this number to each destination rank that has so many, in their order.

        Raises:
            TransferError: one has ended, or does not take it in time.
        """
        place = self._in_group
        assert place is not None
        for destination, (copiers, nbytes) in enumerate(zip(self._copiers, self._nbytes, strict=True)):
            if number < len(copiers):
                bucket = place.buffer[: nbytes[number]]
                copiers[number].pack(bucket)
                place.group.send(bucket, place.sources + destination)

    def checksums(self) -> list[list[int]]:
        """For each destination rank, of the sample of what this one gives it."""
        return [[checksum(self._view_of(part), part.dtype) for part in sampled] for sampled in self._samples]

    def close(self) -> None:
        """Give the memory back, and leave the group."""
        for slot in chain.from_iterable(self._memory):
            slot.close()
        if self._in_group is not None:
            self._in_group.group.close()
        self._memory, self._in_group = [], None

    @staticmethod
    def _packed(copier: Copier, slot: SharedMemory) -> bytes:
        copier.pack(slot.buffer)
        return slot.descriptor


class Supply:
    """The way of weights into the ranks of one destination; found once, used at every sync.

    In round b each source rank packs its bucket b for every destination rank that has so many, all of them at the same
    time: into memory that both see (:meth:`take_memory`, :meth:`pack`), where a bucket may be written over two rounds
    later, or to be sent through a group (:meth:`join`, :meth:`send`).

    Args:
        rounds: that it takes.
        on_ranks: what a method of each source rank's :class:`Packer` gives, by its name and arguments, in their order.
        end: closes them.
    """

    def __init__(self, rounds: int, on_ranks: Callable[..., list[Any]], end: Callable[[], Any]) -> None:
        self.rounds, self._on_ranks, self._end = rounds, on_ranks, end

    def take_memory(self, gpus: Sequence[Collection[str]]) -> None:
        """Take new memory for buckets: that of a GPU has one reader in all its life.

        ``gpus[d]`` are those that destination rank d sees, by UUID: buckets for it lie on the source's GPU if that is
        one of them, and else in the memory of the host.

        Raises:
            TransferError: the machine has not so much memory left.
        """
        self._on_ranks("take_memory", gpus)

    def pack(self, number: int) -> list[list[bytes]]:
        """Round ``number``: ``[destination][source]`` describes the memory of a bucket; empty where there is none."""
        return [list(rank) for rank in zip(*self._on_ranks("pack", number), strict=True)]

    def gpus(self) -> list[str]:
        """The UUID of each source rank's GPU; empty where it has none."""
        return self._on_ranks("gpu")

    def join(self, meeting: Meeting) -> None:
        """Have the source's ranks meet those of the destination in a group.

        Raises:
            TransferError: they are not there in time.
        """
        self._on_ranks("join", meeting)

    def send(self, number: int) -> None:
        """Round ``number``: each source rank sends to each destination rank that has so many buckets, in their order.

        A destination rank takes them in the order of source ranks; so nobody waits in a circle.

        Raises:
            TransferError: a rank of the destination has ended, or does not take it in time.
        """
        self._on_ranks("send", number)

    def checksums(self) -> list[list[int]]:
        """Of :func:`~beamline.transfer.buckets.samples` of what each destination rank is given, as it is now."""
        return [list(chain.from_iterable(rank)) for rank in zip(*self._on_ranks("checksums"), strict=True)]

    def close(self) -> None:
        """Give the memory back; it is of no use any more."""
        self._end()


class Source(Protocol):
    """What a learner offers: the weights of its ranks, which never leave these but in buckets.

    ``size`` is the number of ranks.
    """

    size: int

    def not_finite(self, plan: TransferPlan) -> str | None:
        """The name of a tensor of the plan that holds a value that is not finite."""

    def supply(self, shares: Shares, bucket_bytes: int) -> Supply:
        """A way for what each rank of a destination is given by each rank of this source.

        Args:
            shares: as :func:`~beamline.transfer.plan.shares_of` gives them.
            bucket_bytes: most bytes that are handed over at a time, from a rank to a rank.

        Raises:
            ValueError: a bucket would not hold a single element.
        """

    def copy(self, plan: TransferPlan, tensors: Mapping[str, Tensor]) -> None:
        """Copy every planned slice into tensors of this process, cast to their types."""


class Tensors:
    """Whole tensors of this process on one device, by Hugging Face name, as the only rank of a source."""

    size = 1

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named

    def not_finite(self, plan: TransferPlan) -> str | None:
        """See :class:`Source`."""
        return first_not_finite({name: self._named[name] for name in names_of(plan)})

    def supply(self, shares: Shares, bucket_bytes: int) -> Supply:
        """See :class:`Source`."""
        device = next(iter(self._named.values())).device
        packer = Packer(shares, 0, lambda part: self._named[part.name][part.index], device, bucket_bytes)
        return Supply(packer.rounds, lambda name, *arguments: [getattr(packer, name)(*arguments)], packer.close)

    def copy(self, plan: TransferPlan, tensors: Mapping[str, Tensor]) -> None:
        """See :class:`Source`. Without buckets: both are here."""
        for move in plan.moves:
            name, index = move.part.name, move.part.index
            tensors[name][index].copy_(self._named[name][index])


def copy_through_buckets(source: Source, plan: TransferPlan, tensors: Mapping[str, Tensor]) -> None:
    """Copy every planned slice from ranks of other processes into tensors of this one, by memory of the host."""
    shares = shares_of(plan, source.size, 1, {name: DTYPE_NAMES[tensor.dtype] for name, tensor in tensors.items()})
    supply = source.supply(shares, _BUCKET_BYTES)
    try:
        supply.take_memory([()])
        cut = [buckets(share, _BUCKET_BYTES) for share in shares[0]]
        for number in range(supply.rounds):
            for each, descriptor in zip(cut, supply.pack(number)[0], strict=True):
                if descriptor:
                    memory = attach(descriptor)
                    Copier(each[number], lambda part: tensors[part.name][part.index]).unpack(memory.buffer)
                    memory.close()
    finally:
        supply.close()


def names_of(plan: TransferPlan) -> list[str]:
    """The tensors of which a plan moves anything, each once."""
    return list(dict.fromkeys(move.part.name for move in plan.moves))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a value that is not finite."""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
