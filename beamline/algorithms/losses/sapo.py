"""A smooth gate on the ratio in place of the clip (SAPO)."""

import torch

from beamline.algorithms.losses.surrogate import log_ratios
from beamline.algorithms.losses.terms import TokenLosses, Tokens
from beamline.algorithms.ratios import limited_exp
from beamline.config.losses import SapoLoss


def token_losses(tokens: Tokens, config: SapoLoss) -> TokenLosses:
    """``-(4 / tau) sigmoid(tau (rho - 1)) A`` with ``tau_positive`` for A > 0 and ``tau_negative`` otherwise.

    The gradient is ``-4 p (1 - p) rho A`` with p the sigmoid: ``-A`` at rho = 1, fading on both sides. There is no
    bound, so no token is marked: where the ratio is limited, the gate has closed long before.

    Source: SAPO, arXiv 2511.20347, equations 5 and 6.
    """
    advantages_T = tokens.advantages_T
    tau_T = torch.full_like(advantages_T, config.tau_negative).masked_fill(advantages_T > 0, config.tau_positive)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (limited_exp(log_ratios(tokens)) - 1))
    return TokenLosses(loss_T=-(gate_T * advantages_T), clipped_T=torch.zeros_like(advantages_T, dtype=torch.int8))
