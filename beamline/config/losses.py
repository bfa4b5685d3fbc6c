"""What an update minimizes; each variant has a file of its name in ``beamline/algorithms/losses``."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from beamline.config.section import Bound, Section, Share

ClipLow = Annotated[float, Field(gt=0, lt=1)]
Steepness = Annotated[float, Field(ge=1e-3, le=1e3)]
Anchor = Literal["learner", "sampler"]


class PolicyLoss(Section):
    """Base of all policy losses."""

    anchor: Anchor = "learner"
    """What the ratio compares the policy with: the log-probabilities that the `learner` computes before the step's
    first update, or those that the `sampler` wrote down (a pass less, unless the loss selects tokens by it; corrections
    have no use then)."""


class ClipLoss(PolicyLoss):
    """The clipped ratio of PPO, with the two bounds of DAPO (clip-higher)."""

    name: Literal["clip"] = "clip"
    clip_low: ClipLow = 0.2
    """The ratio of probabilities is clipped below at `1 - clip_low`."""
    clip_high: Bound = 0.28
    """The ratio of probabilities is clipped above at `1 + clip_high`."""
    dual_clip: Annotated[float, Field(gt=1, le=1e6)] | None = None
    """For negative advantages the ratio is capped at this too (dual-clip PPO, 3 as a rule); null = not."""


class GspoLoss(PolicyLoss):
    """One clipped ratio a sequence, the geometric mean over its tokens (GSPO)."""

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    """The sequence's ratio is clipped below at `1 - clip_low`."""
    clip_high: Bound = 4e-4
    """The sequence's ratio is clipped above at `1 + clip_high`."""


class CispoLoss(PolicyLoss):
    """REINFORCE weighted by a clipped ratio that carries no gradient, so that every token learns (CISPO)."""

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight is at least `1 - clip_low`; 1 = no bound."""
    clip_high: Bound = 4.0
    """The weight is at most `1 + clip_high`."""


class SapoLoss(PolicyLoss):
    """A smooth gate on the ratio in place of the clip (SAPO)."""

    name: Literal["sapo"] = "sapo"
    tau_positive: Steepness = 1.0
    """Steepness of the gate for positive advantages."""
    tau_negative: Steepness = 1.05
    """Steepness of the gate for negative advantages: steeper, so that they fade sooner."""


class DppoLoss(PolicyLoss):
    """The ratio; no gradient for tokens whose probability has moved too far and would move further (DPPO)."""

    name: Literal["dppo"] = "dppo"
    anchor: Anchor = "sampler"
    """What the policy is compared with: the `sampler`'s log-probabilities, or those of the `learner`."""
    divergence: Literal["tv", "kl"] = "tv"
    """How far a token's probability has moved: `tv` = total variation, `kl` = Kullback-Leibler divergence, both between
    the two cases that the token is drawn or not."""
    threshold: Bound | None = None
    """How far it may move; null = as far as its authors let it, 0.15 with `tv` and 0.05 with `kl`."""

    @property
    def limit(self) -> float:
        """How far a token's probability may move."""
        return self.threshold or {"tv": 0.15, "kl": 0.05}[self.divergence]


class ClipCovLoss(PolicyLoss):
    """The clipped ratio; no gradient for a few tokens whose log-probability and advantage covary (Clip-Cov)."""

    name: Literal["clip_cov"] = "clip_cov"
    clip_low: ClipLow = 0.2
    """The ratio of probabilities is clipped below at `1 - clip_low`."""
    clip_high: Bound = 0.2
    """The ratio of probabilities is clipped above at `1 + clip_high`."""
    share: Share = 2e-4
    """Share of the mini-batch's tokens that lose their gradient, rounded down, at least one token."""
    covariance_low: float = 1.0
    """They are drawn among tokens with at least this covariance,"""
    covariance_high: float = 5.0
    """and at most this one."""

    @model_validator(mode="after")
    def _is_ordered(self) -> "ClipCovLoss":
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low={self.covariance_low} must be smaller than covariance_high={self.covariance_high}"
            )
        return self


class KlCovLoss(PolicyLoss):
    """The ratio, and a penalty on changes of the tokens whose log-probability and advantage covary most (KL-Cov)."""

    name: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-3
    """Share of the mini-batch's tokens that are penalized, rounded down, at least one token. The authors use 2e-3 for a
    model of 7 billion parameters and 2e-4 for one of 32."""
    coefficient: Bound = 1.0
    """Weight of the penalty."""


class ReinforceLoss(PolicyLoss):
    """The policy gradient weighted by the ratio, without any bound."""

    name: Literal["reinforce"] = "reinforce"
    anchor: Anchor = "sampler"
    """What the ratio compares the policy with: the `sampler`'s log-probabilities, or those of the `learner`."""


Loss = Annotated[
    ClipLoss | GspoLoss | CispoLoss | SapoLoss | DppoLoss | ClipCovLoss | KlCovLoss | ReinforceLoss,
    Field(discriminator="name"),
]
