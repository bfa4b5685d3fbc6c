from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from beamline.kernels.arithmetic import dot, exp, fma, rounded, rounded_to_8_bits, sigmoid, tanh, total
from beamline.kernels.compiled import kernel
from tests import exact
from tests.exact import Floats, bits, nearest, ulps

INF, NAN, LARGEST = np.float32(np.inf), np.float32(np.nan), np.finfo(np.float32).max
TINY = np.finfo(np.float32).tiny
LOWEST, HIGHEST = np.float32(-87.33), np.float32(88.37)  # where exp leaves what float32 has normal numbers for


@kernel
def each_exp(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = exp(x[i])


@kernel
def each_tanh(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = tanh(x[i])


@kernel
def each_sigmoid(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = sigmoid(x[i])


@kernel
def each_rounded(x: Any, bf16: bool, out: Any) -> None:
    for i in range(len(x)):
        out[i] = rounded(x[i], bf16)


@kernel
def each_rounded_to_8_bits(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = rounded_to_8_bits(x[i])


@kernel
def each_fma(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(len(a)):
        out[i] = fma(a[i], b[i], c[i])


@kernel
def run_dot(x: Any, x_at: int, y: Any, y_at: int, length: int) -> Any:
    return dot(x, x_at, y, y_at, length)


@kernel
def run_total(x: Any, x_at: int, length: int) -> Any:
    return total(x, x_at, length)


def of(function: Callable[..., None], x: Any, *more: Any) -> Floats:
    values = np.asarray(x, np.float32)
    out = np.empty_like(values)
    function(values, *more, out)
    return out


def every_nth(n: int, low: float, high: float) -> Floats:
    """Every n-th float32 between two positive ones, with both signs."""
    first, last = (int(np.float32(v).view(np.int32)) for v in (low, high))
    x = np.arange(first, last + 1, n, dtype=np.int32).view(np.float32)
    return np.concatenate([x, -x])


# e^x, tanh, sigmoid

EXACT: list[tuple[Callable[..., None], Callable[[NDArray[np.float64]], NDArray[np.float64]], float]] = [
    (each_exp, np.exp, 1.02),
    (each_tanh, np.tanh, 3.0),
    (each_sigmoid, lambda x: 1 / (1 + np.exp(-x)), 2.5),
]


@pytest.mark.parametrize(("function", "written", "bound"), EXACT, ids=["exp", "tanh", "sigmoid"])
def test_values_are_within_a_few_units_in_the_last_place(
    function: Callable[..., None], written: Callable[[NDArray[np.float64]], NDArray[np.float64]], bound: float
) -> None:
    """Of every seventh float32 the worst are 1.011 for exp, 2.996 for tanh and 2.481 for sigmoid.

    The polynomial of exp is good to half a unit, and its value is rounded once more. The others are quotients of it;
    near -0.625 tanh also takes 1 from what is nearly twice as much.
    """
    x = every_nth(1009, 1e-10, HIGHEST)
    x = x[x >= LOWEST]
    assert len(x) > 600_000
    assert ulps(of(function, x), written(x.astype(np.float64))).max() <= bound


def test_exp_at_its_ends() -> None:
    low = np.nextafter(LOWEST, -INF)
    given = [0.0, -0.0, -INF, -LARGEST, -1e4, low, HIGHEST, LARGEST, INF]
    highest = of(each_exp, [HIGHEST])[0]
    assert of(each_exp, given).tolist() == [1, 1, 0, 0, 0, 0, highest, highest, highest]
    assert TINY < of(each_exp, [LOWEST])[0] < 1.01 * TINY  # so that 0 begins where normal numbers end
    assert np.isfinite(highest)


def test_tanh_at_its_ends() -> None:
    assert of(each_tanh, [0.0, -INF, -LARGEST, -20, 20, LARGEST, INF]).tolist() == [0, -1, -1, -1, 1, 1, 1]


def test_sigmoid_at_its_ends() -> None:
    assert of(each_sigmoid, [0.0, 20, LARGEST, INF]).tolist() == [0.5, 1, 1, 1]
    tail = of(each_sigmoid, [LOWEST, -1e4, -LARGEST, -INF])
    assert (tail >= 0).all()
    assert (tail < 1.01 * TINY).all()


@pytest.mark.parametrize("function", [each_exp, each_tanh, each_sigmoid], ids=["exp", "tanh", "sigmoid"])
def test_what_is_no_number_stays_none(function: Callable[..., None]) -> None:
    assert np.isnan(of(function, np.full(37, NAN))).all()


@pytest.mark.parametrize(
    ("function", "single"),
    [(each_exp, exp), (each_tanh, tanh), (each_sigmoid, sigmoid)],
    ids=["exp", "tanh", "sigmoid"],
)
def test_a_value_has_the_same_bits_alone_and_in_a_vector(
    function: Callable[..., None], single: Callable[[np.float32], float]
) -> None:
    """Loops are cut into vectors of the machine, and a rest."""
    x = np.random.default_rng(0).normal(0, 20, 200).astype(np.float32)
    alone = np.array([single(value) for value in x], np.float32)
    for length in (1, 3, 8, 17, 200):
        assert np.array_equal(bits(of(function, x[:length])), bits(alone[:length])), length


# Rounding to bfloat16


def torch_rounded(x: Floats) -> Floats:
    rounded_x: Floats = torch.from_numpy(x).bfloat16().float().numpy()
    return rounded_x


def test_rounding_is_that_of_torch() -> None:
    """All exponents and signs; all that lie at a tie, beside one and at a bfloat16; numbers without normal form."""
    upper = np.arange(-(2**15), 2**15, dtype=np.int32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.int32)
    x = (upper[:, None] | lower).reshape(-1).view(np.float32)
    x = x[~np.isnan(x)]
    assert np.array_equal(bits(of(each_rounded, x, True)), bits(torch_rounded(x)))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_any_number_is_rounded_like_torch_or_not_at_all(values: list[float]) -> None:
    x = np.array(values, np.float32)
    assert np.array_equal(bits(of(each_rounded, x, True)), bits(torch_rounded(x)))
    assert np.array_equal(bits(of(each_rounded, x, False)), bits(x))


def test_rounding_keeps_what_is_no_number() -> None:
    """Those too that would carry over into the exponent or the sign."""
    x = np.array([0x7F800001, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(of(each_rounded, x, True)).all()


# Rounding to float8 e4m3

MOST = 448.0


def torch_rounded_to_8_bits(x: Floats) -> Floats:
    """Of torch, whose versions differ in what becomes of more than 448: it has to be cut off here."""
    cast: Floats = torch.from_numpy(x).clamp(-MOST, MOST).to(torch.float8_e4m3fn).float().numpy()
    return cast


def test_more_than_the_largest_number_of_8_bits_becomes_the_largest() -> None:
    """Whatever lies beyond: the next pattern is no number, and torch did give it from 464 on, half a step away."""
    beyond = np.array([np.nextafter(np.float32(MOST), INF), 464, np.nextafter(np.float32(464), INF), 480, LARGEST, INF])
    assert of(each_rounded_to_8_bits, beyond).tolist() == [MOST] * len(beyond)
    assert of(each_rounded_to_8_bits, -beyond).tolist() == [-MOST] * len(beyond)


def test_8_bits_of_every_bfloat16_are_those_of_torch() -> None:
    """Both zeros, both infinities, and every tie between two numbers of 8 bits among them."""
    x = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    x = x[~np.isnan(x)]
    assert len(x) == 2**16 - 2 * 127
    assert np.array_equal(bits(of(each_rounded_to_8_bits, x)), bits(torch_rounded_to_8_bits(x)))


def test_8_bits_beside_every_tie_are_those_of_torch() -> None:
    """A tie goes to the even one, whose last bit is 0; what lies beside it goes to the nearer one."""
    numbers = np.arange(127, dtype=np.uint8)  # the patterns of 0 to 448, in their order
    held = torch.from_numpy(numbers).view(torch.float8_e4m3fn).float().numpy()
    ties = ((held[:-1].astype(np.float64) + held[1:]) / 2).astype(np.float32)
    even = np.where(numbers[:-1] % 2 == 0, held[:-1], held[1:])
    below, above = (np.nextafter(ties, np.float32(end)) for end in (-INF, INF))
    for sign in (np.float32(1), np.float32(-1)):
        for x, expected in ((ties, even), (below, held[:-1]), (above, held[1:]), (held, held)):
            assert np.array_equal(bits(of(each_rounded_to_8_bits, sign * x)), bits(sign * expected))
            assert np.array_equal(bits(torch_rounded_to_8_bits(sign * x)), bits(sign * expected))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_8_bits_of_any_number_are_those_of_torch(values: list[float]) -> None:
    x = np.array(values, np.float32)
    assert np.array_equal(bits(of(each_rounded_to_8_bits, x)), bits(torch_rounded_to_8_bits(x)))


def test_8_bits_of_random_numbers_of_every_size_are_those_of_torch() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, 200_000) * 2.0 ** rng.integers(-14, 12, 200_000)
    x = x.astype(np.float32)
    assert np.array_equal(bits(of(each_rounded_to_8_bits, x)), bits(torch_rounded_to_8_bits(x)))


def test_in_8_bits_what_is_no_number_stays_none() -> None:
    x = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(of(each_rounded_to_8_bits, x)).all()


def test_numbers_of_8_bits_are_rounded_to_themselves_and_once() -> None:
    x = np.random.default_rng(1).normal(0, 100, 1000).astype(np.float32)
    once = of(each_rounded_to_8_bits, x)
    assert np.array_equal(bits(of(each_rounded_to_8_bits, once)), bits(once))
    assert len(np.unique(np.abs(once))) < 128


# Sums of products


def hard_to_round(n: int) -> tuple[Floats, Floats, Floats]:
    """Factors and a third number: of like size, cancelling, far smaller, and at ties."""
    rng = np.random.default_rng(n)
    a, b = rng.normal(0, 1, (2, n)).astype(np.float32)
    c = (rng.normal(0, 1, n) * 2.0 ** rng.integers(-40, 40, n)).astype(np.float32)
    c[::4] = -(a * b)[::4]  # what is left is the rounding error of the product
    a[1::4] = np.float32(1 + 2.0**-12)
    b[1::4] = np.float32(1 + 2.0**-12)  # 1 + 2^-11 + 2^-24 is a tie of float32, which c decides
    c[1::4] = np.resize([1e-30, -1e-30, 0, 2.0**-50, -(2.0**-50), 1, -1], len(c[1::4])).astype(np.float32)
    return a, b, c


def test_fma_rounds_once() -> None:
    """And so does the one in numpy that other tests use."""
    a, b, c = hard_to_round(800)
    written = [
        nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert np.array_equal(exact.fma(a, b, c), np.array(written))
    assert np.array_equal(of(each_fma, a, b, c), np.array(written))
    assert (np.array(written) != a * b + c).mean() > 0.2  # two roundings would be seen


def written_dot(x: Floats, y: Floats) -> np.float32:
    """16 chains over every 16th term, added in pairs; the last, fewer than 16 terms go on from there."""
    whole = len(x) // 16 * 16
    lanes = np.zeros(16, np.float32)
    for k in range(0, whole, 16):
        lanes = exact.fma(x[k : k + 16], y[k : k + 16], lanes)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    for k in range(whole, len(x)):
        lanes = exact.fma(x[k : k + 1], y[k : k + 1], lanes)
    added: np.float32 = lanes[0]
    return added


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 1000])
def test_dot_adds_in_the_written_order(length: int) -> None:
    x, y = np.random.default_rng(length).normal(0, 1, (2, length)).astype(np.float32)
    assert bits(np.float32(run_dot(x, 0, y, 0, length))) == bits(written_dot(x, y))


def test_dot_reads_a_run_and_nothing_beside_it() -> None:
    x, y = np.random.default_rng(0).normal(0, 1, (2, 40)).astype(np.float32)
    around = np.full((2, 100), NAN, np.float32)
    around[0, 7:47], around[1, 31:71] = x, y
    assert bits(np.float32(run_dot(around[0], 7, around[1], 31, 40))) == bits(written_dot(x, y))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 33, 100])
def test_a_total_is_the_dot_with_ones(length: int) -> None:
    x = np.full(120, NAN, np.float32)
    x[7 : 7 + length] = np.random.default_rng(length).normal(0, 1, length)
    written = written_dot(x[7 : 7 + length], np.ones(length, np.float32))
    assert bits(np.float32(run_total(x, 7, length))) == bits(written)
