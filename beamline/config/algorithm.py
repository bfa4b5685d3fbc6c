"""The settings of the algorithm. Each variant has a file of its name in ``beamline/algorithms`` that computes it."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from beamline.config.section import Positive, Section

Share = Annotated[float, Field(gt=0, le=1)]
Coefficient = Annotated[float, Field(gt=0, le=1e6)]
Bound = Annotated[float, Field(gt=0, le=1e6)]


# How much better a response was than others.


class GrpoAdvantage(Section):
    """The reward against the mean of its group, over the standard deviation (GRPO)."""

    name: Literal["grpo"] = "grpo"
    norm_by_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""


class RlooAdvantage(Section):
    """The reward against the mean of the others of its group (RLOO)."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantage(Section):
    """The reward, normalized over the whole step (REINFORCE++)."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group_baseline: bool = False
    """First subtract the mean of the group (REINFORCE++-baseline)."""


class MaxrlAdvantage(Section):
    """The reward against the mean of its group, over that mean (MaxRL): needs rewards of 0 and more."""

    name: Literal["maxrl"] = "maxrl"


class GdpoAdvantage(Section):
    """Each part of the reward normalized in its group, then their sum over the whole step (GDPO)."""

    name: Literal["gdpo"] = "gdpo"


class PassAtKAdvantage(Section):
    """What a response adds to the chance that one of k is right (pass@k training)."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: Annotated[int, Field(ge=1, le=100_000)] = 4
    """Responses of which one has to be right; fewer than `algorithm.samples_per_prompt`."""


Advantage = Annotated[
    GrpoAdvantage | RlooAdvantage | ReinforcePlusPlusAdvantage | MaxrlAdvantage | GdpoAdvantage | PassAtKAdvantage,
    Field(discriminator="name"),
]


# What an update minimizes.

ClipLow = Annotated[float, Field(gt=0, lt=1)]
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
    tau_positive: Bound = 1.0
    """Steepness of the gate for positive advantages."""
    tau_negative: Bound = 1.05
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
    coefficient: Coefficient = 1.0
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

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_sum", "prompt_mean"]


# What is done about a learner that does not compute what the sampler did. rho = pi_old / mu.


