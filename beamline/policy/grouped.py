"""Matrix products over groups of rows, one matrix a group, and over all rows for a single matrix."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(rows: Tensor, weight_EOI: Tensor, ends: Tensor | None) -> Tensor:
    """``rows[p] @ weight[e]^T`` for ``ends[e - 1] <= p < ends[e]``, with a gradient; of all rows with a single weight.

    There may be no rows at all.
    """
    if len(weight_EOI) == 1:
        return rows @ weight_EOI[0].T
    return cast(Tensor, cast(Any, _Linear).apply(rows, weight_EOI, ends))


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor | None) -> Tensor:
    """``rows[p] @ matrices[g]`` for ``ends[g - 1] <= p < ends[g]``, or of all rows with the one matrix that there is.

    ``rows`` is ``[R, in]``, ``matrices`` ``[groups, in, out]``, and ``ends`` int32, None for one matrix.
    """
    return rows @ matrices[0] if len(matrices) == 1 else F.grouped_mm(rows, matrices, offs=ends)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor | None, groups: int) -> Tensor:
    """``left^T @ right`` over the rows of each group, ``[groups, L, R]``; over all rows for one group."""
    return (left.T @ right)[None] if groups == 1 else F.grouped_mm(left.T, right, offs=ends)


class _Linear(torch.autograd.Function):
    """An expert without rows has the gradient 0, exactly.

    torch's grouped product leaves that memory as it was on some GPUs, and need not take no rows at all.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_EOI: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight_EOI, ends)
        if not len(rows):
            return rows.new_zeros(0, weight_EOI.shape[1])
        return grouped_product(rows, weight_EOI.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight_EOI, ends = ctx.saved_tensors
        if not len(rows):
            return torch.zeros_like(rows), torch.zeros_like(weight_EOI), None
        grad = grad.contiguous()
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = grouped_outer(grad, rows, ends, len(weight_EOI))
            _clear_empty(weight_grad, ends)
        return grouped_product(grad, weight_EOI, ends), weight_grad, None


def _clear_empty(groups: Tensor, ends: Tensor) -> None:
    if groups.is_cuda:
        from beamline.policy.gpu import clear_empty

        clear_empty(groups, ends)
    else:
        groups.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
