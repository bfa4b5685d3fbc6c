"""How the policy is held near the model that it began as."""

from typing import Annotated, Literal

from pydantic import Field

from beamline.config.section import Bound, Section

Estimator = Literal["k1", "k2", "k3"]


class NoKl(Section):
    """No penalty, and no reference model in memory."""

    place: Literal["none"] = "none"


class KlReward(Section):
    """A part of the reward: minus the sum of the estimates over the response."""

    place: Literal["reward"] = "reward"
    coefficient: Bound = 0.001
    """Weight of the penalty."""
    estimator: Estimator = "k1"
    """With d = log mu - log pi_ref: `k1` = d, `k2` = d^2 / 2, `k3` = exp(-d) - 1 + d."""


class KlLoss(Section):
    """A part of the loss, aggregated over tokens as the policy loss is."""

    place: Literal["loss"] = "loss"
    coefficient: Bound = 0.001
    """Weight of the penalty."""
    estimator: Estimator = "k3"
    """With d = log pi - log pi_ref: `k1` = d, `k2` = d^2 / 2, `k3` = exp(-d) - 1 + d."""
    unbiased_gradient: bool = True
    """Follow the gradient of the divergence itself, `rho d`, whatever the estimator; false differentiates the
    estimate, which where pi is still pi_old has no gradient in expectation for `k1`, and that of the opposite
    divergence for `k3`."""


Kl = Annotated[NoKl | KlReward | KlLoss, Field(discriminator="place")]
