"""GDPO: each part of the reward normalized in its group, then their sum over the whole step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages.groups import GroupRewards, among_graded, among_step, scaled, standardized
from beamline.config.advantages import GdpoAdvantage


def advantages(groups: Sequence[GroupRewards], config: GdpoAdvantage) -> list[NDArray[np.float64]]:
    """``A / (std_step(A) + 1e-6)``; ``A`` is the sum of ``(r - mean) / (std + 1e-6)`` over the parts r of the reward.

    ``mean`` and ``std`` are those of the part over the graded samples of the group; a part that is equal for all of
    them adds exactly 0. Parts that differ are a signal even where they cancel in the reward, their sum. ``std_step`` is
    over all graded samples of the step. The paper subtracts the mean of ``A`` over the step too, which is 0 but for
    rounding, because it is 0 in every group; without that a group without signal keeps exactly 0. The standard
    deviations are the unbiased ones.

    Source: arXiv 2601.05242, section 3.
    """
    return among_step(groups, [_sum_of_parts(group) for group in groups], scaled)


def _sum_of_parts(group: GroupRewards) -> NDArray[np.float64]:
    normalized = (among_graded(part_n, group.graded_n, standardized) for part_n in group.parts.values())
    return sum(normalized, np.zeros(len(group.rewards_n)))
