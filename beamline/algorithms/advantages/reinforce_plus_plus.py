"""REINFORCE++: the reward, normalized over the whole step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages.groups import (
    GroupRewards,
    among_graded,
    among_step,
    centered,
    scaled,
    standardized,
)
from beamline.config.advantages import ReinforcePlusPlusAdvantage


def advantages(groups: Sequence[GroupRewards], config: ReinforcePlusPlusAdvantage) -> list[NDArray[np.float64]]:
    """``(r - mean) / (std + 1e-6)`` over all graded samples of the step, each counted once, however long it is.

    With ``group_baseline`` it is ``r - mean_group`` that is divided by its standard deviation over the step. Its mean
    over the step is not subtracted, because it is 0 but for rounding, and a group without signal keeps exactly 0.
    The standard deviations are the unbiased ones.

    Source: arXiv 2501.03262v9, equation 5; with the baseline, equations 6 and 7.
    """
    if config.group_baseline:
        against_group = [among_graded(group.rewards_n, group.graded_n, centered) for group in groups]
        return among_step(groups, against_group, scaled)
    return among_step(groups, [group.rewards_n for group in groups], standardized)
