"""REINFORCE weighted by a clipped ratio (CISPO)."""

from beamline.algorithms.losses.surrogate import log_ratios, marks
from beamline.algorithms.losses.terms import TokenLosses, Tokens
from beamline.config.losses import CispoLoss


def token_losses(tokens: Tokens, config: CispoLoss) -> TokenLosses:
    """``-(w A log pi)`` with ``w = clip(rho, 1 - low, 1 + high)`` as a constant: the gradient is ``-w A``.

    Every token keeps a gradient; marked are those whose weight is a bound in place of rho. The bounds make w finite,
    whatever rho is.

    Source: CISPO (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    advantages_T = tokens.advantages_T
    ratio_T = log_ratios(tokens).detach().exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    learns_T = advantages_T != 0
    return TokenLosses(
        loss_T=-(ratio_T.clamp(low, high) * advantages_T * tokens.logprobs_T),
        clipped_T=marks(too_low_T=(ratio_T < low) & learns_T, too_high_T=(ratio_T > high) & learns_T),
    )
