"""What must not matter, for all advantages at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from beamline.algorithms.advantages import GroupRewards, advantages, has_signal
from beamline.config.advantages import (
    Advantage,
    GdpoAdvantage,
    GrpoAdvantage,
    MaxrlAdvantage,
    PassAtKAdvantage,
    ReinforcePlusPlusAdvantage,
    RlooAdvantage,
)
from tests.unit.algorithms.advantages.exact_advantages import groups, judged, steps

CONFIGS: dict[str, Advantage] = {
    "grpo": GrpoAdvantage(),
    "dr_grpo": GrpoAdvantage(norm_by_std=False),
    "rloo": RlooAdvantage(),
    "reinforce_plus_plus": ReinforcePlusPlusAdvantage(),
    "reinforce_plus_plus_baseline": ReinforcePlusPlusAdvantage(group_baseline=True),
    "maxrl": MaxrlAdvantage(),
    "gdpo": GdpoAdvantage(),
    "pass_at_k": PassAtKAdvantage(k=2),
}
OF_THE_STEP = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
# All but REINFORCE++ without a baseline compare the samples of a group with each other alone.
GROUP_RELATIVE = [name for name in CONFIGS if name != "reinforce_plus_plus"]
POSITIVE = st.one_of(st.sampled_from([0.0, 0.1, 1.0, 1e6, 1e-300]), st.floats(0, 10, allow_subnormal=False))
WHOLE = st.integers(0, 5).map(float)  # sums, shifts and multiples of these are exact

few = settings(max_examples=40)  # for each of eight advantages
of_all = pytest.mark.parametrize("name", CONFIGS)
of_group_relative = pytest.mark.parametrize("name", GROUP_RELATIVE)


def test_every_advantage_is_among_those_that_are_held_against_the_invariances() -> None:
    assert {type(config) for config in CONFIGS.values()} == set(get_args(get_args(Advantage)[0]))


def largest(values: Sequence[NDArray[np.float64]]) -> float:
    return max((float(np.abs(of_group).max()) for of_group in values), default=0.0)


def chosen(group: GroupRewards, samples: Sequence[int] | NDArray[np.intp]) -> GroupRewards:
    """Samples of a group, in another order or some of them."""
    parts = {name: part_n[samples] for name, part_n in group.parts.items()}
    return GroupRewards(group.rewards_n[samples], group.graded_n[samples], group.correct_n[samples], parts)


def shifted(group: GroupRewards, factor: float, shift: float) -> GroupRewards:
    """Rewards, and parts, times a factor and plus a number."""
    parts = {name: factor * part_n + shift for name, part_n in group.parts.items()}
    return replace(group, rewards_n=factor * group.rewards_n + shift, parts=parts)


@of_all
@few
@given(step=steps(POSITIVE))
def test_there_is_a_finite_number_for_each_sample(name: str, step: list[GroupRewards]) -> None:
    computed = advantages(step, CONFIGS[name])
    assert [len(values) for values in computed] == [len(group.rewards_n) for group in step]
    assert all(values.dtype == np.float64 and np.isfinite(values).all() for values in computed)


@of_all
@few
@given(step=steps(POSITIVE))
def test_samples_without_a_grade_get_exactly_nothing_and_change_nothing(name: str, step: list[GroupRewards]) -> None:
    def unknown(values_n: NDArray[np.float64], graded_n: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.where(graded_n, values_n, np.nan)

    noisy = [
        GroupRewards(
            unknown(group.rewards_n, group.graded_n),
            group.graded_n,
            group.correct_n | ~group.graded_n,
            {part: unknown(part_n, group.graded_n) for part, part_n in group.parts.items()},
        )
        for group in step
    ]
    without = [chosen(group, np.flatnonzero(group.graded_n)) for group in step]
    computed = advantages(noisy, CONFIGS[name])
    assert not any(values[~group.graded_n].any() for values, group in zip(computed, step, strict=True))
    assert [values[group.graded_n].tolist() for values, group in zip(computed, step, strict=True)] == [
        values.tolist() for values in advantages(without, CONFIGS[name])
    ]


@of_all
@few
@given(step=steps(WHOLE), seed=st.integers(0, 100))
def test_the_order_of_samples_does_not_matter(name: str, step: list[GroupRewards], seed: int) -> None:
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(len(group.rewards_n)) for group in step]
    computed = advantages(step, CONFIGS[name])
    permuted = advantages([chosen(group, order) for group, order in zip(step, orders, strict=True)], CONFIGS[name])
    for values, others, order in zip(computed, permuted, orders, strict=True):
        assert np.abs(values[order] - others).max() <= 1e-12 * largest(computed)


@of_all
@few
@given(step=steps(WHOLE))
def test_the_order_of_groups_does_not_matter(name: str, step: list[GroupRewards]) -> None:
    computed = advantages(step, CONFIGS[name])
    for values, others in zip(computed, reversed(advantages(step[::-1], CONFIGS[name])), strict=True):
        assert np.abs(values - others).max() <= 1e-12 * largest(computed)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OF_THE_STEP])
@few
@given(step=steps(POSITIVE))
def test_groups_do_not_see_each_other(name: str, step: list[GroupRewards]) -> None:
    alone = [advantages([group], CONFIGS[name])[0].tolist() for group in step]
    assert [values.tolist() for values in advantages(step, CONFIGS[name])] == alone


@pytest.mark.parametrize("name", OF_THE_STEP)
def test_groups_of_a_step_share_their_scale(name: str) -> None:
    group = judged([1.0, 0.0])
    (alone,) = advantages([group], CONFIGS[name])
    beside, _ = advantages([group, judged([0.0, 0.0, 0.0])], CONFIGS[name])
    assert alone.tolist() != beside.tolist()


@of_group_relative
@few
@given(step=steps(POSITIVE))
def test_advantages_of_a_group_sum_to_nothing(name: str, step: list[GroupRewards]) -> None:
    computed = advantages(step, CONFIGS[name])
    for values in computed:
        assert abs(values.sum()) <= 1e-12 * max(1.0, largest(computed))


@few
@given(step=steps(POSITIVE))
def test_advantages_of_a_step_of_reinforce_plus_plus_sum_to_nothing(step: list[GroupRewards]) -> None:
    computed = advantages(step, CONFIGS["reinforce_plus_plus"])
    assert abs(sum(values.sum() for values in computed)) <= 1e-12 * max(1.0, largest(computed))


@of_group_relative
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e6, 1e-300])
@pytest.mark.parametrize("samples", [1, 3, 7])
@pytest.mark.parametrize("right", [True, False])
def test_equal_samples_give_exactly_nothing(name: str, reward: float, samples: int, right: bool) -> None:
    silent = judged([reward] * samples, correct=[right] * samples)
    assert not has_signal(silent, CONFIGS[name])
    computed, _ = advantages([silent, judged([1.0, 0.0, 0.0])], CONFIGS[name])
    assert computed.tolist() == [0.0] * samples


@of_group_relative
@few
@given(step=st.lists(groups(POSITIVE), max_size=5), right=st.booleans())
def test_groups_without_signal_get_exactly_nothing(name: str, step: list[GroupRewards], right: bool) -> None:
    step = [replace(g, parts={"answer": g.rewards_n}, correct_n=g.rewards_n > 0) for g in step]
    for group, values in zip(step, advantages(step, CONFIGS[name]), strict=True):
        assert has_signal(group, CONFIGS[name]) == values.any()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("gdpo", "pass_at_k")])
@few
@given(group=groups(WHOLE))
def test_a_higher_reward_is_a_higher_advantage(name: str, group: GroupRewards) -> None:
    group = chosen(group, np.flatnonzero(group.graded_n))
    (values,) = advantages([group], CONFIGS[name])
    for i in range(len(values)):
        for j in range(len(values)):
            assert (group.rewards_n[i] > group.rewards_n[j]) == (values[i] > values[j])


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "maxrl"])
@few
@given(step=steps(WHOLE), shift=st.sampled_from([-1.0, 3.0, 1024.0]))
def test_what_is_added_to_all_rewards_does_not_matter(name: str, step: list[GroupRewards], shift: float) -> None:
    computed = advantages(step, CONFIGS[name])
    moved = advantages([shifted(group, 1.0, shift) for group in step], CONFIGS[name])
    assert largest([a - b for a, b in zip(computed, moved, strict=True)]) <= 1e-12 * largest(computed)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
@few
@given(step=steps(WHOLE), factor=st.sampled_from([0.5, 3.0]))
def test_without_a_scale_advantages_grow_like_rewards(name: str, step: list[GroupRewards], factor: float) -> None:
    computed = advantages(step, CONFIGS[name])
    grown = advantages([shifted(group, factor, 0.0) for group in step], CONFIGS[name])
    assert largest([factor * a - b for a, b in zip(computed, grown, strict=True)]) <= 1e-12 * largest(computed)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "pass_at_k"])
@few
@given(step=steps(st.sampled_from([0.0, 1.0])), factor=st.sampled_from([0.5, 3.0]))
def test_with_a_scale_advantages_stay_but_for_the_epsilon(name: str, step: list[GroupRewards], factor: float) -> None:
    step = [replace(group, parts={"answer": group.rewards_n}) for group in step]  # so that no parts nearly cancel
    computed = advantages(step, CONFIGS[name])
    grown = advantages([shifted(group, factor, 0.0) for group in step], CONFIGS[name])
    assert largest([a - b for a, b in zip(computed, grown, strict=True)]) <= 1e-4 * largest(computed)
