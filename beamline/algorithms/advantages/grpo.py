"""GRPO and Dr. GRPO: the reward against the mean of its group."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages.groups import GroupRewards, among_graded, centered, standardized
from beamline.config.advantages import GrpoAdvantage


def advantages(groups: Sequence[GroupRewards], config: GrpoAdvantage) -> list[NDArray[np.float64]]:
    """``(r - mean) / (std + 1e-6)`` over the graded samples of the group, or ``r - mean`` without ``norm_by_std``.

    The standard deviation is the unbiased one.

    Sources: GRPO, arXiv 2402.03300, section 4.1.2; without the division, Dr. GRPO, arXiv 2503.20783, section 3.
    """
    formula = standardized if config.norm_by_std else centered
    return [among_graded(group.rewards_n, group.graded_n, formula) for group in groups]
