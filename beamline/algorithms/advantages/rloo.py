"""RLOO: the reward against the mean of the others of its group."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages.groups import GroupRewards, among_graded, centered
from beamline.config.advantages import RlooAdvantage


def advantages(groups: Sequence[GroupRewards], config: RlooAdvantage) -> list[NDArray[np.float64]]:
    """``r_i - sum_{j != i} r_j / (n - 1)`` over the n graded samples of the group.

    Source: REINFORCE leave-one-out, arXiv 2402.14740.
    """
    return [among_graded(group.rewards_n, group.graded_n, _against_others) for group in groups]


def _against_others(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """A sample is 1/n of the mean of all, so that without it the difference is n / (n - 1) times as large."""
    return centered(rewards) * (len(rewards) / (len(rewards) - 1))
