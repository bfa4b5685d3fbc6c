"""The policy gradient weighted by the ratio, without any bound."""

from beamline.algorithms.losses.surrogate import weighted
from beamline.algorithms.losses.terms import TokenLosses, Tokens
from beamline.config.losses import ReinforceLoss


def token_losses(tokens: Tokens, config: ReinforceLoss) -> TokenLosses:
    """``-(rho A)``. The gradient by log pi is ``-rho A``, the same as that of ``-(rho A log pi)`` with rho constant.

    At rho = 1 it is REINFORCE. With the sampler as anchor it corrects each token for who drew it, not for what came
    before: the off-policy policy gradient to first order.

    Source: REINFORCE, Williams 1992; tinker calls this loss ``importance_sampling``.
    """
    return weighted(tokens)
