"""The two surrogates that losses are made of: the ratio times the advantage, with the clip and without.

T tokens that policy chose; rho = exp(log pi - log anchor), A the advantage. What multiplies an advantage is finite, so
that no advantage gives no loss and no gradient.
"""

import torch
from torch import Tensor

from beamline.algorithms.losses.terms import TokenLosses, Tokens
from beamline.algorithms.ratios import LOG_RATIO_LIMIT, limited_exp


def log_ratios(tokens: Tokens) -> Tensor:
    """log rho ``[T]``, which carries the gradient of log pi."""
    return tokens.logprobs_T - tokens.anchor_logprobs_T


def weighted(tokens: Tokens) -> TokenLosses:
    """``-(rho A)``, whose gradient ``-rho A`` by log pi is that of the policy gradient with importance weights."""
    log_ratio_T, advantages_T = log_ratios(tokens), tokens.advantages_T
    beyond_T = (log_ratio_T > LOG_RATIO_LIMIT) & (advantages_T != 0)
    return TokenLosses(-(limited_exp(log_ratio_T) * advantages_T), beyond_T.to(torch.int8))


def clipped(log_ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> TokenLosses:
    """``-min(rho A, clip(rho, 1 - low, 1 + high) A)``: no gradient where rho has gone too far the way that A points.

    Sources: PPO, arXiv 1707.06347, equation 7; the two bounds, DAPO, arXiv 2503.14476, equation 10.
    """
    ratio_T = limited_exp(log_ratio_T)
    bounded_T = ratio_T.clamp(1 - low, 1 + high)
    # For A < 0 the minimum has no upper bound: there the limit is the only one.
    beyond_T = log_ratio_T > LOG_RATIO_LIMIT
    return TokenLosses(
        loss_T=-torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T),
        clipped_T=marks(
            too_low_T=(advantages_T < 0) & (ratio_T < 1 - low),
            too_high_T=((advantages_T > 0) & (ratio_T > 1 + high)) | ((advantages_T < 0) & beyond_T),
        ),
    )


def marks(too_low_T: Tensor, too_high_T: Tensor) -> Tensor:
    """``clipped_T`` of ``TokenLosses`` from two masks that exclude each other."""
    return too_high_T.to(torch.int8) - too_low_T.to(torch.int8)
