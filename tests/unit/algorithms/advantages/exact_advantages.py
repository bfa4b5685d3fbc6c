"""What the tests of the advantages share: groups made up, and statistics without rounding."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import sqrt

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from beamline.algorithms.advantages import GroupRewards

EPSILON = Fraction(1e-6)
Values = list[Fraction]

# Values that meet often, values whose mean no fp64 number is, the largest and smallest that there may be.
REWARD = st.one_of(
    st.sampled_from([-1.0, 0.0, 1.0]),
    st.sampled_from([0.1, np.nextafter(0.1, 1.0), 1e6, np.nextafter(1e6, 0.0), 1e-300, 2e-300]),
    st.floats(-10, 10, allow_subnormal=False),
)


def judged(
    rewards: Sequence[float],
    graded: Sequence[bool] | None = None,
    correct: Sequence[bool] | None = None,
    **parts: Sequence[float],
) -> GroupRewards:
    """A group; all graded, correct where the reward is above 0, of one part, unless said otherwise."""
    rewards_n = np.array(rewards, dtype=np.float64)
    return GroupRewards(
        rewards_n=rewards_n,
        graded_n=np.ones(len(rewards), dtype=bool) if graded is None else np.array(graded, dtype=bool),
        correct_n=rewards_n > 0 if correct is None else np.array(correct, dtype=bool),
        parts={name: np.array(part, dtype=np.float64) for name, part in (parts or {"answer": rewards}).items()},
    )


def groups(reward: st.SearchStrategy[float] = REWARD) -> st.SearchStrategy[GroupRewards]:
    """Groups of 1 to 12 samples, each graded or not, with two parts that add up to the reward."""

    def build(samples: list[tuple[float, float, bool, bool]]) -> GroupRewards:
        answers, penalties, graded, correct = zip(*samples, strict=True)
        sums = [answer + penalty for answer, penalty in zip(answers, penalties, strict=True)]
        return judged(sums, graded, correct, answer=answers, penalty=penalties)

    sample = st.tuples(reward, st.one_of(st.just(0.0), reward), st.sampled_from([True, True, False]), st.booleans())
    return st.lists(sample, min_size=1, max_size=12).map(build)


def steps(reward: st.SearchStrategy[float] = REWARD) -> st.SearchStrategy[list[GroupRewards]]:
    """Steps of up to 5 groups."""
    return st.lists(groups(reward), max_size=5)


def exactly(values_n: NDArray[np.float64], graded_n: NDArray[np.bool_]) -> Values:
    """The graded values, as fractions."""
    return [Fraction(float(value)) for value, counts in zip(values_n, graded_n, strict=True) if counts]


def mean(values: Values) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def std(values: Values) -> Fraction:
    """The unbiased standard deviation; its square root alone is rounded, to fp64."""
    center = mean(values)
    variance = sum(((value - center) ** 2 for value in values), Fraction(0)) / (len(values) - 1)
    return Fraction(sqrt(variance))


def say_nothing(values: Values) -> bool:
    return len(values) < 2 or all(value == values[0] for value in values)


def with_ungraded(values: Values, graded_n: NDArray[np.bool_]) -> Values:
    """The values of graded samples, and 0 for the others, in the order of the samples."""
    following = iter(values)
    return [next(following) if counts else Fraction(0) for counts in graded_n]


def by_group(step: Sequence[GroupRewards], formula: Callable[[Values], Values]) -> list[Values]:
    """What a formula says for the graded rewards of each group, 0 for groups that say nothing."""
    expected = []
    for group in step:
        rewards = exactly(group.rewards_n, group.graded_n)
        values = [Fraction(0)] * len(rewards) if say_nothing(rewards) else formula(rewards)
        expected.append(with_ungraded(values, group.graded_n))
    return expected


def assert_close(
    computed: Sequence[NDArray[np.float64]], expected: Sequence[Values], scale: float | None = None
) -> None:
    """Equal to 1e-12 of ``scale``, which is the largest expected number unless given; exactly 0 where all are."""
    assert [values.dtype for values in computed] == [np.dtype(np.float64)] * len(expected)
    assert [len(values) for values in computed] == [len(values) for values in expected]
    if scale is None:
        scale = max((float(abs(value)) for values in expected for value in values), default=0.0)
    for have, want in zip(computed, expected, strict=True):
        assert np.abs(have - np.array([float(value) for value in want])).max() <= 1e-12 * scale