class Range(Section):
    """Base of the rules that keep what lies from one bound to another, both included."""

    low: Bound
    high: Bound

    @model_validator(mode="after")
    def _is_ordered(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be smaller than high={self.high}")
        return self


class NoWeight(Section):
    """Tokens weigh 1."""

    name: Literal["none"] = "none"


class TruncatedWeight(Section):
    """Truncated importance sampling: tokens weigh rho, at most `cap`."""

    name: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Whose ratio it is: each token's, or the product over its sequence."""
    cap: Bound = 2.0
    """Largest weight."""


class MaskedWeight(Section):
    """Masked importance sampling: tokens weigh rho, or nothing where it is over `cap`."""

    name: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = "token"
    """Whose ratio it is: each token's, or the product over its sequence."""
    cap: Bound = 2.0
    """Largest ratio that is kept."""


class IcepopWeight(Range):
    """IcePop: tokens weigh rho, or nothing where it is outside of `low` to `high`."""

    name: Literal["icepop"] = "icepop"
    low: Bound = 0.5
    """Smallest ratio that is kept."""
    high: Bound = 5.0
    """Largest ratio that is kept."""


class NoMask(Section):
    """Nothing is left out."""

    name: Literal["none"] = "none"


class GeometricMask(Range):
    """A sequence is left out where the geometric mean of rho over its tokens is outside of `low` to `high`."""

    name: Literal["geometric"] = "geometric"
    low: Bound = 0.99
    """Smallest mean that is kept."""
    high: Bound = 1.01
    """Largest mean that is kept."""


class ProductMask(Range):
    """A sequence is left out where the product of rho over its tokens is outside of `low` to `high`."""

    name: Literal["product"] = "product"
    low: Bound = 0.5
    """Smallest product that is kept."""
    high: Bound = 2.0
    """Largest product that is kept."""


class OutlierVeto(Range):
    """A sequence is left out where rho of any of its tokens is outside of `low` to `high`."""

    name: Literal["outlier"] = "outlier"
    low: Bound = 1e-4
    """Smallest ratio that is tolerated."""
    high: Bound = 100.0
    """Largest ratio that is tolerated."""


class CorrectionConfig(Section):
    """What is done about differences between sampler and learner, decided before the update; rho = pi_old / mu.

    Every rule judges the whole response, so none depends on another; what any of them leaves out is left out.
    """

    weight: Annotated[NoWeight | TruncatedWeight | MaskedWeight | IcepopWeight, Field(discriminator="name")] = (
        NoWeight()
    )
    """How much a token counts."""
    sequence_mask: Annotated[NoMask | GeometricMask | ProductMask, Field(discriminator="name")] = NoMask()
    """Which sequences are left out as a whole."""
    veto: Annotated[NoMask | OutlierVeto, Field(discriminator="name")] = NoMask()
    """Which sequences are left out for a single token."""

    @property
    def active(self) -> bool:
        """Whether any rule is on."""
        return self.masks or self.weight.name != "none"

    @property
    def masks(self) -> bool:
        """Whether a rule is on that may leave tokens out."""
        return self.weight.name in ("mis", "icepop") or {self.sequence_mask.name, self.veto.name} != {"none"}


# How the policy is held near the model that it began as.

Estimator = Literal["k1", "k2", "k3"]


class NoKl(Section):
    """No penalty, and no reference model in memory."""

    place: Literal["none"] = "none"


class KlReward(Section):
    """A part of the reward: minus the sum of the estimates over the response."""

    place: Literal["reward"] = "reward"
    coefficient: Coefficient = 0.001
    """Weight of the penalty."""
    estimator: Estimator = "k1"
    """With d = log mu - log pi_ref: `k1` = d, `k2` = d^2 / 2, `k3` = exp(-d) - 1 + d."""


class KlLoss(Section):
    """A part of the loss, aggregated over tokens as the policy loss is."""

    place: Literal["loss"] = "loss"
    coefficient: Coefficient = 0.001
    """Weight of the penalty."""
    estimator: Estimator = "k3"
    """With d = log pi - log pi_ref: `k1` = d, `k2` = d^2 / 2, `k3` = exp(-d) - 1 + d."""
    unbiased_gradient: bool = True
    """Follow the gradient of the divergence itself, `rho d`, whatever the estimator; false differentiates the
    estimate, which where pi is still pi_old has no gradient in expectation for `k1`, and that of the opposite
    divergence for `k3`."""


Kl = Annotated[NoKl | KlReward | KlLoss, Field(discriminator="place")]


# Which of the samples a step learns from.


class PlainSampling(Section):
    """All groups that were sampled are learned from."""

    name: Literal["plain"] = "plain"


class DynamicSampling(Section):
    """Groups without signal are left out, and further problems are sampled until the step is full (DAPO)."""

    name: Literal["dynamic"] = "dynamic"
    rounds: Annotated[int, Field(ge=1, le=1000)] = 4
    """Times that a step samples at most; then it learns from what there is, and counts as not full."""


class ReplaceSampling(Section):
    """Groups without signal are replaced by groups of the step that have one, drawn at random."""

    name: Literal["replace"] = "replace"
    min_share: Share = 0.3
    """Share of the groups that must have a signal; with fewer none is replaced, and the step counts as not full."""


class OverSampling(Section):
    """More problems are sampled than are learned from; groups with long responses are left out."""

    name: Literal["oversample"] = "oversample"
    factor: Annotated[float, Field(gt=1, le=100)] = 1.5
    """Problems sampled, as a multiple of `algorithm.prompts_per_step`."""
    cutoff_tokens: Positive
    """Fewer than `rollout.max_response_tokens`: tokens after which unfinished responses wait. Groups that are finished by then come first; only where they are
    too few do others go on, the fewest unfinished responses first."""


Sampling = Annotated[PlainSampling | DynamicSampling | ReplaceSampling | OverSampling, Field(discriminator="name")]


class GuardConfig(Section):
    """What the first update of a process must look like; otherwise the run ends with the likely causes."""

    ratio: bool = True
    """pi / pi_old is 1 to 1e-6 before the first update: one more pass over one mini-batch."""
    mismatch: Annotated[float, Field(gt=0)] | None = 0.1
    """Largest mean difference, in nats, between the log-probabilities of sampler and learner; null = any."""


class AlgorithmConfig(Section):
    """How the policy learns. The defaults are GRPO with DAPO's clip-higher and token-level loss."""

    prompts_per_step: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Problems sampled in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=100_000)] = 8
    """Responses to each problem; they form the group that rewards are compared in."""
    prompts_per_update: Positive = 32
    """Problems of one optimizer update (a mini-batch); must divide `prompts_per_step`."""
    sampling: Sampling = PlainSampling()
    """Which of the samples a step learns from."""
    advantage: Advantage = GrpoAdvantage()
    """How much better a response was than others."""
    loss: Loss = ClipLoss()
    """What an update minimizes."""
    aggregation: Aggregation = "token_mean"
    """What the losses of tokens are averaged over. `token_mean`: all tokens of the mini-batch alike (DAPO).
    `sequence_mean_token_mean`: first the tokens of a response, then responses (GRPO). `sequence_sum`: the sum over a
    response divided by `rollout.max_response_tokens`, then responses (Dr. GRPO). `prompt_mean`: first all tokens of a
    problem's responses, then problems."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: Kl = NoKl()
    """How the policy is held near the model that it began as."""
    mask_truncated: bool = False
    """Learn nothing from responses that were cut at the limit."""
    renormalize_after_mask: bool = False
    """Take what is masked (truncated responses, and what a correction leaves out) out of the denominators too."""
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> "AlgorithmConfig":
        for contradiction in self._contradictions():
            raise ValueError(contradiction)
        return self

    def _contradictions(self) -> Iterator[str]:
        """What cannot be, or would do nothing."""
        loss, advantage, weight = self.loss, self.advantage, self.correction.weight
        if self.prompts_per_step % self.prompts_per_update:
            yield (
                f"algorithm.prompts_per_update={self.prompts_per_update} does not divide "
                f"algorithm.prompts_per_step={self.prompts_per_step}"
            )
        if loss.anchor == "sampler" and self.correction.active:
            yield (
                f"algorithm.correction has no use with algorithm.loss.anchor=sampler (loss {loss.name}): the ratio "
                "compares with the sampler already; use algorithm.loss.anchor=learner, or no correction"
            )
        if (
            isinstance(loss, KlCovLoss)
            and loss.anchor == "learner"
            and self.prompts_per_step == self.prompts_per_update
        ):
            yield (
                "algorithm.loss.name=kl_cov penalizes changes since the step began, and with one update a step there is "
                f"none: use an algorithm.prompts_per_update smaller than algorithm.prompts_per_step={self.prompts_per_step}"
            )
        if isinstance(loss, GspoLoss) and (
            weight.name == "icepop" or (weight.name == "mis" and weight.level == "token")
        ):
            yield (
                f"algorithm.correction.weight.name={weight.name} leaves out single tokens, and algorithm.loss.name=gspo has "
                "one ratio a response: use weight.level=sequence, a sequence_mask, or another loss"
            )
        if self.renormalize_after_mask and not (self.mask_truncated or self.correction.masks):
            yield (
                "algorithm.renormalize_after_mask=true has no use where nothing is masked: use "
                "algorithm.mask_truncated=true or a correction that leaves tokens out, or switch it off"
            )
        if isinstance(advantage, PassAtKAdvantage) and advantage.k >= self.samples_per_prompt:
            yield (
                f"algorithm.advantage.k={advantage.k} must be smaller than "
                f"algorithm.samples_per_prompt={self.samples_per_prompt}: of all samples there is one set, which says "
                "nothing of any of them"
            )
        if isinstance(advantage, GdpoAdvantage) and self.kl.place == "reward":
            yield (
                "algorithm.kl.place=reward has no coefficient under algorithm.advantage.name=gdpo, which scales every "
                "part of the reward alike: use algorithm.kl.place=loss, or another advantage"
            )
        silent = isinstance(advantage, ReinforcePlusPlusAdvantage) and not advantage.group_baseline
        if silent and isinstance(self.sampling, DynamicSampling | ReplaceSampling):
            yield (
                f"algorithm.sampling.name={self.sampling.name} leaves out groups of equal rewards, from which "
                "algorithm.advantage.name=reinforce_plus_plus learns: use group_baseline=true, or plain sampling"
            )
