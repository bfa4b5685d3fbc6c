from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.advantages import GroupRewards
from beamline.algorithms.advantages.grpo import advantages
from beamline.config.advantages import GrpoAdvantage
from tests.unit.algorithms.advantages.exact_advantages import (
    EPSILON,
    Values,
    assert_close,
    by_group,
    judged,
    mean,
    std,
    steps,
)

NORMED, PLAIN = GrpoAdvantage(), GrpoAdvantage(norm_by_std=False)


@given(step=steps(), norm_by_std=st.booleans())
def test_grpo_is_its_formula(step: list[GroupRewards], norm_by_std: bool) -> None:
    def formula(rewards: Values) -> Values:
        scale = std(rewards) + EPSILON if norm_by_std else 1
        return [(reward - mean(rewards)) / scale for reward in rewards]

    for group in step:
        computed = advantages([group], GrpoAdvantage(norm_by_std=norm_by_std))
        assert_close(computed, by_group([group], formula))


def test_grpo_of_two_samples_by_hand() -> None:
    assert advantages([judged([1.0, -1.0])], NORMED)[0].tolist() == pytest.approx(
        [1 / (sqrt(2) + 1e-6), -1 / (sqrt(2) + 1e-6)], abs=1e-15
    )
    assert advantages([judged([1.0, -1.0])], PLAIN)[0].tolist() == [1.0, -1.0]


def test_one_right_answer_counts_more_the_rarer_it_is_with_grpo() -> None:
    rare, common = advantages([judged([1.0, *[0.0] * 7]), judged([1.0, 0.0])], NORMED)
    assert rare[0] > common[0]
