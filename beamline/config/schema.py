"""Every setting of a run, with its meaning, bounds and default. Imports no torch: checks and help cost nothing."""

import re
from collections.abc import Iterator
from math import cos, pi
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from beamline.config.advantages import MaxrlAdvantage, PassAtKAdvantage
from beamline.config.algorithm import AlgorithmConfig, OverSampling
from beamline.config.policy import LoraConfig, PolicyConfig
from beamline.config.rollout import RolloutConfig
from beamline.config.section import NonNegative, Positive, Section
from beamline.config.vllm_rules import about_vllm

Threads = Annotated[int, Field(ge=1, le=1024)]
Reward = Annotated[float, Field(ge=-1e6, le=1e6)]


class ModelConfig(Section):
    """The model that is trained."""

    path: str = "starter"
    """A Hugging Face model folder, or one of the small Beams that come with the package: `starter` adds numbers,
    `starter-math` solves problems worded in English."""


TemplateArgument = str | bool | int | float
ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]

# What the tokenizer's `apply_chat_template` takes for itself, or sets in every template.
_RESERVED = re.compile(
    "self|conversations?|messages|tools|documents|chat_template|add_generation_prompt|continue_final_message|tokenize|"
    "sanitize_control_tokens|padding|truncation|max_length|return_.*|tokenizer_kwargs|.*_token|.*_special_tokens"
)


def is_reserved_argument(name: str) -> bool:
    """Whether a name is no free argument of a chat template: the conversation, how it is rendered, a special token."""
    return _RESERVED.fullmatch(name) is not None


class ChatConfig(Section):
    """How a conversation becomes a prompt, in training and evaluation alike."""

    template_arguments: dict[ArgumentName, TemplateArgument] = Field(default={})
    """Arguments of the model's own chat template, such as `reasoning_effort: minimal`. One that the template does not
    use is an error."""

    @field_validator("template_arguments")
    @classmethod
    def _free_names(cls, arguments: dict[str, TemplateArgument]) -> dict[str, TemplateArgument]:
        reserved = sorted(name for name in arguments if is_reserved_argument(name))
        if reserved:
            raise ValueError(f"{', '.join(reserved)} cannot be set: a run gives every prompt its own")
        return arguments


class ArithmeticSource(Section):
    """Problems generated on the fly: sums of several numbers, with an integer answer."""

    source: Literal["arithmetic"] = "arithmetic"
    problems: Annotated[int, Field(ge=1, le=10_000_000)] = 2048
    """How many distinct problems to generate."""
    levels: list[Annotated[int, Field(ge=1, le=5)]] = Field(default=[3], min_length=1)
    """Difficulties, drawn evenly: 1 = 2 one-digit terms, 2 = 2 x two digits, 3 = 3 x two, 4 = 4 x two,
    5 = 3 x three."""


class CompetitionSource(Section):
    """Generated problems in the columns and the wording of DAPO-Math-17K, cleaned like its file, for `starter-math`."""

    source: Literal["competition"] = "competition"
    problems: Annotated[int, Field(ge=1, le=10_000_000)] = 2048
    """How many distinct problems are left after cleaning."""


class FileSource(Section):
    """Problems read from a file: Parquet, JSON Lines, JSON (an array) or CSV.

    It has the columns of verl, SkyRL, slime or TRL, or `question` and `answer`.
    """

    source: Literal["file"] = "file"
    path: Path
    """The file. Rows that cannot be used are left out, counted and listed."""


Source = Annotated[ArithmeticSource | CompetitionSource | FileSource, Field(discriminator="source")]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]


