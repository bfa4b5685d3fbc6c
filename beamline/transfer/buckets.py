"""Many parts of tensors in few large buckets: how they are cut, and how they are copied in and out."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from beamline.model.layout import DType, TensorSlice
from beamline.transfer.dtypes import TORCH_DTYPES

_ALIGNMENT = 16  # bytes; where another type begins, so that the buffer can be looked at as that type
_SAMPLED_PARTS = 64
_SAMPLED_ELEMENTS = 1 << 14  # of a part in a sample
_CHECKSUM_ELEMENTS = 1 << 24  # of a large part, so many are brought to the host at a time


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is handed over at a time: ``parts[i]``, row-major in its own ``dtype``, begins at byte ``offsets[i]``."""

    parts: tuple[TensorSlice, ...]
    offsets: tuple[int, ...]
    nbytes: int


def buckets(parts: Sequence[TensorSlice], limit: int) -> list[Bucket]:
    """Cut what a rank is given into buckets of at most ``limit`` bytes, in order.

    A part that is larger is cut into rows, or into smaller boxes where one row is too large. The same parts and limit
    give the same buckets everywhere, so that two sides need not tell each other.

    Raises:
        ValueError: a bucket would not hold a single element.
    """
    filled: list[Bucket] = []
    inside: list[TensorSlice] = []
    offsets: list[int] = []
    end = 0
    for piece in (piece for part in parts for piece in _cut(part, limit)):
        start = end if inside and inside[-1].dtype == piece.dtype else _aligned(end)
        if start + _nbytes(piece) > limit:
            filled.append(Bucket(tuple(inside), tuple(offsets), end))
            inside, offsets, start = [], [], 0
        inside.append(piece)
        offsets.append(start)
        end = start + _nbytes(piece)
    return [*filled, Bucket(tuple(inside), tuple(offsets), end)] if inside else filled


