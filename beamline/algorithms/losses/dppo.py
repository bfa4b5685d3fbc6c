"""The ratio without a clip, and no gradient where a token's probability has moved too far (DPPO)."""

import torch
from torch import Tensor

from beamline.algorithms.losses.surrogate import weighted
from beamline.algorithms.losses.terms import TokenLosses, Tokens
from beamline.config.losses import DppoLoss


def token_losses(tokens: Tokens, config: DppoLoss) -> TokenLosses:
    """``-(M rho A)`` where M, a constant, is 0 for tokens that are past the threshold and would go on, 1 for others.

    M is 0 where the divergence D is over the threshold and rho is on the side that A points to: above 1 for A > 0,
    below 1 for A < 0. D is that between the two cases that the token is drawn or not, mu being the anchor:
    ``|mu - pi|`` (tv), or ``KL(mu || pi) = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))`` (kl).

    Source: DPPO, arXiv 2602.04879, equations 13 (tv) and 14 (kl).
    """
    divergence = _total_variation if config.divergence == "tv" else _kl
    logprobs_T, anchor_T, advantages_T = tokens.logprobs_T.detach(), tokens.anchor_logprobs_T, tokens.advantages_T
    far_T = divergence(anchor_T, logprobs_T) > config.limit
    too_low_T = far_T & (advantages_T < 0) & (logprobs_T < anchor_T)
    too_high_T = far_T & (advantages_T > 0) & (logprobs_T > anchor_T)
    losses = weighted(tokens)
    return TokenLosses(
        loss_T=losses.loss_T.masked_fill(too_low_T | too_high_T, 0.0),
        clipped_T=losses.clipped_T.masked_fill(too_high_T, 1).masked_fill(too_low_T, -1),
    )


def _total_variation(log_mu_T: Tensor, log_pi_T: Tensor) -> Tensor:
    return (log_mu_T.exp() - log_pi_T.exp()).abs()


def _kl(log_mu_T: Tensor, log_pi_T: Tensor) -> Tensor:
    """Infinite where pi is certain of the token and mu was not; `xlogy` has 0 log 0 = 0."""
    other_mu_T, other_pi_T = _complement(log_mu_T), _complement(log_pi_T)
    drawn_T = log_mu_T.exp() * (log_mu_T - log_pi_T)
    return drawn_T + torch.xlogy(other_mu_T, other_mu_T) - torch.xlogy(other_mu_T, other_pi_T)


def _complement(logprobs_T: Tensor) -> Tensor:
    """1 - p; not below 0 where rounding lifted log p above it."""
    return -torch.expm1(logprobs_T).clamp(max=0.0)
