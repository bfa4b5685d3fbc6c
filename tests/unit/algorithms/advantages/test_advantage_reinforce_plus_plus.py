from fractions import Fraction
from math import sqrt

import pytest
from hypothesis import given

from beamline.algorithms.advantages import GroupRewards
from beamline.algorithms.advantages.reinforce_plus_plus import advantages
from beamline.config.advantages import ReinforcePlusPlusAdvantage
from tests.unit.algorithms.advantages.exact_advantages import (
    EPSILON,
    Values,
    assert_close,
    by_group,
    exactly,
    judged,
    mean,
    say_nothing,
    std,
    steps,
    with_ungraded,
)

PLAIN, BASELINE = ReinforcePlusPlusAdvantage(), ReinforcePlusPlusAdvantage(group_baseline=True)


def normalized_over(step: list[GroupRewards], values: list[Values]) -> list[Values]:
    """Equations 5 and 7: values of the graded samples, normalized over all of them."""
    together = [value for graded in values for value in graded]
    if say_nothing(together):
        return [[Fraction(0)] * len(group.graded_n) for group in step]
    center, scale = mean(together), std(together) + EPSILON
    return [
        with_ungraded([(value - center) / scale for value in graded], group.graded_n)
        for graded, group in zip(values, step, strict=True)
    ]


@given(step=steps())
def test_reinforce_plus_plus_is_its_formula(step: list[GroupRewards]) -> None:
    rewards = [exactly(group.rewards_n, group.graded_n) for group in step]
    assert_close(advantages(step, PLAIN), normalized_over(step, rewards))


@given(step=steps())
def test_reinforce_plus_plus_with_a_baseline_is_its_formula(step: list[GroupRewards]) -> None:
    def formula(rewards: Values) -> Values:
        return [reward - mean(rewards) for reward in rewards]

    against_group = [
        [value for value, counts in zip(values, group.graded_n, strict=True) if counts]
        for values, group in zip(by_group(step, formula), step, strict=True)
    ]
    assert_close(advantages(step, BASELINE), normalized_over(step, against_group))


def test_both_forms_by_hand() -> None:
    step = [judged([1.0, 0.0]), judged([1.0, 1.0])]
    plain, baseline = advantages(step, PLAIN), advantages(step, BASELINE)
    assert [values.tolist() for values in plain] == [
        pytest.approx([0.25 / (0.5 + 1e-6), -0.75 / (0.5 + 1e-6)], abs=1e-15),
        pytest.approx([0.25 / (0.5 + 1e-6)] * 2, abs=1e-15),
    ]
    scale = sqrt(0.5 / 3) + 1e-6  # over all four samples: 0.5, -0.5, 0 and 0
    assert baseline[0].tolist() == pytest.approx([0.5 / scale, -0.5 / scale], abs=1e-15)
    assert baseline[1].tolist() == [0.0, 0.0]


def test_groups_of_one_sample_are_compared_with_each_other_but_have_no_baseline() -> None:
    step = [judged([1.0]), judged([0.0])]
    assert advantages(step, PLAIN)[0][0] > 0 > advantages(step, PLAIN)[1][0]
    assert [values.tolist() for values in advantages(step, BASELINE)] == [[0.0], [0.0]]


@pytest.mark.parametrize("step", [[judged([0.1] * 2), judged([0.1])], [judged([5.0])], [judged([5.0], [False])], []])
@pytest.mark.parametrize("config", [PLAIN, BASELINE])
def test_a_step_that_says_nothing_gives_exactly_nothing(
    step: list[GroupRewards], config: ReinforcePlusPlusAdvantage
) -> None:
    assert [values.tolist() for values in advantages(step, config)] == [[0.0] * len(group.graded_n) for group in step]


def test_a_group_without_signal_keeps_exactly_nothing_beside_groups_whose_mean_is_rounded() -> None:
    *_, silent = advantages([judged([0.1, 0.2, 0.4]), judged([0.3, 0.7, 0.7]), judged([0.1] * 3)], BASELINE)
    assert silent.tolist() == [0.0] * 3
