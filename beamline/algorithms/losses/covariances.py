"""How log-probability and advantage covary token by token, for the losses that choose by it."""

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.losses.terms import BatchTokens


def covariances(tokens: BatchTokens) -> NDArray[np.float64]:
    """``(log pi_old - mean)(A - mean)`` of each token ``[T]``, the means taken over all T.

    Source: arXiv 2505.22617, equation 10.
    """
    return _centered(tokens.logprobs_T) * _centered(tokens.advantages_T)


def quota(share: float, count: int) -> int:
    """``share`` of ``count`` tokens, rounded down, but at least one where there is one.

    Rounding to none would switch the method off silently; the authors' code takes one too.
    """
    return min(count, max(1, int(share * count)))


def _centered(values_T: NDArray[np.float64]) -> NDArray[np.float64]:
    # Summed in sorted order, so that the last bit does not depend on the order of the tokens.
    mean = float(np.sort(values_T).sum()) / max(1, len(values_T))
    return values_T - mean
