"""The weights of tokens against the means that they stand for, taken with loops."""

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from beamline.algorithms.aggregation import token_weights
from beamline.config.algorithm import Aggregation

NAMES: tuple[Aggregation, ...] = get_args(Aggregation)
LIMIT = 16
Losses = list[list[float]]  # of each sequence, of each of its tokens
Batch = tuple[Losses, list[int]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def token_mean(losses: Losses, group: list[int], limit: int) -> float:
    return mean([loss for sequence in losses for loss in sequence])


def sequence_mean_token_mean(losses: Losses, group: list[int], limit: int) -> float:
    return mean([mean(sequence) for sequence in losses if sequence])


def sequence_sum(losses: Losses, group: list[int], limit: int) -> float:
    return mean([sum(sequence) / limit for sequence in losses if sequence])


def prompt_mean(losses: Losses, group: list[int], limit: int) -> float:
    of_problem: dict[int, list[float]] = {}
    for sequence, problem in zip(losses, group, strict=True):
        of_problem.setdefault(problem, []).extend(sequence)
    return mean([mean(tokens) for tokens in of_problem.values() if tokens])


REFERENCES: dict[str, Callable[[Losses, list[int], int], float]] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_sum": sequence_sum,
    "prompt_mean": prompt_mean,
}


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Sequences of 0 to LIMIT tokens, of problems of unequal size whose numbers have gaps, in any order."""
    losses = draw(st.lists(st.lists(st.floats(-5, 5), max_size=LIMIT), min_size=1, max_size=12))
    problem = st.sampled_from([0, 3, 4, 71])
    return losses, draw(st.lists(problem, min_size=len(losses), max_size=len(losses)))


def weights_of(name: Aggregation, losses: Losses, group: list[int], limit: int = LIMIT) -> NDArray[np.float64]:
    return token_weights(name, np.array([len(sequence) for sequence in losses]), np.array(group), limit)


def summed(losses: Losses, weights_B: NDArray[np.float64]) -> float:
    return sum(weight * loss for sequence, weight in zip(losses, weights_B, strict=True) for loss in sequence)


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches())
def test_the_weighted_sum_is_the_mean_that_the_name_says(name: Aggregation, batch: Batch) -> None:
    assert summed(batch[0], weights_of(name, *batch)) == pytest.approx(REFERENCES[name](*batch, LIMIT), abs=1e-12)


def test_three_sequences_of_two_problems_by_hand() -> None:
    losses, group = [[1.0, 1.0], [1.0] * 6, [1.0] * 2], [7, 7, 9]
    assert weights_of("token_mean", losses, group).tolist() == [1 / 10] * 3
    assert weights_of("sequence_mean_token_mean", losses, group).tolist() == [1 / 6, 1 / 18, 1 / 6]
    assert weights_of("sequence_sum", losses, group).tolist() == [1 / 48] * 3
    assert weights_of("prompt_mean", losses, group).tolist() == [1 / 16, 1 / 16, 1 / 4]


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches(), seed=st.integers(0, 99))
def test_sequences_in_another_order_have_the_same_weights(name: Aggregation, batch: Batch, seed: int) -> None:
    losses, group = batch
    order = np.random.default_rng(seed).permutation(len(losses))
    weights_B = weights_of(name, losses, group)
    assert np.array_equal(weights_of(name, [losses[i] for i in order], [group[i] for i in order]), weights_B[order])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [0, 3, 5], ids=["of a problem", "of another", "of a new one"])
@given(batch=batches())
def test_a_sequence_without_tokens_counts_nowhere(name: Aggregation, problem: int, batch: Batch) -> None:
    losses, group = batch
    more_B = weights_of(name, [*losses, []], [*group, problem])
    assert np.array_equal(more_B[:-1], weights_of(name, losses, group))
    assert more_B[-1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_without_any_token_no_sequence_weighs_anything(name: Aggregation) -> None:
    assert weights_of(name, [[], []], [0, 1]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_single_sequence_as_long_as_may_be_is_averaged_over_its_tokens(name: Aggregation) -> None:
    assert weights_of(name, [[1.0] * LIMIT], [5]).tolist() == [1 / LIMIT]


@given(problems=st.integers(1, 5), samples=st.integers(1, 5), length=st.integers(1, 40))
def test_all_agree_where_all_lengths_and_groups_are_equal(problems: int, samples: int, length: int) -> None:
    losses = [[0.0] * length] * (problems * samples)
    group = [b % problems for b in range(len(losses))]
    for name in NAMES:
        weights_B = weights_of(name, losses, group, limit=length)
        assert weights_B == pytest.approx([1 / (problems * samples * length)] * len(losses), rel=1e-12)


def test_the_limit_matters_for_the_sum_alone() -> None:
    losses, group = [[1.0, 1.0], [1.0] * 6], [0, 1]
    at_8, at_9 = ({name: weights_of(name, losses, group, limit).tolist() for name in NAMES} for limit in (8, 9))
    assert {name for name in NAMES if at_8[name] != at_9[name]} == {"sequence_sum"}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_fp64_at_the_size_of_a_real_step(name: Aggregation) -> None:
    tokens_B = np.full(4096, 131_072, dtype=np.int64)  # its products with S are over 2^40
    weights_B = token_weights(name, tokens_B, np.arange(4096) // 16, 131_072)
    assert weights_B.dtype == np.float64
    assert weights_B == pytest.approx(1 / (4096 * 131_072), rel=1e-12)
