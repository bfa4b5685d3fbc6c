"""What is done about a learner that does not compute what the sampler did: weights and masks from their ratio."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beamline.config.correction import (
    CorrectionConfig,
    GeometricMask,
    IcepopWeight,
    MaskedWeight,
    NoMask,
    NoWeight,
    Range,
)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Correction:
    """What the rules say of T tokens: which are kept, what those weigh, and what each rule alone does.

    ``weights_T`` is 0 where a token is not kept. ``masked`` has the tokens that a rule leaves out, for every rule that
    is on and may: ``veto``, ``sequence_mask`` and ``weight``, the last not for ``tis``, which keeps all. ``capped_T``
    are those with a weight of ``tis`` that the cap lowered, None without it.
    """

    keep_T: Flags
    weights_T: Floats
    masked: Mapping[str, Flags]
    capped_T: Flags | None


def correct(
    old_logprobs_T: Floats, sampler_logprobs_T: Floats, tokens_B: NDArray[np.int64], config: CorrectionConfig
) -> Correction:
    """Apply the rules to the T response tokens of B sequences, one after the other, ``tokens_B`` each.

    With ``rho_t = pi_old / mu``: every rule judges all tokens of a response, whatever another one says of them, so the
    result does not depend on an order. A token stays if all rules keep it; bounds belong to what is kept.

    - weight ``tis``: ``min(rho, cap)`` (Yao et al., Your efficient RL framework secretly brings you off-policy RL
      training, 2025); ``mis``: ``rho`` where ``rho <= cap`` (Liu, Li et al., When speed kills stability, 2025);
      ``icepop``: ``rho`` where ``low <= rho <= high`` (Ring-1T, arXiv 2510.18855). At level ``sequence`` rho is the
      product over the response.
    - sequence mask: a response stays where ``exp(mean_t log rho_t)`` (``geometric``) or ``exp(sum_t log rho_t)``
      (``product``) is inside of the bounds (Liu, Li et al.).
    - veto: a response stays where every ``rho_t`` is inside of the bounds (the rollout correction of verl and SkyRL).

    Bounds are held against logarithms, so that nothing overflows.

    Raises:
        ValueError: a log-probability is missing (NaN) or not finite.
    """
    _check_given(old_logprobs_T, "learner")
    _check_given(sampler_logprobs_T, "sampler")
    log_ratio_T = old_logprobs_T - sampler_logprobs_T
    sequence_T = np.repeat(np.arange(len(tokens_B)), tokens_B)
    log_product_B = np.bincount(sequence_T, log_ratio_T, minlength=len(tokens_B)).astype(np.float64)

    veto, mask, weight = config.veto, config.sequence_mask, config.weight
    keeps: dict[str, Flags] = {}
    capped_T = None
    if not isinstance(veto, NoMask):
        outside_T = ~_inside(log_ratio_T, veto)
        keeps["veto"] = (np.bincount(sequence_T[outside_T], minlength=len(tokens_B)) == 0)[sequence_T]
    if not isinstance(mask, NoMask):
        judged_B = log_product_B / np.maximum(tokens_B, 1) if isinstance(mask, GeometricMask) else log_product_B
        keeps["sequence_mask"] = _inside(judged_B, mask)[sequence_T]
    if isinstance(weight, NoWeight):
        log_weights_T = np.zeros(len(log_ratio_T))
    elif isinstance(weight, IcepopWeight):
        log_weights_T = log_ratio_T
        keeps["weight"] = _inside(log_ratio_T, weight)
    else:
        judged_T = log_ratio_T if weight.level == "token" else log_product_B[sequence_T]
        log_weights_T = np.minimum(judged_T, np.log(weight.cap))
        if isinstance(weight, MaskedWeight):
            keeps["weight"] = judged_T <= np.log(weight.cap)
        else:
            capped_T = judged_T > np.log(weight.cap)

    keep_T = np.logical_and.reduce([np.ones(len(log_ratio_T), dtype=bool), *keeps.values()])
    weights_T = np.exp(log_weights_T, where=keep_T, out=np.zeros(len(log_ratio_T)))
    return Correction(keep_T, weights_T, {rule: ~kept for rule, kept in keeps.items()}, capped_T)


def _check_given(logprobs_T: Floats, engine: str) -> None:
    wrong = logprobs_T[~np.isfinite(logprobs_T)]
    if len(wrong):
        raise ValueError(
            f"algorithm.correction needs the log-probability of every token, and {len(wrong)} of {len(logprobs_T)} "
            f"from the {engine} are not finite (the first: {wrong[0]}); have it return "
            "them, or switch the correction off"
        )


def _inside(logs: Floats, bounds: Range) -> Flags:
    inside: Flags = (np.log(bounds.low) <= logs) & (logs <= np.log(bounds.high))
    return inside
