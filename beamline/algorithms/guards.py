"""What the first update of a process must look like: engines that disagree are found before anything is learned."""

import numpy as np
from numpy.typing import NDArray

from beamline.errors import BeamlineError

RATIO_TOLERANCE = 1e-6
"""Of pi / pi_old before the first update: a rounding or two of a float32 log-probability, and far below any clip."""

Floats = NDArray[np.float32]


class GuardError(BeamlineError, RuntimeError):
    """The engines do not compute what training relies on."""


def check_ratio(logprobs_T: Floats, old_logprobs_T: Floats) -> None:
    """Make sure that evaluating the same weights twice gives the same log-probabilities of T tokens.

    Raises:
        GuardError: pi / pi_old differs from 1 by more than 1e-6 somewhere, or is not a number.
    """
    with np.errstate(over="ignore"):  # a ratio that is no number any more is an answer too
        deviation = np.abs(np.expm1(logprobs_T.astype(np.float64) - old_logprobs_T)).max(initial=0.0)
    if not deviation <= RATIO_TOLERANCE:
        raise GuardError(
            f"before the first update pi / pi_old differs from 1 by up to {deviation:.3g}, where {RATIO_TOLERANCE:g} "
            "is allowed: the learner does not give the same log-probabilities twice. Likely causes: dropout or another "
            "random layer is on, kernels are not deterministic, the weights changed between the two passes, or the "
            "backward pass uses other kernels. algorithm.guard.ratio=false trains all the same"
        )


def check_mismatch(old_logprobs_T: Floats, sampler_logprobs_T: Floats, limit: float) -> None:
    """Make sure that the sampler drew its T tokens from the policy that the learner holds.

    Raises:
        GuardError: the mean of |log pi_old - log mu| is over the limit, in nats, or is not a number.
    """
    differences_T = np.abs(old_logprobs_T.astype(np.float64) - sampler_logprobs_T)
    mean = differences_T.sum() / max(len(differences_T), 1)
    if not mean <= limit:
        raise GuardError(
            f"before the first update the log-probabilities of sampler and learner differ by {mean:.3g} nats in the "
            f"mean, where algorithm.guard.mismatch={limit:g} is allowed. Likely causes: the sampler has other weights, "
            "another temperature or a filter that the learner does not know, the prompts are tokenized differently, or "
            "one of the two computes in a much lower precision. algorithm.guard.mismatch=null trains all the same"
        )
