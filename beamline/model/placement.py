"""How an engine stores a checkpoint: which slice of which tensor lies where in which of its parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from beamline.model.beam import BeamShape, TensorSpec, tensors
from beamline.model.layout import DType, TensorSlice


@dataclass(frozen=True, slots=True)
class Placed:
    """``part`` lies in ``parameter[box]``; a stack of experts adds a first dimension to the box, 1 long.

    ``shape`` is that of the whole parameter.
    """

    part: TensorSlice
    parameter: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter and its parts, one after the other: along the rows and, in a stack, from expert to expert."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[TensorSlice, ...]

    def placed(self) -> Iterator[Placed]:
        """Each part with its box."""
        stacked, first = len(self.shape) == 3, 0
        for part in self.parts:
            expert, row = divmod(first, self.shape[1 if stacked else 0])
            box = (slice(row, row + part.size[0]), *(slice(0, n) for n in part.size[1:]))
            yield Placed(part, self.name, self.shape, (slice(expert, expert + 1), *box) if stacked else box)
            first += part.size[0]


def joined(parameter: str, *parts: TensorSlice) -> Held:
    """A parameter that is its parts one below the other."""
    rows, others = sum(part.size[0] for part in parts), parts[0].size[1:]
    return Held(parameter, (rows, *others), parts[0].dtype, parts)


def stacked(parameter: str, experts: int, parts: Sequence[TensorSlice]) -> Held:
    """A parameter that is a stack of experts, each of which is an equal number of parts one below the other."""
    whole = joined(parameter, *parts)
    rows, columns = whole.shape
    return Held(parameter, (experts, rows // experts, columns), whole.dtype, whole.parts)


@dataclass(frozen=True, slots=True)
class Cut:
    """Takes the slices of rank ``index`` of ``count`` out of the tensors of a checkpoint."""

    specs: Mapping[str, TensorSpec]
    index: int
    count: int

    def whole(self, name: str) -> TensorSlice:
        """All of a tensor, on every rank."""
        spec = self.specs[name]
        return TensorSlice.whole(spec.name, spec.dtype, spec.shape)

    def share(self, name: str, dim: int = 0, most: int | None = None) -> TensorSlice:
        """One of equal parts along a dimension: of ``count``, or of ``most`` if fewer, which neighbours then share."""
        count = min(self.count, most or self.count)
        size = self.specs[name].shape[dim] // count
        start = self.index * count // self.count * size
        return self._between(name, dim, start, start + size)

    def rows(self, name: str, start: int, stop: int) -> tuple[TensorSlice, ...]:
        """Those of the rows ``start:stop`` that there are."""
        stop = min(stop, self.specs[name].shape[0])
        return (self._between(name, 0, start, stop),) if start < stop else ()

    def _between(self, name: str, dim: int, start: int, stop: int) -> TensorSlice:
        spec = self.specs[name]
        starts, stops = [0] * len(spec.shape), list(spec.shape)
        starts[dim], stops[dim] = start, stop
        return TensorSlice(spec.name, spec.dtype, spec.shape, tuple(starts), tuple(stops))


@lru_cache(maxsize=1)
def specs(shape: BeamShape, dtype: DType) -> Mapping[str, TensorSpec]:
    """The checkpoint's tensors by name; kept for the next rank, since there are tens of thousands."""
    return {spec.name: spec for spec in tensors(shape, dtype)}