def _nbytes(part: TensorSlice) -> int:
    return prod(part.size) * TORCH_DTYPES[part.dtype].itemsize


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _cut(part: TensorSlice, limit: int) -> Iterator[TensorSlice]:
    """Boxes of at most ``limit`` bytes that lie in ``part`` one after the other, row-major."""
    if _nbytes(part) <= limit:
        yield part
        return
    d = next((d for d, n in enumerate(part.size) if n > 1), None)
    if d is None:
        raise ValueError(f"buckets of {limit} bytes hold no element of {part.name} ({part.dtype}); allow larger ones")
    step = max(1, limit // (_nbytes(part) // part.size[d]))
    for begin in range(part.start[d], part.stop[d], step):
        end = min(begin + step, part.stop[d])
        start = (*part.start[:d], begin, *part.start[d + 1 :])
        stop = (*part.stop[:d], end, *part.stop[d + 1 :])
        yield from _cut(replace(part, start=start, stop=stop), limit)


@dataclass(frozen=True, slots=True)
class _Run:
    """One copy: ``view`` on this side, ``dtype`` from byte ``offset`` on in the bucket. Without gaps it is flat."""

    view: Tensor
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.view.numel() * self.dtype.itemsize

    def joined(self, following: "_Run") -> "_Run | None":
        """The two as one, where they follow each other in the bucket and on this side."""
        mine, other = self.view, following.view
        alike = self.dtype == following.dtype and mine.dtype == other.dtype
        if not (alike and self.end == following.offset and _adjacent(mine, other)):
            return None
        return _Run(_flat(mine, mine.numel() + other.numel()), self.dtype, self.offset)


def _adjacent(first: Tensor, second: Tensor) -> bool:
    return (
        first.is_contiguous()
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def _flat(view: Tensor, size: int) -> Tensor:
    return view.as_strided((size,), (1,), view.storage_offset())


def _runs(bucket: Bucket, view_of: Callable[[TensorSlice], Tensor]) -> list[_Run]:
    runs: list[_Run] = []
    for part, offset in zip(bucket.parts, bucket.offsets, strict=True):
        view = view_of(part).detach()
        if tuple(view.shape) != part.size:
            box = f"{part.start}:{part.stop} of {part.name}"
            raise ValueError(f"the view of {box} has shape {tuple(view.shape)}, the part has {part.size}")
        if view.is_contiguous():
            view = _flat(view, view.numel())
        run = _Run(view, TORCH_DTYPES[part.dtype], offset)
        joined = runs[-1].joined(run) if runs else None
        if joined is None:
            runs.append(run)
        else:
            runs[-1] = joined
    return runs


@dataclass(slots=True)
class _Alike:
    """Copies that one kernel can do: one type here, one in the bucket, one device, all flat or none."""

    dtype: torch.dtype
    views: list[Tensor]
    offsets: list[int]

    def within(self, buffer: Tensor) -> list[Tensor]:
        """The places of the views in a bucket's buffer, in their shapes."""
        itemsize = self.dtype.itemsize
        typed = buffer[: len(buffer) // itemsize * itemsize].view(self.dtype)
        starts = (offset // itemsize for offset in self.offsets)
        return [
            typed.narrow(0, start, view.numel()).view(view.shape)
            for start, view in zip(starts, self.views, strict=True)
        ]


class Copier:
    """Copies between a bucket and where its parts lie on this side; prepared once, used at every sync.

    ``view_of`` gives the view of a part on this side, in the part's shape, with any strides, of any type and on any
    device. The memory must stay where it is for as long as the copier is used. Parts that follow each other here as in
    the bucket are one copy: a stack of experts is.

    Copies to or from a CUDA device are queued on its current stream: synchronize before another process is told.

    Raises:
        ValueError: a view does not have its part's shape.
    """

    def __init__(self, bucket: Bucket, view_of: Callable[[TensorSlice], Tensor]) -> None:
        runs = _runs(bucket, view_of)
        self.copies = len(runs)
        self._nbytes = bucket.nbytes
        # On CUDA torch._foreach_copy_ copies a list in a few kernels if its types and devices are the same throughout
        # and no strides differ between the sides; one tensor that is unlike the others makes it copy them singly.
        groups: dict[tuple[object, ...], list[_Run]] = defaultdict(list)
        for run in runs:
            groups[run.dtype, run.view.dtype, run.view.device, run.view.is_contiguous()].append(run)
        self._groups = [
            _Alike(group[0].dtype, [run.view for run in group], [run.offset for run in group])
            for group in groups.values()
        ]

    def pack(self, buffer: Tensor) -> None:
        """Fill ``buffer`` (uint8, at least as long as the bucket) with the parts, cast to their types on the wire.

        Raises:
            ValueError: it is no such buffer.
        """
        self._check(buffer)
        for group in self._groups:
            torch._foreach_copy_(group.within(buffer), group.views)

    def unpack(self, buffer: Tensor) -> None:
        """Copy every part from ``buffer`` to its place, cast to the type that it has there.

        Raises:
            ValueError: the buffer is not uint8, or shorter than the bucket.
        """
        self._check(buffer)
        for group in self._groups:
            torch._foreach_copy_(group.views, group.within(buffer))

    def _check(self, buffer: Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or len(buffer) < self._nbytes:
            found = f"{buffer.dtype} {tuple(buffer.shape)}"
            raise ValueError(
                f"a bucket of {self._nbytes} bytes needs a flat uint8 buffer at least as long, not {found}"
            )


def samples(rank: Sequence[Sequence[TensorSlice]]) -> list[list[TensorSlice]]:
    """A fixed sample of what a destination rank is given, some 64 parts in all, by source rank.

    Both sides hold their checksums against each other. Every source that gives anything is in it.
    """
    givers = sum(map(bool, rank))
    return [sample(share, max(2, _SAMPLED_PARTS // givers)) if share else [] for share in rank]


def sample(parts: Sequence[TensorSlice], most: int) -> list[TensorSlice]:
    """The beginnings of the first part, the last and others evenly between, ``most`` at most.

    Raises:
        ValueError: ``most`` leaves no room for the first and the last.
    """
    if most < 2:
        raise ValueError(f"a sample has its first and its last part: most must be 2 or more, not {most}")
    if len(parts) <= most:
        return [_beginning(part) for part in parts]
    return [_beginning(parts[i * (len(parts) - 1) // (most - 1)]) for i in range(most)]


def _beginning(part: TensorSlice) -> TensorSlice:
    """The first rows of a part (or of its first row), of at most so many elements as are quickly looked at."""
    return next(_cut(part, _SAMPLED_ELEMENTS * TORCH_DTYPES[part.dtype].itemsize))


def checksum(view: Tensor, dtype: DType) -> int:
    """CRC32 of the elements of ``view``, cast to ``dtype``, row-major; the same on every device and for all strides."""
    crc = 0
    rows = torch.atleast_1d(view.detach())
    for some in rows.split(max(1, _CHECKSUM_ELEMENTS // rows[0].numel())):
        values = some.to(TORCH_DTYPES[dtype]).contiguous().cpu()
        crc = zlib.crc32(_flat(values, values.numel()).view(torch.uint8).numpy().data, crc)
    return crc
