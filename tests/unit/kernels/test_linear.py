"""The product of matrices against its written chains, bit for bit."""

from fractions import Fraction

import numpy as np
import pytest

from beamline.kernels.linear import product
from tests.exact import Floats, bits, chain, nearest

ROWS = range(1, 10)  # tiles have 4, 2 and 1
COLUMNS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 65)  # tiles have 32, 16 and 1
DEPTHS = (0, 1, 5, 64)
UNTOUCHED = np.float32(777)


def factors(depth: int, rows: int = max(ROWS), columns: int = max(COLUMNS)) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(depth)
    return rng.normal(0, 1, (rows, depth)).astype(np.float32), rng.normal(0, 1, (depth, columns)).astype(np.float32)


def multiply(x: Floats, w: Floats, start: Floats | None = None) -> Floats:
    """``x @ w``, or what ``start`` becomes when it goes on."""
    shape = len(x), w.shape[1]
    out = np.full(shape, UNTOUCHED) if start is None else start.copy()
    product(
        x.reshape(-1), 0, x.shape[1], w.reshape(-1), 0, w.shape[1], out.reshape(-1), 0, shape[1], *shape, x.shape[1],
        start is not None,
    )  # fmt: skip
    return out


def test_an_element_is_one_chain_of_exactly_rounded_terms() -> None:
    x, w = factors(64, rows=3, columns=3)
    for i, j in np.ndindex(3, 3):
        total = Fraction(0)
        for a, b in zip(x[i], w[:, j], strict=True):
            total = Fraction(float(nearest(Fraction(float(a)) * Fraction(float(b)) + total)))
        assert multiply(x[i : i + 1], np.ascontiguousarray(w[:, j : j + 1])).item() == total


@pytest.mark.parametrize("depth", DEPTHS)
def test_elements_are_the_written_chains_in_every_tile(depth: int) -> None:
    x, w = factors(depth)
    written = bits(chain(x, w))
    for rows in ROWS:
        for columns in COLUMNS:
            out = multiply(x[:rows], np.ascontiguousarray(w[:, :columns]))
            assert np.array_equal(bits(out), written[:rows, :columns]), (rows, columns)


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_has_the_same_bits_whatever_lies_beside_it(rows: int) -> None:
    """Even rows that are no numbers."""
    x, w = factors(64)
    alone = bits(multiply(x[:1], w))[0]
    for at in range(rows):
        beside = np.full((rows, 64), np.nan, np.float32)
        beside[at] = x[0]
        assert np.array_equal(bits(multiply(beside, w))[at], alone), at


@pytest.mark.parametrize("cut", [0, 1, 20, 64])
def test_chains_go_on(cut: int) -> None:
    x, w = factors(64)
    begun = multiply(np.ascontiguousarray(x[:, :cut]), w[:cut])
    whole = multiply(np.ascontiguousarray(x[:, cut:]), w[cut:], start=begun)
    assert np.array_equal(bits(whole), bits(multiply(x, w)))


def within(matrix: Floats, at: int, stride: int, around: np.float32) -> Floats:
    """A flat array that holds a matrix from an offset, its rows ``stride`` apart."""
    flat = np.full(at + len(matrix) * stride + 50, around)
    rows = flat[at : at + len(matrix) * stride].reshape(len(matrix), stride)
    rows[:, : matrix.shape[1]] = matrix
    return flat


@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_parts_of_arrays_are_read_and_written_and_nothing_else(rows: int, columns: int, go_on: bool) -> None:
    depth = 5
    x, w = factors(depth, rows, columns)
    start = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    out = within(start, 29, columns + 6, UNTOUCHED)
    product(
        within(x, 3, depth + 2, np.float32(np.nan)), 3, depth + 2,
        within(w, 11, columns + 9, np.float32(np.nan)), 11, columns + 9,
        out, 29, columns + 6, rows, columns, depth, go_on,
    )  # fmt: skip
    expected = within(chain(x, w, start if go_on else None), 29, columns + 6, UNTOUCHED)
    assert np.array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("rows", [15, 16, 19])
@pytest.mark.parametrize("depth", [255, 256, 300])
def test_a_panel_that_is_packed_first_gives_the_same_bits(rows: int, depth: int) -> None:
    """From 16 rows and 256 terms on; single rows never are. Parts of larger arrays, going on from some values."""
    rng = np.random.default_rng(depth)
    columns, stride = 65, 70
    x, w, start = (
        rng.normal(0, 1, n).astype(np.float32) for n in (rows * (depth + 3) + 5, depth * stride + 9, rows * stride)
    )
    together, alone = start.copy(), start.copy()
    product(x, 5, depth + 3, w, 9, stride, together, 2, stride, rows, columns, depth, True)
    for r in range(rows):
        product(x, 5 + r * (depth + 3), depth + 3, w, 9, stride, alone, 2 + r * stride, stride, 1, columns, depth, True)
    assert np.array_equal(bits(together), bits(alone))
