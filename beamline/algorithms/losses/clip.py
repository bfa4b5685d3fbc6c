"""The clipped ratio of PPO with the two bounds of DAPO, and the third of dual-clip PPO."""

from math import log

from beamline.algorithms.losses.surrogate import clipped, log_ratios
from beamline.algorithms.losses.terms import TokenLosses, Tokens
from beamline.config.losses import ClipLoss


def token_losses(tokens: Tokens, config: ClipLoss) -> TokenLosses:
    """``-min(rho A, clip(rho, 1 - low, 1 + high) A)``; with ``dual_clip`` c and A < 0, ``-max(that minimum, c A)``.

    The dual clip takes the gradient from bad tokens that became much likelier: without it they weigh rho.

    Sources: PPO, arXiv 1707.06347, equation 7; the two bounds, DAPO, arXiv 2503.14476, equation 10; the dual clip,
    arXiv 1912.09729, equation 5.
    """
    log_ratio_T, advantages_T = log_ratios(tokens), tokens.advantages_T
    losses = clipped(log_ratio_T, advantages_T, config.clip_low, config.clip_high)
    if config.dual_clip is None:
        return losses
    # With c > 1 and A < 0 the maximum is c A exactly where rho > c.
    capped_T = (advantages_T < 0) & (log_ratio_T > log(config.dual_clip))
    return TokenLosses(
        loss_T=(-config.dual_clip * advantages_T).where(capped_T, losses.loss_T),
        clipped_T=losses.clipped_T.masked_fill(capped_T, 1),
    )
