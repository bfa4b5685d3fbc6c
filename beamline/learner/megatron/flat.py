"""Parameters in flat memory: one buffer of weights and one of gradients, of which each data rank owns an equal part."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_gather_into_tensor, reduce_scatter_tensor

from beamline.model.layout import DType, TensorSlice
from beamline.model.placement import Held
from beamline.policy.fused import fused
from beamline.transfer.dtypes import TORCH_DTYPES

ALIGNED = 64
"""Elements at which parameters and parts begin and end: 128 bytes of BF16, which kernels like."""


class Kind(NamedTuple):
    """What decides how a parameter is treated.

    ``expert``: spread over other ranks than the rest. ``shared``: tensor ranks hold it alike, each for its own rows.
    """

    dtype: DType
    expert: bool
    shared: bool
    decayed: bool

    @classmethod
    def of(cls, held: Held) -> "Kind":
        """By what it holds: all of a tensor that is no expert's is held alike by all tensor ranks."""
        expert = len(held.shape) == 3
        shared = not expert and all(part.size == part.shape for part in held.parts)
        return cls(held.dtype, expert, shared, len(held.shape) > 1)


class Flat:
    """The parameters of one kind, in one buffer of weights, of which each rank of ``ranks`` owns an equal part.

    Gradients are added up in another buffer, which is float32: a sum of many micro-batches in 16 bits would lose the
    small ones.

    Args:
        held: what the parameters are, in the order of their memory.
        ranks: those that hold the same parameters, each for other data.
        device: where they lie.
    """

    def __init__(self, kind: Kind, held: Sequence[Held], ranks: ProcessGroup, device: torch.device) -> None:
        self.kind, self._held, self._ranks = kind, held, ranks
        sizes = [_up(prod(each.shape), ALIGNED) for each in held]
        self._starts = [0, *accumulate(sizes)]
        total = _up(self._starts[-1], ALIGNED * ranks.size())
        self.weights = torch.zeros(total, dtype=TORCH_DTYPES[kind.dtype], device=device)
        self.gradients = torch.zeros(0, device=device)
        self._own = slice(ranks.rank() * total // ranks.size(), (ranks.rank() + 1) * total // ranks.size())
        views = (
            self.weights[a : a + prod(each.shape)].view(each.shape) for a, each in zip(self._starts, held, strict=False)
        )
        self.parameters = {each.name: nn.Parameter(view) for each, view in zip(held, views, strict=True)}

    def train(self) -> None:
        """Take memory for gradients, which from here on are added up there."""
        self.gradients = torch.zeros_like(self.weights, dtype=torch.float32)
        for start, parameter in zip(self._starts, self.parameters.values(), strict=False):
            total = self.gradients[start : start + parameter.numel()].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(_adder(total))

    @property
    def own_weights(self) -> Tensor:
        """The elements that this rank updates."""
        return self.weights[self._own]

    @property
    def own_gradients(self) -> Tensor:
        """Their gradients; those of all ranks after :meth:`sum_gradients`."""
        return self.gradients[self._own]

    def sum_gradients(self) -> None:
        """Add up the gradients of all ranks, each for what it owns."""
        if self._ranks.size() > 1:
            reduce_scatter_tensor(self.own_gradients, self.gradients, group=self._ranks)

    def share_weights(self) -> None:
        """Give all ranks what each has updated."""
        if self._ranks.size() > 1:
            all_gather_into_tensor(self.weights, self.own_weights, group=self._ranks)

    def owned(self) -> Iterator[tuple[TensorSlice, int, int]]:
        """What this rank owns of the checkpoint's tensors: each box, and where it lies in what is owned."""
        for start, held in zip(self._starts, self._held, strict=False):
            for part in held.parts:
                size = prod(part.size)
                for box, first in boxes(part, self._own.start - start, self._own.stop - start):
                    at = start + first - self._own.start
                    yield box, at, at + prod(box.size)
                start += size


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    """Adds a parameter's gradient to its sum. It must not hold the parameter, whose hooks Python cannot look into."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if total.numel() % ALIGNED:
            total.add_(parameter.grad)
        else:
            _add(total.view(-1, ALIGNED), parameter.grad.reshape(-1, ALIGNED))
        parameter.grad = None

    return add


@fused()
def _add(total: Tensor, part: Tensor) -> None:
    total.add_(part)


def _up(number: int, unit: int) -> int:
    """The next multiple of a unit."""
    return ceil(number / unit) * unit


def boxes(part: TensorSlice, start: int, stop: int) -> Iterator[tuple[TensorSlice, int]]:
    """The elements ``start:stop`` of a matrix or vector in row order, as boxes, each with the first element of it.

    Borders outside of it are moved to its ends. There are three boxes at most: the rest of a row, rows, part of a row.
    """
    start, stop = max(0, start), min(stop, prod(part.size))
    width = part.size[-1]
    while start < stop:
        row, column = divmod(start, width)
        if len(part.size) == 1:
            rows, columns = None, (start, stop)
        elif column or stop - start < width:
            rows, columns = (row, row + 1), (column, min(width, column + stop - start))
        else:
            rows, columns = (row, stop // width), (0, width)
        ranges = [columns] if rows is None else [rows, columns]
        yield (
            replace(
                part,
                start=tuple(s + a for s, (a, _) in zip(part.start, ranges, strict=True)),
                stop=tuple(s + b for s, (_, b) in zip(part.start, ranges, strict=True)),
            ),
            start,
        )
        start += prod(b - a for a, b in ranges)
