"""Estimates of how far the policy is from the model that it began as."""

import torch
from torch import Tensor

from beamline.algorithms.ratios import LOG_RATIO_LIMIT, limited_exp
from beamline.config.kl import Estimator, KlLoss


def estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(p || q) from tokens drawn from p, one value a token, with ``log_ratio = d = log p - log q``.

    ``k1 = d`` is unbiased and varies much; ``k2 = d^2 / 2`` is biased and varies little; ``k3 = exp(-d) - 1 + d`` is
    unbiased and never negative but for rounding. In k3 d is -20 at least: what is less likely under p than that has
    the same value, and no gradient.

    Source: Schulman, Approximating KL divergence, 2020.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # Held in both terms: with the exponential alone held, the rest would have the gradient of the wrong sign.
    held = log_ratio.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-held) + held


def kl_losses(logprobs_T: Tensor, anchor_logprobs_T: Tensor, reference_T: Tensor, config: KlLoss) -> Tensor:
    """The penalty of each token ``[T]``, before its coefficient: the estimate of KL(pi || pi_ref).

    With ``unbiased_gradient`` the value is the same and the gradient is ``rho d`` times that of log pi, ``rho = pi /
    anchor`` (e^20 at most) and ``d = log pi - log pi_ref`` held fixed: for tokens drawn from the anchor its expectation
    is the gradient of the divergence. It is the gradient of ``rho k3`` too (DeepSeek-V3.2, arXiv 2512.02556, equation
    7), and that of k2 where rho is 1.
    """
    log_ratio = logprobs_T - reference_T
    value = estimate(log_ratio, config.estimator)
    if config.unbiased_gradient:
        rho = limited_exp(logprobs_T - anchor_logprobs_T)
        straight = (rho * log_ratio).detach() * (logprobs_T - logprobs_T.detach())  # 0, with the gradient wanted
        value = value.detach() + straight
    return value
