"""How the policy learns: the section ``algorithm``."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Annotated, Literal

from pydantic import Field, model_validator

from beamline.config.advantages import (
    Advantage,
    GdpoAdvantage,
    GrpoAdvantage,
    PassAtKAdvantage,
    ReinforcePlusPlusAdvantage,
)
from beamline.config.correction import CorrectionConfig
from beamline.config.kl import Kl, NoKl
from beamline.config.losses import ClipLoss, GspoLoss, KlCovLoss, Loss
from beamline.config.section import Positive, Section, Share

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_sum", "prompt_mean"]


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
    """Tokens after which unfinished responses wait, fewer than `rollout.max_response_tokens`. Groups that are finished
    by then come first; only where they are too few do others go on, the fewest unfinished responses first."""

    def problems(self, wanted: int) -> int:
        """Problems to sample, of which ``wanted`` are learned from: the factor as it is written, rounded up.

        1.1 is eleven tenths; the double of that name is more, and ten times it would be twelve.
        """
        return ceil(Fraction(repr(self.factor)) * wanted)


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
        if contradictions := list(self._contradictions()):
            raise ValueError("; ".join(contradictions))
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
                "algorithm.loss.name=kl_cov penalizes changes since the step began, and with one update a step there "
                "is none: use an algorithm.prompts_per_update smaller than "
                f"algorithm.prompts_per_step={self.prompts_per_step}"
            )
        if isinstance(loss, GspoLoss) and (
            weight.name == "icepop" or (weight.name == "mis" and weight.level == "token")
        ):
            yield (
                f"algorithm.correction.weight.name={weight.name} leaves out single tokens, and "
                "algorithm.loss.name=gspo has one ratio a response: use weight.level=sequence, a sequence_mask, or "
                "another loss"
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
