"""Linear layers over rows of activations: one weight or one for each group of rows, with or without adapters."""

from typing import Any

import numpy as np

from beamline.kernels.arithmetic import rounded
from beamline.kernels.compiled import kernel
from beamline.kernels.linear import product
from beamline.kernels.rows import round_rows


@kernel
def grouped_linear(
    x: Any, order: Any, choices: int, w: Any, w_at: int, ends: Any, a: Any, a_at: int, b: Any, b_at: int, sets: int,
    scale: Any, out: Any, z: Any, scratch: Any, first: int, last: int, bf16: bool,
) -> None:  # fmt: skip
    """Rows first..last of a linear layer with a weight, and perhaps an adapter, for each group of rows.

    ``out[p] = x[row] @ w[g] + scale * (x[row] @ a[s]) @ b[s]`` for ``ends[g - 1] <= p < ends[g]``, one chain of terms
    and one rounding. The row is ``order[p] // choices``, or p where ``order`` is empty. Weights are ``w [G, in, out]``
    from an offset on, flat; of adapters there are ``sets``, one for each group or one for all: ``a [sets, in, rank]``
    and ``b [sets, rank, out]``. ``z [rows, rank]`` is filled with ``scale * x @ a``, which is rounded too; its width is
    the rank, 0 without adapters. ``scratch`` has a row of inputs for each row that is asked for; it is not used where
    ``order`` is empty.
    """
    D, width, rank = x.shape[1], out.shape[1], z.shape[1]
    begin = first
    for g in range(len(ends)):
        end = min(ends[g], last)
        if end > begin:
            source, at = x.reshape(-1), begin * D
            if len(order) > 0:
                source, at = scratch.reshape(-1), (begin - first) * D
                for p in range(begin, end):
                    row, target = x[order[p] // choices], scratch[p - first]
                    for j in range(D):
                        target[j] = row[j]
            count = end - begin
            product(source, at, D, w, w_at + g * D * width, width, out.reshape(-1), begin * width, width, count, width,
                    D, False)  # fmt: skip
            if rank > 0:
                s = g if sets > 1 else 0
                product(source, at, D, a, a_at + s * D * rank, rank, z.reshape(-1), begin * rank, rank, count, rank, D,
                        False)  # fmt: skip
                shrunk = z.reshape(-1)[begin * rank : end * rank]
                for i in range(len(shrunk)):
                    shrunk[i] = rounded(shrunk[i] * scale, bf16)
                product(z.reshape(-1), begin * rank, rank, b, b_at + s * rank * width, width, out.reshape(-1),
                        begin * width, width, count, width, rank, True)  # fmt: skip
            round_rows(out[begin:end], bf16)
            begin = end


@kernel
def linear_layer(
    x: Any, w: Any, w_at: int, a: Any, a_at: int, b: Any, b_at: int, scale: Any, out: Any, z: Any, bf16: bool
) -> None:
    """:func:`grouped_linear` of all rows with one weight, ``w [in, out]`` from an offset on, and one adapter."""
    ends, order = np.full(1, len(x)), np.empty(0, np.int64)
    grouped_linear(x, order, 1, w, w_at, ends, a, a_at, b, b_at, 1, scale, out, z, x, 0, len(x), bf16)
