from fractions import Fraction

import pytest
from hypothesis import given

from beamline.algorithms.advantages import GroupRewards, has_signal
from beamline.algorithms.advantages.gdpo import advantages
from beamline.algorithms.advantages.grpo import advantages as grpo
from beamline.config.advantages import GdpoAdvantage, GrpoAdvantage
from tests.unit.algorithms.advantages.exact_advantages import (
    EPSILON,
    Values,
    assert_close,
    exactly,
    judged,
    mean,
    say_nothing,
    std,
    steps,
    with_ungraded,
)


def normalized(values: Values) -> Values:
    if say_nothing(values):
        return [Fraction(0)] * len(values)
    center, scale = mean(values), std(values) + EPSILON
    return [(value - center) / scale for value in values]


@given(step=steps())
def test_gdpo_is_its_formula(step: list[GroupRewards]) -> None:
    sums, largest = [], 0.0
    for group in step:
        parts = [normalized(exactly(part_n, group.graded_n)) for part_n in group.parts.values()]
        sums.append([sum(of_sample, Fraction(0)) for of_sample in zip(*parts, strict=True)])
        largest = max([largest, *(float(sum(map(abs, of_sample))) for of_sample in zip(*parts, strict=True))])
    together = [value for graded in sums for value in graded]
    center, scale = (Fraction(0), Fraction(1)) if say_nothing(together) else (mean(together), std(together) + EPSILON)
    expected = [
        with_ungraded([(value - center) / scale for value in graded], group.graded_n)
        for graded, group in zip(sums, step, strict=True)
    ]
    # Parts may nearly cancel, and what is left is divided by how much is left: the terms are what is exact to 1e-12.
    assert_close(advantages(step, GdpoAdvantage()), expected, scale=largest / float(scale))


def test_sums_of_rewards_that_are_equal_have_different_advantages() -> None:
    # Figure 2 of the paper: one more right answer, or an answer and a format, are the same to GRPO.
    one = judged([0.0, 1.0], answer=[0.0, 1.0], form=[0.0, 0.0])
    both = judged([0.0, 2.0], answer=[0.0, 1.0], form=[0.0, 1.0])
    (_, of_one), (_, of_both) = advantages([one, both], GdpoAdvantage())
    assert of_both == pytest.approx(2 * of_one)
    (_, of_one), (_, of_both) = grpo([one, both], GrpoAdvantage())
    assert of_both == pytest.approx(of_one, rel=1e-5)


def test_a_large_part_does_not_drown_a_small_one() -> None:
    group = judged([101.0, 100.0, 1.0, 0.0], answer=[100.0, 100.0, 0.0, 0.0], form=[1.0, 0.0, 1.0, 0.0])
    (computed,) = advantages([group], GdpoAdvantage())
    assert computed[1] == pytest.approx(computed[2], abs=1e-5)


def test_a_part_that_is_equal_for_all_adds_nothing() -> None:
    alone = advantages([judged([1.0, 0.0, 0.0])], GdpoAdvantage())
    beside = advantages([judged([1.1, 0.1, 0.1], answer=[1.0, 0.0, 0.0], form=[0.1] * 3)], GdpoAdvantage())
    assert beside[0].tolist() == alone[0].tolist()


def test_parts_that_cancel_in_the_reward_are_a_signal() -> None:
    group = judged([1.0] * 3, answer=[1.0, 0.0, 0.0], late=[0.0, 0.2, 1.0], form=[0.0, 0.8, 0.0])
    assert not has_signal(group, GrpoAdvantage())
    assert has_signal(group, GdpoAdvantage())


def test_parts_that_are_opposites_of_each_other_say_nothing() -> None:
    group = judged([0.0] * 3, answer=[1.0, 0.0, 0.3], late=[-1.0, 0.0, -0.3])
    assert advantages([group], GdpoAdvantage())[0].tolist() == [0.0] * 3


def test_a_group_without_signal_keeps_exactly_nothing_with_gdpo() -> None:
    *_, silent = advantages([judged([0.1, 0.2, 0.4]), judged([0.3, 0.7, 0.7]), judged([0.1] * 3)], GdpoAdvantage())
    assert silent.tolist() == [0.0] * 3


@pytest.mark.parametrize("step", [[judged([0.1] * 3)], [judged([5.0])], [judged([5.0], [False])], []])
def test_a_step_that_says_nothing_gives_exactly_nothing_with_gdpo(step: list[GroupRewards]) -> None:
    assert [v.tolist() for v in advantages(step, GdpoAdvantage())] == [[0.0] * len(group.graded_n) for group in step]


def test_a_part_that_one_group_has_and_another_has_not_is_theirs_alone() -> None:
    with_form = judged([1.0, 1.0, 0.0], answer=[1.0, 0.0, 0.0], form=[0.0, 1.0, 0.0])
    without = judged([1.0, 0.0])
    computed = advantages([with_form, without], GdpoAdvantage())
    padded = judged([1.0, 0.0], answer=[1.0, 0.0], form=[0.0, 0.0])
    assert [v.tolist() for v in computed] == [v.tolist() for v in advantages([with_form, padded], GdpoAdvantage())]