class MixturePart(Section):
    """One part of a mixture."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """How much of every step comes from this part, against the weights of the others."""
    data: Source
    """The problems of this part; passed through in a random order of their own."""


class MixtureSource(Section):
    """Several sources in fixed shares: of each step as nearly as whole problems allow, and exactly over many steps."""

    source: Literal["mixture"] = "mixture"
    parts: dict[SetName, MixturePart]
    """The parts by name. A problem that an earlier part has too is left out of the later one, and counted."""

    @field_validator("parts")
    @classmethod
    def _several(cls, parts: dict[str, MixturePart]) -> dict[str, MixturePart]:
        if len(parts) < 2:
            raise ValueError(f"a mixture has at least two parts, and this one has {len(parts)}; use its source alone")
        return parts


TrainSource = Annotated[
    ArithmeticSource | CompetitionSource | FileSource | MixtureSource, Field(discriminator="source")
]


class DataConfig(Section):
    """What the policy is trained and measured on."""

    train: TrainSource = ArithmeticSource()
    """The training problems; passed through in a new order every epoch."""
    order: Literal["random", "easy_first"] = "random"
    """The order of an epoch: `random`, or by the number in each problem's column `difficulty`, the smallest first and
    equal ones at random."""
    evaluation: dict[SetName, Source] = Field(default={"arithmetic": ArithmeticSource(problems=256)})
    """Named evaluation sets; the names become file names."""
    allow_overlap: bool = False
    """Go on although evaluation problems are also trained on, and count them; otherwise that is an error. Problems
    are compared without case, spacing, the looks of formulas and the instructions around them."""


class OverlongConfig(Section):
    """DAPO's soft penalty on long responses."""

    buffer_tokens: NonNegative = 0
    """Width of the zone before the limit in which the penalty grows linearly; 0 switches it off."""
    factor: Annotated[float, Field(ge=0)] = 1.0
    """Penalty of a response as long as the limit."""


class GradingConfig(Section):
    """The processes that grade. What hangs or fails there is counted as ungraded, never as wrong."""

    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes at most; they are started as they are needed."""
    deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Longest time for one response, from when its grading starts; waiting for a free process does not count."""
    memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Memory that grading one response may take, in MiB (on Linux)."""


class RewardConfig(Section):
    """How a response becomes a number."""

    grader: Literal["math", "integer", "dapo_strict", "exact"] = "math"
    """How the final channel is held against the expected answer. `math`: the last answer that it commits itself to, as
    numbers and formulas. `integer`: the same for integers alone, as in AIME. `dapo_strict`: DAPO's published rule (last
    `Answer:` of 300 characters, equal text), to compare with others. `exact`: the text itself."""
    grading: GradingConfig = GradingConfig()
    right: Reward = 1.0
    """Reward of a correct answer."""
    wrong: Reward = -1.0
    """Reward of a wrong answer, or of none."""
    overlong: OverlongConfig = OverlongConfig()


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then a constant rate or one that falls along a cosine."""

    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate after warm-up. 0 trains nothing: the control of an experiment."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled decay of matrices; norms and biases are not decayed."""
    warmup_updates: NonNegative = 0
    """Updates over which the rate rises linearly to `lr`."""
    decay_updates: NonNegative = 0
    """Updates after the warm-up over which the rate falls, along half a cosine, to `final_lr`, where it stays; 0 = it
    stays at `lr`."""
    final_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where `decay_updates` lead; at most `lr`."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The global gradient norm is clipped to this."""

    def lr_after(self, updates: int) -> float:
        """Learning rate of the update that follows so many."""
        if updates < self.warmup_updates:
            return self.lr * ((updates + 1) / self.warmup_updates)
        if not self.decay_updates:
            return self.lr
        share = min(1.0, (updates + 1 - self.warmup_updates) / self.decay_updates)
        return self.final_lr + (self.lr - self.final_lr) * (1 + cos(pi * share)) / 2

    @model_validator(mode="after")
    def _falls(self) -> "OptimizerConfig":
        if self.final_lr and not self.decay_updates:
            raise ValueError(f"learner.optimizer.final_lr={self.final_lr:g} needs learner.optimizer.decay_updates")
        if self.final_lr > self.lr:
            raise ValueError(f"learner.optimizer.final_lr={self.final_lr:g} is above learner.optimizer.lr={self.lr:g}")
        return self


class ParallelConfig(Section):
    """How many ranks of `learner.engine=megatron` share what; what is left over is data parallel. Not for `torch`."""

    tp: Positive = 1
    """Tensor parallel: ranks that share each attention and dense layer, and the rows between them."""
    ep: Positive = 1
    """Expert parallel: ranks that share the experts of each layer; they are taken from the others of a stage."""
    pp: Positive = 1
    """Pipeline parallel: stages that the layers are divided into."""


ABSENT = {
    "learner.parallel.cp": (
        "there is no context parallelism: attention sees each sequence whole on a rank. For long sequences use "
        "learner.parallel.tp, whose ranks share the heads, and the rows between layers (sequence parallel), "
        "policy.recompute, and a smaller learner.micro_batch_tokens"
    ),
    "learner.parallel.dp": (
        "data parallel are the processes that learner.parallel.tp and pp leave over: start more with torchrun"
    ),
}
"""Keys that are looked for and do not exist, and what to do instead."""


