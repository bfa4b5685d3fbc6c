from hypothesis import given

from beamline.algorithms.advantages import GroupRewards
from beamline.algorithms.advantages.rloo import advantages
from beamline.config.advantages import RlooAdvantage
from tests.unit.algorithms.advantages.exact_advantages import Values, assert_close, by_group, judged, mean, steps


def against_others(rewards: Values) -> Values:
    return [reward - mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]


@given(step=steps())
def test_rloo_is_its_formula(step: list[GroupRewards]) -> None:
    for group in step:
        assert_close(advantages([group], RlooAdvantage()), by_group([group], against_others))


def test_rloo_of_three_samples_by_hand() -> None:
    assert advantages([judged([1.0, 0.0, -1.0])], RlooAdvantage())[0].tolist() == [1.5, 0.0, -1.5]


def test_the_n_of_rloo_is_that_of_the_graded_samples_of_its_group() -> None:
    two, three = judged([1.0, 7.0, 0.0], graded=[True, False, True]), judged([3.0, 0.0, 0.0])
    assert [values.tolist() for values in advantages([two, three], RlooAdvantage())] == [
        [1.0, 0.0, -1.0],
        [3.0, -1.5, -1.5],
    ]
