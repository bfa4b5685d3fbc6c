"""Linear layers over rows of activations: one weight or one for each group of rows, with or without adapters."""

from typing import Any

import numpy as np

from beamline.kernels.arithmetic import rounded
from beamline.kernels.compiled import kernel
from beamline.kernels.linear import product
from beamline.kernels.rows import round_rows


@kernel
def grouped_linear(
    x: Any, order: Any, choices: int, w: Any, ends: Any, a: Any, b: Any, scale: Any, out: Any, z: Any, scratch: Any,
    first: int, last: int, bf16: bool,
) -> None:  # fmt: skip
    """Rows first..last of a linear layer with a weight, and perhaps an adapter, for each group of rows.

    ``out[p] = x[row] @ w[g] + scale * (x[row] @ a[s]) @ b[s]`` for ``ends[g - 1] <= p < ends[g]``, one chain of terms
    and one rounding. The row is ``order[p] // choices``, or p where ``order`` is empty. Weights are ``w [G, in, out]``,
    adapters ``a [S, in, rank]`` and ``b [S, rank, out]``, one for each group or one for all; of rank 0 they add
    nothing. ``z [rows, rank]`` is filled with ``scale * x @ a``, rounded too; it is not used at rank 0. ``scratch`` has
    a row of inputs for each row that is asked for; it is not used where ``order`` is empty.
    """
    D, width, (sets, _, rank) = x.shape[1], out.shape[1], a.shape
    weights, shrinking, widening = w.reshape(-1), a.reshape(-1), b.reshape(-1)
    results, shrunk = out.reshape(-1), z.reshape(-1)
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
            count, to = end - begin, begin * width
            product(source, at, D, weights, g * D * width, width, results, to, width, count, width, D, False)
            if rank > 0:
                s = g if sets > 1 else 0
                product(source, at, D, shrinking, s * D * rank, rank, shrunk, begin * rank, rank, count, rank, D, False)
                for i in range(begin * rank, end * rank):
                    shrunk[i] = rounded(shrunk[i] * scale, bf16)
                product(shrunk, begin * rank, rank, widening, s * rank * width, width, results, to, width, count, width,
                        rank, True)  # fmt: skip
            round_rows(out[begin:end], bf16)
            begin = end


@kernel
def linear_layer(x: Any, w: Any, a: Any, b: Any, layer: int, scale: Any, out: Any, z: Any, bf16: bool) -> None:
    """:func:`grouped_linear` of all rows with the weight and the adapter of one of the layers that are stacked."""
    ends, order, own = np.full(1, len(x)), np.empty(0, np.int64), slice(layer, layer + 1)
    grouped_linear(x, order, 1, w[own], ends, a[own], b[own], scale, out, z, x, 0, len(x), bf16)
