import pytest
from hypothesis import given

from beamline.algorithms.advantages import GroupRewards
from beamline.algorithms.advantages.maxrl import advantages
from beamline.config.advantages import MaxrlAdvantage
from tests.unit.algorithms.advantages.exact_advantages import (
    REWARD,
    Values,
    assert_close,
    by_group,
    judged,
    mean,
    steps,
)


@given(step=steps(REWARD.map(abs)))
def test_maxrl_is_its_formula(step: list[GroupRewards]) -> None:
    def formula(rewards: Values) -> Values:
        return [(reward - mean(rewards)) / mean(rewards) for reward in rewards]

    for group in step:
        assert_close(advantages([group], MaxrlAdvantage()), by_group([group], formula))


@pytest.mark.parametrize("right", range(1, 16))
def test_right_samples_together_weigh_as_much_whatever_their_number(right: int) -> None:
    # Of n samples K are right. The paper sums over samples, with 1 / K - 1 / n for a right one and -1 / n for a wrong
    # one; here the mean over samples is taken later, so that all are n times as large.
    n = 16
    (computed,) = advantages([judged([1.0] * right + [0.0] * (n - right))], MaxrlAdvantage())
    assert computed.tolist() == pytest.approx(
        [n * (1 / right - 1 / n)] * right + [n * (-1 / n)] * (n - right), abs=1e-12
    )


@pytest.mark.parametrize("scale", [1e-300, 1e-6, 0.3, 1e6])
def test_maxrl_does_not_see_the_scale_of_rewards(scale: float) -> None:
    rewards = [1.0, 0.0, 2.0, 0.5]
    (computed,), (of_scaled,) = (
        advantages([judged([factor * reward for reward in rewards])], MaxrlAdvantage()) for factor in (1.0, scale)
    )
    assert of_scaled.tolist() == pytest.approx(computed.tolist(), abs=1e-12)


def test_maxrl_has_nothing_to_say_where_all_rewards_are_0() -> None:
    assert advantages([judged([0.0] * 4)], MaxrlAdvantage())[0].tolist() == [0.0] * 4
