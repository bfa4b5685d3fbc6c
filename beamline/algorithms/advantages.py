"""How much better a response was than the others to the same problem."""

import numpy as np
from numpy.typing import NDArray

_EPSILON = 1e-6


def grpo(rewards: NDArray[np.float64], graded: NDArray[np.bool_], norm_by_std: bool) -> NDArray[np.float64]:
    """Group-relative advantages ``[n]`` in fp64: ``(r - mean) / (std + 1e-6)`` over the graded samples.

    The standard deviation is the unbiased one. Samples without a grade get 0 and take no part. Fewer than two graded
    samples, or equal rewards, give exactly 0 for all. Without ``norm_by_std`` the difference to the mean is the
    advantage.

    Sources: GRPO, arXiv 2402.03300, section 4.1.2; without the division, Dr. GRPO, arXiv 2503.20783, section 3.
    """
    advantages = np.zeros(len(rewards))
    if has_signal(rewards, graded):
        counted = rewards[graded]
        difference = counted - counted.mean()
        advantages[graded] = difference / (counted.std(ddof=1) + _EPSILON) if norm_by_std else difference
    return advantages


def has_signal(rewards: NDArray[np.float64], graded: NDArray[np.bool_]) -> bool:
    """Whether a group says anything: two graded samples at least, with different rewards."""
    counted = rewards[graded]
    return len(counted) >= 2 and bool((counted != counted[0]).any())
