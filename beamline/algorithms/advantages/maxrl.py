"""MaxRL: the reward against the mean of its group, over that mean."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages.groups import GroupRewards, among_graded, centered
from beamline.config.advantages import MaxrlAdvantage


def advantages(groups: Sequence[GroupRewards], config: MaxrlAdvantage) -> list[NDArray[np.float64]]:
    """``(r - mean) / mean`` over the graded samples of the group; rewards are 0 and more.

    With rewards of 0 and 1 the gradient approximates that of the log-likelihood of a right answer. Where all rewards
    are 0 the advantages are 0, as in the paper; elsewhere the mean is not 0, so that it needs no epsilon.

    Source: arXiv 2602.02710, algorithm 1.
    """
    return [among_graded(group.rewards_n, group.graded_n, _relative) for group in groups]


def _relative(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    return centered(rewards) / float(rewards.mean())
