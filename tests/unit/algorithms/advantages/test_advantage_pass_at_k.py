from fractions import Fraction
from itertools import combinations
from math import comb, copysign, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.advantages import GroupRewards
from beamline.algorithms.advantages.pass_at_k import advantages
from beamline.config.advantages import PassAtKAdvantage
from tests.unit.algorithms.advantages.exact_advantages import groups, judged


def of_counts(right: int, wrong: int, k: int) -> tuple[float, float]:
    """What one right and one wrong sample get of so many."""
    correct = [True] * right + [False] * wrong
    (computed,) = advantages([judged(correct, correct=correct)], PassAtKAdvantage(k=k))
    return computed[0], computed[-1]


def by_formula(right: int, wrong: int, k: int) -> tuple[float, float]:
    """Equations 11, 12, 14 and 15 in fractions, squared, so that the square root alone is rounded."""
    n = right + wrong
    if n < k:
        return 0.0, 0.0
    m = 1 - Fraction(comb(wrong, k), comb(n, k))
    if m in (0, 1):
        return 0.0, 0.0
    variance = m * (1 - m)
    of_wrong = 1 - m - Fraction(comb(wrong - 1, k - 1), comb(n - 1, k - 1))
    return sqrt((1 - m) ** 2 / variance), copysign(sqrt(of_wrong**2 / variance), of_wrong)


def by_all_sets(group: GroupRewards, k: int) -> list[float]:
    """The mean over all sets of k graded samples that a sample is in, of the set's standardized reward."""
    graded = [i for i, counts in enumerate(group.graded_n) if counts]
    sets = list(combinations(graded, k))
    rewards = [float(any(group.correct_n[i] for i in members)) for members in sets]
    computed = [0.0] * len(group.graded_n)
    if not sets or len(set(rewards)) == 1:
        return computed
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    for i in graded:
        own = [(reward - mean) / std for members, reward in zip(sets, rewards, strict=True) if i in members]
        computed[i] = sum(own) / len(own)
    return computed


@given(group=groups(), k=st.integers(1, 12))
def test_pass_at_k_is_the_mean_over_all_sets_of_k(group: GroupRewards, k: int) -> None:
    (computed,) = advantages([group], PassAtKAdvantage(k=k))
    assert computed.dtype == np.float64
    assert computed.tolist() == pytest.approx(by_all_sets(group, k), rel=1e-12, abs=1e-12)


@given(counts=st.tuples(st.integers(1, 200), st.integers(1, 200)), k=st.integers(1, 400))
def test_pass_at_k_is_its_formula(counts: tuple[int, int], k: int) -> None:
    assert of_counts(*counts, k) == pytest.approx(by_formula(*counts, k), rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("right", "wrong", "k"),
    [(1, 99_999, 1), (1, 99_999, 4), (40_000, 60_000, 4), (99_990, 10, 10), (10, 99_990, 1000), (1000, 99_000, 1000)],
)
def test_pass_at_k_of_a_hundred_thousand_samples(right: int, wrong: int, k: int) -> None:
    assert of_counts(right, wrong, k) == pytest.approx(by_formula(right, wrong, k), rel=1e-12, abs=0)


def test_what_is_too_small_for_a_number_is_nothing() -> None:
    assert of_counts(50_000, 50_000, 40_000) == (0.0, 0.0)


@given(counts=st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_pass_at_1_is_the_standardized_correctness(counts: tuple[int, int]) -> None:
    right, wrong = counts
    p = right / (right + wrong)
    std = sqrt(p * (1 - p))  # that of the population
    assert of_counts(right, wrong, 1) == pytest.approx(((1 - p) / std, -p / std), rel=1e-12)


def test_pass_at_2_of_four_samples_by_hand() -> None:
    # One right of four: three of the six pairs have it, so that m = std = 1 / 2. A wrong one is in three pairs, one of
    # them with the right sample.
    assert of_counts(right=1, wrong=3, k=2) == pytest.approx((1.0, -1 / 3), abs=1e-15)


@pytest.mark.parametrize(
    ("right", "wrong", "k"),
    [(2, 1, 4), (4, 0, 2), (0, 4, 2), (3, 1, 2), (2, 2, 4)],
    ids=["fewer than k", "all right", "all wrong", "every set has a right one", "one set"],
)
def test_sets_that_are_all_alike_give_exactly_nothing(right: int, wrong: int, k: int) -> None:
    assert of_counts(right, wrong, k) == (0.0, 0.0)


def test_k_is_held_against_the_graded_samples() -> None:
    group = judged([1.0, 0.0, 0.0, 0.0], graded=[True, True, True, False])
    (of_three,) = advantages([group], PassAtKAdvantage(k=3))
    assert of_three.tolist() == [0.0] * 4
    (of_two,) = advantages([group], PassAtKAdvantage(k=2))
    assert of_two.tolist() == [*advantages([judged([1.0, 0.0, 0.0])], PassAtKAdvantage(k=2))[0], 0.0]


def test_what_is_right_counts_and_not_the_reward() -> None:
    correct = [True, False, False]
    first = advantages([judged([1.0, -1.0, -1.0], correct=correct)], PassAtKAdvantage(k=2))
    second = advantages([judged([0.3, 0.3, 9.0], correct=correct)], PassAtKAdvantage(k=2))
    assert first[0].tolist() == second[0].tolist()


def test_easy_problems_count_less_the_larger_k_is() -> None:
    rights = [of_counts(right=4, wrong=4, k=k)[0] for k in (1, 2, 3, 4)]
    assert rights == sorted(rights, reverse=True)
    assert len(set(rights)) == 4
