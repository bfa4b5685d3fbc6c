"""The ratio without a clip, and a penalty on the change of tokens of the highest covariance (KL-Cov)."""

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.losses.covariances import covariances, quota
from beamline.algorithms.losses.surrogate import log_ratios, weighted
from beamline.algorithms.losses.terms import BatchTokens, TokenLosses, Tokens
from beamline.config.losses import KlCovLoss


def select(tokens: BatchTokens, config: KlCovLoss) -> NDArray[np.bool_]:
    """The ``share`` of the T tokens (at least one) that covary most; among equals those with the smallest uniforms.

    Equals are common: all tokens that were certain and belong to the best responses.

    Source: arXiv 2505.22617, equations 10 and 13.
    """
    covariance_T = covariances(tokens)
    selected_T = np.zeros(len(covariance_T), dtype=np.bool_)
    count = quota(config.share, len(covariance_T))
    if count == 0:
        return selected_T
    least = np.partition(covariance_T, -count)[-count]
    candidates = np.flatnonzero(covariance_T >= least)  # count, and equals of the last
    order = np.lexsort((tokens.uniforms_T[candidates], -covariance_T[candidates]))
    selected_T[candidates[order[:count]]] = True
    return selected_T


def token_losses(tokens: Tokens, config: KlCovLoss) -> TokenLosses:
    """``-(rho A)``, and for selected tokens ``coefficient |log rho|`` on top.

    The penalty pulls with constant force towards the anchor and is silent at it, so that it begins to act with the
    second update of a step. The paper writes KL(pi_old || pi); this estimate of it is that of the authors' code.

    Source: arXiv 2505.22617, equation 14, and its listing 1.
    """
    assert tokens.selected_T is not None
    losses = weighted(tokens)
    penalty_T = config.coefficient * log_ratios(tokens).abs()
    return TokenLosses(losses.loss_T + penalty_T.masked_fill(~tokens.selected_T, 0.0), losses.clipped_T)
