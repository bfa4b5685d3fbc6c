"""What an advantage is computed from, and what several of the formulas share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from beamline.records import Group

EPSILON = 1e-6
"""Added to every standard deviation that is divided by."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """How the n samples of one problem were judged. The reward is the sum of its ``parts``.

    ``rewards_n``, ``correct_n`` and ``parts`` mean nothing where ``graded_n`` is false.
    """

    rewards_n: NDArray[np.float64]
    graded_n: NDArray[np.bool_]
    correct_n: NDArray[np.bool_]
    parts: Mapping[str, NDArray[np.float64]]


def rewards_of(group: Group) -> GroupRewards:
    """The judgements of a group's rollouts."""
    verdicts = [rollout.verdict for rollout in group.rollouts]
    names = sorted({name for verdict in verdicts if verdict is not None for name in verdict.parts})
    return GroupRewards(
        rewards_n=np.array([0.0 if verdict is None else verdict.reward for verdict in verdicts]),
        graded_n=np.array([verdict is not None for verdict in verdicts]),
        correct_n=np.array([verdict is not None and verdict.correct for verdict in verdicts]),
        parts={
            name: np.array([0.0 if verdict is None else verdict.parts.get(name, 0.0) for verdict in verdicts])
            for name in names
        },
    )


Formula = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From the values of graded samples, two at least and not all equal, to as many others."""


def among_graded(values_n: NDArray[np.float64], graded_n: NDArray[np.bool_], formula: Formula) -> NDArray[np.float64]:
    """The formula over the graded values, ``[n]`` in fp64.

    Exactly 0 for what was not graded, and for all if the graded values say nothing: fewer than two, or all equal.
    """
    computed = np.zeros(len(values_n))
    if differ(values_n[graded_n]):
        computed[graded_n] = formula(values_n[graded_n])
    return computed


def among_step(
    groups: Sequence[GroupRewards], values: Sequence[NDArray[np.float64]], formula: Formula
) -> list[NDArray[np.float64]]:
    """The formula over all graded values of a step together, otherwise like `among_graded`.

    ``values`` has an array ``[n]`` for each group, and so has the result.
    """
    step = among_graded(
        np.fromiter(chain.from_iterable(values), np.float64),
        np.fromiter(chain.from_iterable(group.graded_n for group in groups), np.bool_),
        formula,
    )
    ends = np.cumsum([len(values_n) for values_n in values])
    return [step[end - len(values_n) : end] for values_n, end in zip(values, ends, strict=True)]


def differ(values: NDArray[np.float64]) -> bool:
    """Whether not all values are equal; then there are two at least."""
    return bool((values != values[:1]).any())


def centered(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values less their mean."""
    # One of them goes first: differences of close numbers are exact, while the rounding of the mean of large ones could
    # be larger than all differences, and would then be divided by hardly more than EPSILON.
    differences: NDArray[np.float64] = values - values[0]
    return differences - float(differences.mean())


def scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values over their standard deviation, unbiased, + 1e-6."""
    return values / (float(values.std(ddof=1)) + EPSILON)


def standardized(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``(value - mean) / (std + 1e-6)``."""
    return scaled(centered(values))
