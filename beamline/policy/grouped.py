"""Matrix products over groups of rows, one matrix a group, and over all rows for a single matrix."""

import torch.nn.functional as F
from torch import Tensor


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor | None) -> Tensor:
    """``rows[p] @ matrices[g]`` for ``ends[g - 1] <= p < ends[g]``, or of all rows with the one matrix that there is.

    ``rows`` is ``[R, in]``, ``matrices`` ``[groups, in, out]``, and ``ends`` int32, None for one matrix.
    """
    return rows @ matrices[0] if len(matrices) == 1 else F.grouped_mm(rows, matrices, offs=ends)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor | None, groups: int) -> Tensor:
    """``left^T @ right`` over the rows of each group, ``[groups, L, R]``; over all rows for one group."""
    return (left.T @ right)[None] if groups == 1 else F.grouped_mm(left.T, right, offs=ends)
