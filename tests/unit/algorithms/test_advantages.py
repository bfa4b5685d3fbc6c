from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.advantages import grpo, has_signal

REWARDS = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-10, 10))
GROUPS = st.lists(st.tuples(REWARDS, st.booleans()), min_size=1, max_size=12)


def by_loop(rewards: list[float], graded: list[bool], norm_by_std: bool) -> list[float]:
    """The formula, one sample after the other."""
    counted = [r for r, g in zip(rewards, graded, strict=True) if g]
    if len(counted) < 2 or all(r == counted[0] for r in counted):
        return [0.0] * len(rewards)
    mean = sum(counted) / len(counted)
    std = sqrt(sum((r - mean) ** 2 for r in counted) / (len(counted) - 1))
    scale = std + 1e-6 if norm_by_std else 1.0
    return [(r - mean) / scale if g else 0.0 for r, g in zip(rewards, graded, strict=True)]


def both(*rewards: float) -> list[list[float]]:
    """Advantages of fully graded samples, normed and not."""
    return [grpo(np.array(rewards), np.ones(len(rewards), bool), norm).tolist() for norm in (True, False)]


@given(group=GROUPS, norm_by_std=st.booleans())
def test_advantages_are_those_of_the_loop(group: list[tuple[float, bool]], norm_by_std: bool) -> None:
    rewards, graded = [r for r, _ in group], [g for _, g in group]
    advantages = grpo(np.array(rewards), np.array(graded), norm_by_std)
    assert advantages.dtype == np.float64
    assert advantages.tolist() == pytest.approx(by_loop(rewards, graded, norm_by_std), rel=1e-12, abs=1e-12)


def test_two_samples_by_hand() -> None:
    normed, plain = both(1.0, -1.0)
    assert normed == pytest.approx([1 / (sqrt(2) + 1e-6), -1 / (sqrt(2) + 1e-6)], abs=1e-15)
    assert plain == [1.0, -1.0]


@pytest.mark.parametrize("reward", [0.1, -1.0, 1e9])
def test_equal_rewards_give_exactly_nothing(reward: float) -> None:
    assert both(*[reward] * 7) == [[0.0] * 7] * 2


def test_one_sample_gives_exactly_nothing() -> None:
    assert both(3.0) == [[0.0]] * 2


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_samples_without_a_grade_get_nothing_and_change_nothing(norm_by_std: bool) -> None:
    rewards, graded = np.array([1.0, 1e6, -1.0, np.nan, 0.0]), np.array([True, False, True, False, True])
    advantages = grpo(rewards, graded, norm_by_std)
    assert advantages[[1, 3]].tolist() == [0.0, 0.0]
    assert np.array_equal(advantages[graded], grpo(rewards[graded], graded[graded], norm_by_std))


@pytest.mark.parametrize("graded", [[True, False, False], [False] * 3])
def test_fewer_than_two_grades_give_exactly_nothing(graded: list[bool]) -> None:
    assert grpo(np.array([1.0, -1.0, 1.0]), np.array(graded), True).tolist() == [0.0] * 3


def test_a_group_has_a_signal_when_two_graded_rewards_differ() -> None:
    def signal(rewards: list[float], graded: list[bool]) -> bool:
        return has_signal(np.array(rewards), np.array(graded, dtype=bool))

    assert signal([1.0, 1.0, -1.0], [True] * 3)
    assert signal([1.0, 1.0, 1.0 + 1e-15], [True] * 3)
    assert not signal([1.0, 1.0, -1.0], [True, True, False])
    assert not signal([1.0, -1.0], [True, False])
    assert not signal([], [])
