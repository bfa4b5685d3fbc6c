"""Linear layers over groups of rows, with and without adapters, against what is written of them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamline.kernels.layers import grouped_linear, linear_layer
from beamline.kernels.linear import multiply
from tests.exact import Floats, bits, chain

INPUTS, CHOICES = 13, 3
SIZES = (0, 7, 0, 30, 2, 0)  # rows of each group, INPUTS * CHOICES in all
GROUPS, ROWS = len(SIZES), sum(SIZES)
GROUP_OF = np.repeat(np.arange(GROUPS), SIZES)
SCALE = np.float32(0.7)  # no power of two: its product rounds
SHAPES = ((21, 37), (32, 64), (1, 5), (300, 17))  # in, out: odd, of whole tiles, narrow, deep enough to be packed
ADAPTERS = ((0, 1), (8, 1), (8, GROUPS), (24, 1), (24, GROUPS))  # rank and sets

UNTOUCHED = np.float32(777)


@dataclass(frozen=True)
class Layer:
    """A linear layer of the second of two layers; the first is no numbers, and so are groups without rows."""

    x: Floats  # [inputs, in]
    order: NDArray[np.int64]  # [rows], or empty where rows are inputs
    w: Floats  # [2, groups, in, out]
    a: Floats  # [2, sets, in, rank]
    b: Floats  # [2, sets, rank, out]
    ends: NDArray[np.int64]

    @property
    def inputs(self) -> Floats:
        """The input of each row."""
        return self.x[self.order // CHOICES] if len(self.order) else self.x

    def set_of(self, group: int) -> int:
        return group if self.a.shape[1] > 1 else 0


def layer(depth: int, width: int, rank: int, sets: int, gathered: bool) -> Layer:
    rng = np.random.default_rng(depth)
    x = rng.normal(0, 1, (INPUTS if gathered else ROWS, depth))
    w = rng.normal(0, depth**-0.5, (2, GROUPS, depth, width))
    a, b = rng.normal(0, depth**-0.5, (2, sets, depth, rank)), rng.normal(0, 1, (2, sets, rank, width))
    for stacked in (w, a, b):
        stacked[0] = np.nan
    w[:, np.array(SIZES) == 0] = np.nan
    if sets > 1:
        a[:, np.array(SIZES) == 0] = b[:, np.array(SIZES) == 0] = np.nan
    order = rng.permutation(ROWS) if gathered else np.empty(0, np.int64)
    return Layer(*(x.astype(np.float32), order, *(m.astype(np.float32) for m in (w, a, b))), np.cumsum(SIZES))


def computed(of: Layer, bf16: bool = False, cuts: tuple[int, ...] = (0, ROWS)) -> tuple[Floats, Floats]:
    """Rows between the first and the last cut, and their z, computed in a call for each piece."""
    out = np.full((of.ends[-1], of.w.shape[-1]), UNTOUCHED)
    z = np.full((len(out), of.a.shape[-1]), UNTOUCHED)
    for first, last in pairwise(cuts):
        scratch = np.full((last - first if len(of.order) else 0, of.x.shape[1]), np.nan, np.float32)
        grouped_linear(
            of.x, of.order, CHOICES, of.w[1], of.ends, of.a[1], of.b[1], SCALE, out, z, scratch, first, last, bf16,
        )  # fmt: skip
    return out, z


def rounded(x: Floats, bf16: bool) -> Floats:
    """To bfloat16 by torch, if asked."""
    to_nearest: Floats = torch.from_numpy(x).bfloat16().float().numpy()
    return to_nearest if bf16 else x


shapes = pytest.mark.parametrize(("depth", "width"), SHAPES)
adapters = pytest.mark.parametrize(("rank", "sets"), ADAPTERS)
gathering = pytest.mark.parametrize("gathered", [True, False])


@shapes
@adapters
@gathering
def test_rows_are_those_of_the_formula(depth: int, width: int, rank: int, sets: int, gathered: bool) -> None:
    """In double precision. Up to 324 products of numbers that sum to about 4, whose roundings are 6e-8 each."""
    of = layer(depth, width, rank, sets, gathered)
    x, w, a, b = (part.astype(np.float64) for part in (of.inputs, of.w[1], of.a[1], of.b[1]))
    out, z = computed(of)
    for row, group in enumerate(GROUP_OF):
        s = of.set_of(group)
        np.testing.assert_allclose(z[row], SCALE * x[row] @ a[s], rtol=1e-6, atol=3e-6)
        added = SCALE * x[row] @ a[s] @ b[s]
        np.testing.assert_allclose(out[row], x[row] @ w[group] + added, rtol=1e-6, atol=1e-5)


@shapes
@adapters
@gathering
@pytest.mark.parametrize("bf16", [False, True])
def test_bits_are_those_of_one_chain_that_is_rounded_once(
    depth: int, width: int, rank: int, sets: int, gathered: bool, bf16: bool
) -> None:
    """The weight's terms, then the adapter's, whose inputs are rounded before. Beside that nothing is."""
    of = layer(depth, width, rank, sets, gathered)
    out, z = computed(of, bf16)
    for group in np.unique(GROUP_OF):
        s, rows = of.set_of(group), group == GROUP_OF
        x = of.inputs[rows]
        shrunk = rounded(chain(x, of.a[1, s]) * SCALE, bf16)
        assert np.array_equal(bits(z[rows]), bits(shrunk))
        written = chain(shrunk, of.b[1, s], start=chain(x, of.w[1, group]))
        assert np.array_equal(bits(out[rows]), bits(rounded(written, bf16)))


@adapters
@gathering
@pytest.mark.parametrize("bf16", [False, True])
def test_a_row_has_the_same_bits_alone_and_in_parts(rank: int, sets: int, gathered: bool, bf16: bool) -> None:
    """Parts that end within a group, between two groups, and that have no rows."""
    of = layer(*SHAPES[0], rank, sets, gathered)
    whole = computed(of, bf16)
    for cuts in (tuple(range(ROWS + 1)), (0, 7, ROWS), (0, 3, 3, 20, 38, ROWS)):
        for part, of_whole in zip(computed(of, bf16, cuts), whole, strict=True):
            assert np.array_equal(bits(part), bits(of_whole)), cuts


@adapters
@gathering
def test_rows_of_a_group_may_come_in_any_order(rank: int, sets: int, gathered: bool) -> None:
    of = layer(*SHAPES[0], rank, sets, gathered)
    rng = np.random.default_rng(1)
    shuffled = np.concatenate([rng.permutation(np.flatnonzero(group == GROUP_OF)) for group in range(GROUPS)])
    other = replace(of, order=of.order[shuffled]) if gathered else replace(of, x=of.x[shuffled])
    for one, another in zip(computed(of), computed(other), strict=True):
        assert np.array_equal(bits(one[shuffled]), bits(another))


@adapters
@gathering
def test_only_the_rows_asked_for_are_written(rank: int, sets: int, gathered: bool) -> None:
    """Here of two groups."""
    of, asked = layer(*SHAPES[0], rank, sets, gathered), np.zeros(ROWS, np.bool_)
    asked[5:9] = True
    for part, whole in zip(computed(of, cuts=(5, 9)), computed(of), strict=True):
        assert np.array_equal(bits(part[asked]), bits(whole[asked]))
        assert (part[~asked] == UNTOUCHED).all()


def test_no_rows_at_all() -> None:
    of = layer(*SHAPES[0], 8, GROUPS, gathered=True)
    out, z = computed(replace(of, ends=np.zeros(GROUPS, np.int64)), cuts=(0, 0))
    assert (len(out), len(z)) == (0, 0)


@adapters
@gathering
@pytest.mark.parametrize("bf16", [False, True])
def test_an_adapter_without_an_effect_gives_the_bits_of_none(rank: int, sets: int, gathered: bool, bf16: bool) -> None:
    """A term of 0 leaves a chain as it is."""
    of = layer(*SHAPES[0], rank, sets, gathered)
    plain = replace(of, a=of.a[:, :1, :, :0], b=of.b[:, :1, :0])
    without_effect = replace(of, b=np.zeros_like(of.b))
    assert np.array_equal(bits(computed(without_effect, bf16)[0]), bits(computed(plain, bf16)[0]))


# One group


def one_group(depth: int, width: int, rank: int) -> tuple[Layer, list[Floats]]:
    """A layer whose rows all have one weight, and its stacks of w, a and b, of which the second matrix is meant."""
    of = layer(depth, width, rank, 1, gathered=False)
    of = replace(of, w=of.w[:, 1:2], ends=np.array([ROWS]))
    return of, [np.ascontiguousarray(stack[:, 0]) for stack in (of.w, of.a, of.b)]


def linear(x: Floats, stacks: list[Floats], bf16: bool = False) -> tuple[Floats, Floats]:
    out, z = (np.full((len(x), stack.shape[2]), UNTOUCHED) for stack in stacks[:2])
    w, a, b = stacks
    linear_layer(x, w, a, b, 1, SCALE, out, z, bf16)
    return out, z


@shapes
@pytest.mark.parametrize("rank", [0, 8, 24])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_linear_layer_is_a_group_of_all_rows(depth: int, width: int, rank: int, bf16: bool) -> None:
    of, stacks = one_group(depth, width, rank)
    for ours, theirs in zip(linear(of.x, stacks, bf16), computed(of, bf16), strict=True):
        assert np.array_equal(bits(ours), bits(theirs))


@shapes
def test_without_an_adapter_it_is_the_product_alone(depth: int, width: int) -> None:
    of, stacks = one_group(depth, width, rank=0)
    expected = np.empty((ROWS, width), np.float32)
    multiply(of.x, stacks[0][1], expected)
    assert np.array_equal(bits(linear(of.x, stacks)[0]), bits(expected))


@pytest.mark.parametrize("rows", range(1, 10))
def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_company(rows: int) -> None:
    """Tiles have 4, 2 and 1 rows. Even rows that are no numbers change nothing."""
    of, stacks = one_group(*SHAPES[0], rank=8)
    alone = linear(of.x[:1], stacks)
    for at in range(rows):
        beside = np.full((rows, of.x.shape[1]), np.nan, np.float32)
        beside[at] = of.x[0]
        for together, single in zip(linear(beside, stacks), alone, strict=True):
            assert np.array_equal(bits(together[at]), bits(single[0])), at
