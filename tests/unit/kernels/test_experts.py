"""Routing against the module's router, experts against a loop in double precision."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.beam.modeling_beam import BeamTopKRouter

from beamline.kernels.experts import gather_experts, invert, route, sort_by_expert
from beamline.kernels.layers import grouped_linear
from beamline.kernels.rows import swiglu
from tests.exact import Floats, bits
from tests.tiny_beam import beam_config

Chosen = NDArray[np.uint8]


def routed(
    logits: Floats, bias: Floats, k: int, groups: int = 1, best_groups: int = 1, normalize: bool = True
) -> tuple[Chosen, Floats]:
    chosen, weights = np.empty((len(logits), k), np.uint8), np.empty((len(logits), k), np.float32)
    route(logits.copy(), bias, groups, best_groups, normalize, False, chosen, weights)
    return chosen, weights


# Routing


@pytest.mark.parametrize(
    ("experts", "groups", "best_groups", "k"), [(16, 4, 2, 4), (16, 1, 1, 4), (8, 2, 1, 3), (60, 6, 3, 8), (8, 4, 4, 8)]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_choices_and_weights_are_those_of_the_module(
    experts: int, groups: int, best_groups: int, k: int, normalize: bool
) -> None:
    """Best first. The sigmoids are within 2.5 units in the last place (1.5e-7), and no choices are as near as that."""
    rng = np.random.default_rng(experts)
    logits = rng.normal(0, 2, (1000, experts)).astype(np.float32)
    bias = (0.3 * rng.normal(0, 1, experts)).astype(np.float32)
    router = BeamTopKRouter(
        beam_config(
            hidden_size=experts, num_experts=experts, num_experts_per_tok=k, n_group=groups, topk_group=best_groups,
            norm_topk_prob=normalize,
        )
    )  # fmt: skip
    router.weight.data = torch.eye(experts)  # so that what goes in are the logits
    router.e_score_correction_bias.copy_(torch.from_numpy(bias))
    with torch.no_grad():
        _, theirs, indices = router(torch.from_numpy(logits))
    chosen, weights = routed(logits, bias, k, groups, best_groups, normalize)
    np.testing.assert_array_equal(chosen, indices.numpy())
    np.testing.assert_allclose(weights, theirs.numpy(), rtol=1e-6)


def test_of_equal_experts_the_first_is_chosen() -> None:
    chosen, weights = routed(np.array([[1, 2, 2, 1, 2, 1]], np.float32), np.zeros(6, np.float32), k=5)
    assert chosen.tolist() == [[1, 2, 4, 0, 3]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3] == weights[0, 4]


def test_of_equal_groups_the_first_stay() -> None:
    logits = np.array([[0, 3, -1, -1, 5, 5, 3, 0]], np.float32)  # the third is best, the first equals the last
    chosen, _ = routed(logits, np.zeros(8, np.float32), k=3, groups=4, best_groups=2)
    assert chosen.tolist() == [[4, 5, 1]]


def test_a_group_counts_by_its_best_two() -> None:
    logits = np.array([[9, -9, -9, 2, 2, -9]], np.float32)
    chosen, _ = routed(logits, np.zeros(6, np.float32), k=2, groups=2, best_groups=1)
    assert chosen.tolist() == [[3, 4]]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    chosen, weights = routed(np.zeros((1, 4), np.float32), np.array([0, 3, -3, 1], np.float32), k=2, normalize=False)
    assert chosen.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_a_row_is_routed_alike_alone() -> None:
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(0, 1, (50, 16)).astype(np.float32), rng.normal(0, 0.1, 16).astype(np.float32)
    chosen, weights = routed(logits, bias, 4, 4, 2)
    for row in range(50):
        alone, its_weights = routed(logits[row : row + 1], bias, 4, 4, 2)
        assert alone.tolist() == chosen[row : row + 1].tolist()
        assert np.array_equal(bits(its_weights), bits(weights[row : row + 1]))


# Experts

E, K, D, I = 6, 3, 21, 10  # noqa: E741
FACTOR = 2.5
ALL, NONE, ONE = 2, 4, 5  # experts that are chosen by every row, by none, and by one


def choices(rows: int) -> Chosen:
    """Experts of each row, best first; the last row alone has chosen ONE."""
    rng = np.random.default_rng(rows)
    drawn = np.array([rng.permutation([0, 1, 3])[:K] for _ in range(rows)], np.uint8)
    drawn[np.arange(rows), rng.integers(0, K - 1, rows)] = ALL
    drawn[-1, -1] = ONE
    return drawn


def weights_of_experts(rows: int, columns: int) -> Floats:
    """Those of two layers, of which the second is meant."""
    drawn = np.random.default_rng(rows).normal(0, 1 / np.sqrt(rows), (2, E, rows, columns))
    return drawn.astype(np.float32)


GATE_UP, DOWN = weights_of_experts(D, 2 * I), weights_of_experts(I, D)


def multiplied(
    x: Floats, order: NDArray[np.int64], w: Floats, ends: NDArray[np.int64], out: Floats, first: int, last: int,
    bf16: bool = False,
) -> None:  # fmt: skip
    """Rows first..last of ``out`` by the weights of the second layer, without adapters."""
    nothing, scratch = np.empty((1, 0, 0), np.float32), np.empty((last - first, x.shape[1]), np.float32)
    z = np.empty((len(out), 0), np.float32)
    grouped_linear(x, order, K, w[1], ends, nothing, nothing, np.float32(1), out, z, scratch, first, last, bf16)


def mixed(x: Floats, chosen: Chosen, weights: Floats, bf16: bool = False, cuts: tuple[int, ...] = ()) -> Floats:
    """The weighted sum of experts, computed in one call or cut between the sorted choices."""
    ends, (order, place) = np.empty(E, np.int64), np.empty((2, chosen.size), np.int64)
    sort_by_expert(chosen, ends, order)
    invert(order, place)
    wide, inner, outer = (np.full((chosen.size, n), np.nan, np.float32) for n in (2 * I, I, D))
    for first, last in pairwise((0, *cuts, chosen.size)):
        multiplied(x, order, GATE_UP, ends, wide, first, last, bf16)
        swiglu(wide[first:last], inner[first:last], bf16)
        multiplied(inner, order[:0], DOWN, ends, outer, first, last, bf16)
    y = np.full((len(x), D), np.nan, np.float32)
    gather_experts(outer, place, weights, FACTOR, y, bf16)
    return y


def inputs(rows: int) -> tuple[Floats, Chosen, Floats]:
    rng = np.random.default_rng(rows)
    return rng.normal(0, 1, (rows, D)).astype(np.float32), choices(rows), rng.random((rows, K)).astype(np.float32)


def written(x: Floats, chosen: Chosen, weights: Floats, rounded: Any = lambda x: x) -> NDArray[np.float64]:
    out = np.zeros((len(x), D))
    for row, expert, weight in zip(
        np.repeat(np.arange(len(x)), K), chosen.reshape(-1), weights.reshape(-1), strict=True
    ):
        gate, up = np.split(rounded(x[row].astype(np.float64) @ GATE_UP[1, expert]), 2)
        out[row] += weight * rounded(rounded(gate / (1 + np.exp(-gate)) * up) @ DOWN[1, expert])
    return rounded(rounded(out) * FACTOR)


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_rows_are_mixed_from_their_experts(rows: int) -> None:
    """Sums of up to 21 products of numbers around 1, whose roundings are 6e-8 each."""
    x, chosen, weights = inputs(rows)
    counts = np.bincount(chosen.reshape(-1), minlength=E)
    assert (counts[ALL], counts[NONE], counts[ONE]) == (rows, 0, 1)
    np.testing.assert_allclose(mixed(x, chosen, weights), written(x, chosen, weights), rtol=1e-6, atol=3e-6)


def test_choices_are_sorted_by_expert_and_then_by_row() -> None:
    chosen = choices(20)
    ends, order = np.empty(E, np.int64), np.empty(chosen.size, np.int64)
    sort_by_expert(chosen, ends, order)
    assert order.tolist() == np.argsort(chosen.reshape(-1), kind="stable").tolist()
    assert ends.tolist() == np.cumsum(np.bincount(chosen.reshape(-1), minlength=E)).tolist()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_row_has_the_same_bits_alone_in_any_order_and_in_parts(bf16: bool) -> None:
    x, chosen, weights = inputs(40)
    together = bits(mixed(x, chosen, weights, bf16))
    shuffled = np.random.default_rng(0).permutation(40)
    assert np.array_equal(bits(mixed(x[shuffled], chosen[shuffled], weights[shuffled], bf16)), together[shuffled])
    assert np.array_equal(bits(mixed(x, chosen, weights, bf16, cuts=(1, 37, 38, 90))), together)
    for row in range(40):
        alone = slice(row, row + 1)
        assert np.array_equal(bits(mixed(x[alone], chosen[alone], weights[alone], bf16)), together[alone]), row


def test_only_the_choices_asked_for_are_computed() -> None:
    """Here parts of two experts."""
    x, chosen, _ = inputs(40)
    ends, order = np.empty(E, np.int64), np.empty(chosen.size, np.int64)
    sort_by_expert(chosen, ends, order)
    first, last = ends[0] - 3, ends[0] + 2
    wide, at = np.full((chosen.size, 2 * I), np.nan, np.float32), np.arange(chosen.size)
    multiplied(x, order, GATE_UP, ends, wide, first, last)
    asked = (at >= first) & (at < last)
    assert np.array_equal(np.isfinite(wide).all(1), asked)
    assert np.array_equal(np.isfinite(wide).any(1), asked)


def test_choices_are_summed_best_first() -> None:
    """In float32 the order shows: 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    outer = np.array([[1.0], [1e8], [-1e8]], np.float32)
    ones, y = np.ones((1, 3), np.float32), np.empty((1, 1), np.float32)
    for place, total in (([1, 0, 2], 0.0), ([1, 2, 0], 1.0)):
        gather_experts(outer, np.array(place), ones, 1.0, y, False)
        assert y.item() == total


def test_bfloat16_is_rounded_after_each_product_and_after_the_sum() -> None:
    """Where float32 and double precision fall on two sides of a tie, they differ: rarely."""
    x, chosen, weights = inputs(40)

    def rounded(x: Any) -> Any:
        return torch.from_numpy(np.asarray(x)).bfloat16().to(torch.float64).numpy()

    x = rounded(x).astype(np.float32)
    ours, theirs = mixed(x, chosen, weights, bf16=True), written(x, chosen, weights, rounded)
    assert (ours != theirs).mean() < 0.01
