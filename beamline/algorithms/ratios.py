"""How far a ratio of probabilities is followed."""

from torch import Tensor

# A token with rho > e^20 had a probability below 2e-9 where it was drawn, so it was not drawn there: the two sides
# disagree, and its gradient, 5e8 times as heavy as that of others, would be noise. It gets none. Without the limit,
# float32 is infinite from e^89 on. All bounds in the configuration are smaller (1e6 at most). Small ratios need no
# limit, they end at 0.
LOG_RATIO_LIMIT = 20.0


def limited_exp(log_ratio_T: Tensor) -> Tensor:
    """rho ``[T]``, but e^20 without a gradient where it is more."""
    return log_ratio_T.clamp(max=LOG_RATIO_LIMIT).exp()
