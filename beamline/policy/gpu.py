"""Kernels of our own for a GPU, for what torch does there by a detour. Triton is where GPUs are: import it late."""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS, _BLOCK = 64, 4096  # of a group, and elements that a program writes at a time


def clear_empty(groups: Tensor, ends: Tensor) -> None:
    """Fill ``groups[g]`` with 0 where ``ends[g] == ends[g - 1]``; ``groups`` are contiguous, of any shape.

    A pass over all of the memory, for the few that are empty, would cost a twentieth of an update.
    """
    size = groups[0].numel()
    cast(Any, _clear)[(len(groups), _PROGRAMS)](groups, ends, size, _PROGRAMS, _BLOCK)


def inverse(order: Tensor) -> Tensor:
    """``places`` with ``places[order[i]] == i``, for an order of all rows, int64.

    Where algorithms have to be deterministic torch sorts the rows first, because they might repeat.
    """
    places = torch.empty_like(order)
    cast(Any, _invert)[(triton.cdiv(len(order), _BLOCK),)](order, places, len(order), _BLOCK)
    return places


@triton.jit  # type: ignore[untyped-decorator]
def _clear(groups, ends, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0)
    before = tl.load(ends + group - 1, mask=group > 0, other=0)
    if before == tl.load(ends + group):
        first = group.to(tl.int64) * size
        for start in range(tl.program_id(1) * BLOCK, size, PROGRAMS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(groups + first + at, 0.0, mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def _invert(order, places, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(places + tl.load(order + at, mask=at < size, other=0), at.to(tl.int64), mask=at < size)
