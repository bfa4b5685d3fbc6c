"""One clipped ratio a sequence (GSPO)."""

from torch import Tensor

from beamline.algorithms.losses.surrogate import clipped, log_ratios
from beamline.algorithms.losses.terms import TokenLosses, Tokens
from beamline.config.losses import GspoLoss


def token_losses(tokens: Tokens, config: GspoLoss) -> TokenLosses:
    """``-min(s A, clip(s, 1 - low, 1 + high) A)`` with s of the token's sequence, the geometric mean of rho.

    ``s = exp(mean_t log rho_t)`` over the sequence's tokens in T. The gradient of a token's loss, ``-s A``, goes to
    all n tokens of its sequence alike, a share 1 / n to each; where advantages and weights are those of the whole
    sequence, each receives ``-s A`` in all. A sequence is clipped as a whole.

    Source: GSPO, arXiv 2507.18071, equations 5 and 7.
    """
    log_ratio_T = _sequence_means(log_ratios(tokens), tokens.sequence_T)
    return clipped(log_ratio_T, tokens.advantages_T, config.clip_low, config.clip_high)


def _sequence_means(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The mean over a token's sequence, at each of its tokens, summed in the order in which they stand."""
    lengths_B = sequence_T.bincount()
    sums_B = values_T.new_zeros(len(lengths_B)).index_add(0, sequence_T, values_T)
    # Divided at the tokens: a number without a token in T has length 0.
    return sums_B[sequence_T] / lengths_B[sequence_T]
