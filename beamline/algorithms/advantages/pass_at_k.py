"""Pass@k training: what a response adds to the chance that one of k is right."""

from collections.abc import Sequence
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages.groups import GroupRewards
from beamline.config.advantages import PassAtKAdvantage


def advantages(groups: Sequence[GroupRewards], config: PassAtKAdvantage) -> list[NDArray[np.float64]]:
    """The mean advantage of all sets of k graded samples that a sample belongs to; whether it is right alone counts.

    A set has reward 1 if one of it is right, and 0 otherwise. With n graded samples, w of them wrong, the sets have the
    mean reward ``m = 1 - C(w, k) / C(n, k)`` and the standard deviation ``std = sqrt(m (1 - m))``, and

    - a right sample gets ``(1 - m) / std``,
    - a wrong one ``(1 - m - C(w - 1, k - 1) / C(n - 1, k - 1)) / std``.

    All get exactly 0 if fewer than k samples were graded, or all sets have the same reward.

    Source: arXiv 2508.10751, section 2.4, equations 11, 12, 14 and 15.
    """
    return [_of_group(group, config.k) for group in groups]


def _of_group(group: GroupRewards, k: int) -> NDArray[np.float64]:
    """The formula in whole numbers, where nothing overflows or cancels: a ratio of integers is rounded once.

    With F failing and P passing sets, ``(1 - m) / std = sqrt(F / P)``. From ``C(w, k) = C(w - 1, k - 1) w / k`` follows
    that the advantages of a group sum to 0, which gives that of a wrong sample.
    """
    right_n, wrong_n = group.graded_n & group.correct_n, group.graded_n & ~group.correct_n
    right, wrong = int(right_n.sum()), int(wrong_n.sum())
    failing = comb(wrong, k)
    passing = comb(right + wrong, k) - failing
    computed = np.zeros(len(group.graded_n))
    if failing and passing:
        computed[right_n] = sqrt(failing / passing)
        computed[wrong_n] = -sqrt(failing / passing) * right / wrong
    return computed
