"""Arithmetic of float32 as IEEE 754 writes it, to hold compiled code against bit by bit."""

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def bits(x: Any) -> NDArray[np.int32]:
    """The bits of float32 values, so that equal means equal, for zeros and what is no number too."""
    array = np.ascontiguousarray(x)
    assert array.dtype == np.float32
    return array.view(np.int32)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """``a * b + c`` with one rounding.

    In double precision the product is exact. The sum is rounded to odd there (Boldo and Melquiond, 2008), so that
    rounding it again, to float32, rounds the exact sum.
    """
    product, added = a.astype(np.float64) * b, np.broadcast_to(c, np.broadcast(a, b, c).shape).astype(np.float64)
    total = product + added
    back = total - product
    error = (product - (total - back)) + (added - back)
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, total).astype(np.float32)


def chain(x: Floats, w: Floats, start: Floats | None = None) -> Floats:
    """``x [rows, depth] @ w [depth, columns]``: one term after the other, from 0 or from ``start``."""
    total = np.zeros((len(x), w.shape[1]), np.float32) if start is None else start
    for k in range(x.shape[1]):
        total = fma(x[:, k, None], w[k], total)
    return total


def nearest(value: Fraction) -> np.float32:
    """The float32 nearest to a number, of two equally near ones the even one."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.int32)) & 1))


def ulps(x: Floats, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far off values are, in units in the last place of float32."""
    return np.abs(x - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