class LearnerConfig(Section):
    """The engine that trains."""

    engine: Literal["torch", "megatron"] = "torch"
    """`torch`: the embedded learner, in this process; `policy.parity` says by which operations. `megatron`: over
    Megatron-Core, on NVIDIA GPUs, one process for each of them (`torchrun`)."""
    parallel: ParallelConfig = ParallelConfig()
    micro_batch_tokens: Positive = 4096
    """Most rows of a micro-batch; a longer sequence is a micro-batch of its own. Bounds memory; the result
    is the same but for rounding."""
    optimizer: OptimizerConfig = OptimizerConfig()


class EvaluationConfig(Section):
    """How and when accuracy is measured."""

    every: NonNegative = 25
    """Steps between evaluations in training, the last step always; 0 = none (see also `before_training`)."""
    before_training: bool = True
    """Also evaluate the model as it was given."""
    samples_per_problem: Annotated[int, Field(ge=1, le=100_000)] = 8
    """k of avg@k, pass@k and maj@k."""
    temperature: Annotated[float, Field(ge=0, le=1e3)] = 1.0
    """Sampling temperature; 0 = most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Keep the k most likely tokens; 0 = all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    max_response_tokens: Positive | None = None
    """Limit of a response; unset = `rollout.max_response_tokens`."""


class CheckpointConfig(Section):
    """Saving and going on."""

    dir: Path | None = None
    """Where checkpoints go; unset = `<output>/checkpoints`."""
    every: NonNegative = 10
    """Steps between saves; 0 = only at the end."""
    keep: NonNegative = 2
    """Newest checkpoints that are kept; 0 = all."""
    export: bool = True
    """At the end, also write the model as a Hugging Face folder, or its adapters in PEFT's format, under
    `<output>/export/`."""
    resume: str = "none"
    """`none` (a folder that already holds a run is an error), `latest` (begins anew where nothing was saved), or the
    path of a checkpoint: the newest of this run, or any of another one, to branch off from."""
    verify: bool = False
    """Check the hashes of a checkpoint's files, not only their sizes, before going on from it."""
    allow_other_machine: bool = False
    """Resume although the CPU family, thread count or library versions differ; the bytes may then differ too."""
    allow_other_config: bool = False
    """Resume although settings that shape the result differ from those of the checkpoint."""


class ReportConfig(Section):
    """What a run leaves behind for people."""

    every: NonNegative = 10
    """Steps between refreshes of `report.html`; 0 = only at the end."""
    rollouts_every: NonNegative = 1
    """Steps between dumps of what was sampled, under `rollouts/`; 0 = never."""
    samples: NonNegative = 8
    """Responses shown in the report for the first and the last dump."""


class RuntimeConfig(Section):
    """The process itself."""

    threads: Threads = 2
    """CPU threads of sampler and learner. Another number gives other gradients in the last bits, so it is stored and
    checked on resume."""


def _of_experts(targets: list[str]) -> list[str]:
    return [target for target in targets if "expert" in target]


