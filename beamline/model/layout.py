"""Which rank holds which part of which tensor. Names are Hugging Face checkpoint names."""

from dataclasses import dataclass, replace
from typing import Literal

WeightKind = Literal["full", "adapter"]
DType = Literal["float32", "bfloat16", "float16", "uint8"]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box inside the tensor ``name`` of full shape ``shape``: along dimension d, ``start[d]:stop[d]``.

    Raises:
        ValueError: the box is empty or leaves the tensor.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = zip(self.start, self.stop, self.shape, strict=True)
        if not all(0 <= a < b <= n for a, b, n in sizes):
            raise ValueError(f"slice {self.start}:{self.stop} of {self.name} {self.shape} is empty or out of bounds")

    @classmethod
    def whole(cls, name: str, dtype: DType, shape: tuple[int, ...]) -> "TensorSlice":
        """The slice that is the whole tensor."""
        return cls(name, dtype, shape, (0,) * len(shape), shape)

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the box in the whole tensor."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: "TensorSlice") -> "TensorSlice | None":
        """The part that two slices of one tensor share, or None.

        Raises:
            ValueError: the slices belong to different tensors, or disagree on its full shape.
        """
        if (self.name, self.shape) != (other.name, other.shape):
            raise ValueError(f"{self.name} {self.shape} and {other.name} {other.shape} are not the same tensor")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return TensorSlice(self.name, self.dtype, self.shape, start, stop)

    def without(self, hole: "TensorSlice") -> "list[TensorSlice]":
        """Disjoint boxes that cover this one but for ``hole``, which lies inside it."""
        boxes, rest = [], self
        for d, (start, stop) in enumerate(zip(hole.start, hole.stop, strict=True)):
            if rest.start[d] < start:
                boxes.append(replace(rest, stop=_with(rest.stop, d, start)))
            if stop < rest.stop[d]:
                boxes.append(replace(rest, start=_with(rest.start, d, stop)))
            rest = replace(rest, start=_with(rest.start, d, start), stop=_with(rest.stop, d, stop))
        return boxes

    def within(self, outer: "TensorSlice") -> tuple[slice, ...]:
        """Index of this box inside a buffer that holds ``outer``."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


@dataclass(frozen=True, slots=True)
class Layout:
    """``ranks[r]`` are the slices that rank r holds; a tensor that several ranks hold is a replica in each."""

    ranks: tuple[tuple[TensorSlice, ...], ...]
