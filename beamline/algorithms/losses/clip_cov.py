"""The clipped ratio, and no gradient for a few tokens of high covariance (Clip-Cov)."""

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.losses.covariances import covariances, quota
from beamline.algorithms.losses.surrogate import clipped, log_ratios
from beamline.algorithms.losses.terms import BatchTokens, TokenLosses, Tokens
from beamline.config.losses import ClipCovLoss


def select(tokens: BatchTokens, config: ClipCovLoss) -> NDArray[np.bool_]:
    """Tokens ``[T]`` drawn among those with a covariance in ``[covariance_low, covariance_high]``.

    ``share`` of all T are drawn (at least one), those with the smallest uniforms; all that qualify if they are fewer.

    Source: arXiv 2505.22617, equations 10 and 11.
    """
    covariance_T = covariances(tokens)
    candidates = np.flatnonzero((covariance_T >= config.covariance_low) & (covariance_T <= config.covariance_high))
    drawn = candidates[np.argsort(tokens.uniforms_T[candidates], kind="stable")][
        : quota(config.share, len(covariance_T))
    ]
    selected_T = np.zeros(len(covariance_T), dtype=np.bool_)
    selected_T[drawn] = True
    return selected_T


def token_losses(tokens: Tokens, config: ClipCovLoss) -> TokenLosses:
    """0 for selected tokens, ``-min(rho A, clip(rho, 1 - low, 1 + high) A)`` for others.

    Selected tokens are not marked as clipped: their ratio was not the reason.

    Source: arXiv 2505.22617, equation 12, with the clip that the authors' code adds.
    """
    assert tokens.selected_T is not None
    losses = clipped(log_ratios(tokens), tokens.advantages_T, config.clip_low, config.clip_high)
    return TokenLosses(
        loss_T=losses.loss_T.masked_fill(tokens.selected_T, 0.0),
        clipped_T=losses.clipped_T.masked_fill(tokens.selected_T, 0),
    )