class RunConfig(Section):
    """A run: one recipe file, complete."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run."""
    output: Path = Path("runs/run")
    """The folder of the run: configuration, metrics, rollouts, report, checkpoints, export."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of every random stream."""
    steps: Positive = 50
    """Training steps."""
    model: ModelConfig = ModelConfig()
    chat: ChatConfig = ChatConfig()
    policy: PolicyConfig = PolicyConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.checkpoint.dir or self.output / "checkpoints"

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step."""
        return self.algorithm.prompts_per_step // self.algorithm.prompts_per_update

    @model_validator(mode="after")
    def _pairs_agree(self) -> "RunConfig":
        if contradictions := [
            *self._about_policy(),
            *self._about_sampling(),
            *self._about_engine(),
            *self._about_learner(),
            *self._about_rewards(),
        ]:
            raise ValueError("; ".join(contradictions))
        return self

    def _about_policy(self) -> Iterator[str]:
        """What the trained model cannot be, or would silently not be."""
        policy, lora = self.policy, self.policy.lora
        if lora.rank == 0:
            for key in sorted(lora.model_fields_set - {"rank"}):
                if getattr(lora, key) != LoraConfig.model_fields[key].default:
                    yield f"policy.lora.{key} has no use without adapters: set policy.lora.rank, or leave it out"
        elif lora.experts == "none" and lora.targets != "all-linear" and (left_out := _of_experts(lora.targets)):
            yield (
                f"policy.lora.experts=none leaves out {', '.join(left_out)} of policy.lora.targets: use "
                "policy.lora.experts=per_expert, or other targets"
            )
        if self.learner.engine == "torch" and policy.recompute == "selective":
            yield "policy.recompute=selective is of learner.engine=megatron; use full, or none"
        if self.learner.engine == "torch" and policy.parity:
            if policy.dtype == "bfloat16":
                yield "policy.dtype=bfloat16 needs policy.parity=false: the kernels of parity compute in float32"
            if policy.device == "cuda":
                yield "policy.device=cuda needs policy.parity=false: the kernels of parity are those of a CPU"

    def _about_sampling(self) -> Iterator[str]:
        """What cannot be sampled, or not be learned from."""
        rollout, sampling = self.rollout, self.algorithm.sampling
        if "train" in self.data.evaluation:
            yield "data.evaluation.train: an evaluation set cannot be called `train`; choose another name"
        if isinstance(sampling, OverSampling) and sampling.cutoff_tokens >= rollout.max_response_tokens:
            yield (
                f"algorithm.sampling.cutoff_tokens={sampling.cutoff_tokens} must be smaller than "
                f"rollout.max_response_tokens={rollout.max_response_tokens}, or everything is drawn to its end"
            )
        if rollout.min_tokens > rollout.max_response_tokens:
            yield (
                f"rollout.min_tokens={rollout.min_tokens} is more than "
                f"rollout.max_response_tokens={rollout.max_response_tokens}"
            )
        filters = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
        restricting = [key for key, neutral in filters.items() if getattr(rollout, key) != neutral]
        for key in () if rollout.record_support else restricting:
            yield (
                f"rollout.{key}={getattr(rollout, key)} cannot be trained on unless the learner knows which tokens "
                f"were allowed; use rollout.record_support=true, or rollout.{key}={filters[key]}"
            )
        if rollout.record_support and not restricting:
            yield (
                "rollout.record_support=true has no use where every token is allowed: none of rollout.top_p, top_k, "
                "min_p and min_tokens is set"
            )

    def _about_learner(self) -> Iterator[str]:
        """What the Megatron learner cannot do yet, or would not heed."""
        if self.learner.engine == "torch":
            return
        torch_alone = [
            (self.policy.lora.rank > 0, f"policy.lora.rank={self.policy.lora.rank}"),
            (self.policy.r3, "policy.r3=true"),
            (self.rollout.record_support, "rollout.record_support=true"),
            (self.algorithm.kl.place != "none", f"algorithm.kl.place={self.algorithm.kl.place}"),
        ]
        for asked, setting in torch_alone:
            if asked:
                yield f"{setting} needs learner.engine=torch: the Megatron learner does not have it yet"
        if self.policy.device != "cpu":
            yield (
                f"policy.device={self.policy.device} is for learner.engine=torch: leave it out, the Megatron learner "
                "is on GPUs in any case"
            )

    def _about_engine(self) -> Iterator[str]:
        """What vLLM cannot do, or would not heed. Its settings are not looked at while the local engine is chosen."""
        if self.rollout.engine == "vllm":
            yield from about_vllm(self.rollout, self.policy, self.evaluation.temperature)

    def _about_rewards(self) -> Iterator[str]:
        """Rewards that do not fit together, or that the advantage is no formula for."""
        advantage, reward = self.algorithm.advantage, self.reward
        limits = {
            "rollout.max_response_tokens": self.rollout.max_response_tokens,
            "evaluation.max_response_tokens": self.evaluation.max_response_tokens,
        }
        for key, limit in limits.items():
            if limit is not None and reward.overlong.buffer_tokens >= limit:
                yield (
                    f"reward.overlong.buffer_tokens={reward.overlong.buffer_tokens} must be smaller than {key}={limit}"
                )
        if reward.wrong >= reward.right:
            yield f"reward.wrong={reward.wrong} must be smaller than reward.right={reward.right}"
        penalties = {
            "reward.overlong.buffer_tokens=0": reward.overlong.buffer_tokens > 0,
            "algorithm.kl.place=none": self.algorithm.kl.place == "reward",
        }
        for off in (off for off, on in penalties.items() if on):
            if isinstance(advantage, MaxrlAdvantage | PassAtKAdvantage):
                yield (
                    f"algorithm.advantage.name={advantage.name} knows right and wrong alone, and no penalty between "
                    f"them: use {off}, or another advantage"
                )
        if isinstance(advantage, MaxrlAdvantage) and reward.wrong != 0:
            yield (
                "algorithm.advantage.name=maxrl divides by the mean reward, so that wrong answers must earn nothing: "
                f"use reward.wrong=0, not {reward.wrong}"
            )
