"""What a run would do, found out without doing it."""

import json
from math import prod

from beamline.checkpoint import CheckpointStore
from beamline.config import ConfigError, differences
from beamline.config.algorithm import AlgorithmConfig, DynamicSampling, OverSampling
from beamline.config.rollout import RolloutConfig
from beamline.config.schema import RunConfig
from beamline.data import ProblemSet
from beamline.model.beam import BeamShape, tensors
from beamline.model.lora import adapter_tensors, sites
from beamline.policy.lora import lora_shape
from beamline.runtime.data import Data, left_out, load_data
from beamline.runtime.engines import (
    base_fingerprint,
    check_model,
    load_adapters,
    load_chat,
    load_module,
    positions,
    require_engine,
    require_learner,
)
from beamline.runtime.megatron import check_megatron
from beamline.runtime.resume import resume_from
from beamline.runtime.session import open_from


def preview(config: RunConfig) -> str:
    """Check configuration, model, data and the run's folder, and describe the run.

    Raises:
        ModelError, DataError, CheckpointError, ResumeError: what training would have met.
    """
    checkpoint = resume_from(config, CheckpointStore(config.checkpoint_dir, config.checkpoint.keep))
    shape = check_model(config)
    if config.learner.engine == "megatron":
        check_megatron(config, shape)
    data = load_data(config, load_chat(config))
    if checkpoint is not None:
        open_from(config, data, base_fingerprint(config), checkpoint)
    load_module(config)
    load_adapters(config, begins=checkpoint is None)
    algorithm = config.algorithm
    parameters = sum(prod(spec.shape) for spec in tensors(shape))
    samples = algorithm.prompts_per_step * algorithm.samples_per_prompt
    per_step = config.updates_per_step
    lines = [
        f"run         {config.name} in {config.output}, seed {config.seed}",
        f"begins      {'at the first step' if checkpoint is None else f'from {checkpoint}'}",
        f"model       {config.model.path}: {parameters:,} parameters in {shape.num_hidden_layers} layers, "
        f"{len(shape.moe_layers)} of them with {shape.num_experts} experts, top {shape.num_experts_per_tok}",
        f"steps       {config.steps}, each {algorithm.prompts_per_step} problems x {algorithm.samples_per_prompt} "
        f"samples = {samples} responses and {per_step} update{'s' if per_step > 1 else ''}",
        f"sequences   up to {positions(config)} tokens, {_at_a_time(config.rollout)}",
        _trained_line(config, shape),
        _algorithm_line(config),
        *_settings_line(config),
        *_data_lines(data, config),
        *_needs_lines(config),
    ]
    return "\n".join(lines)


def _at_a_time(rollout: RolloutConfig) -> str:
    if rollout.engine == "local":
        return f"{rollout.slots} at a time"
    vllm = rollout.vllm
    gpus = f"{vllm.replicas} vLLM engine{'s' * (vllm.replicas > 1)} of {vllm.devices_per_replica} GPU"
    return f"{vllm.replicas * vllm.max_sequences} at a time, on {gpus}{'s' * (vllm.devices_per_replica > 1)}"


def _needs_lines(config: RunConfig) -> list[str]:
    """What the run itself would lack on this machine."""
    lines = []
    for require in (require_engine, require_learner):
        try:
            require(config)
        except ConfigError as error:
            lines += [f"needs       {problem}" for problem in error.problems]
    return lines


def _trained_line(config: RunConfig, shape: BeamShape) -> str:
    lora, replay = lora_shape(config.policy.lora), ", with the sampler's experts" if config.policy.r3 else ""
    if lora is None:
        return f"trained     every weight{replay}"
    size = sum(prod(spec.shape) for spec in adapter_tensors(shape, lora))
    linears = sum(len(site.adapted) * (site.experts or 1) for site in sites(shape, lora))
    return (
        f"trained     adapters of rank {lora.rank} (alpha {lora.alpha:g}) on {linears:,} linear layers: {size:,} "
        f"parameters{replay}"
    )


def _algorithm_line(config: RunConfig) -> str:
    algorithm, adapted = config.algorithm, config.policy.lora.rank > 0
    place, (least, most) = algorithm.kl.place, _draws(algorithm)
    held = "held to the model without its adapters" if adapted else "so a second model in memory"
    reference = "no KL penalty" if place == "none" else f"KL penalty in the {place}, {held}"
    draws = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"algorithm   advantage {algorithm.advantage.name}, loss {algorithm.loss.name} ({algorithm.aggregation}), "
        f"sampling {algorithm.sampling.name} ({draws} problems a step), {reference}"
    )


def _settings_line(config: RunConfig) -> list[str]:
    """What the recipe says of policy and algorithm, and of how samples are drawn, that is not the default."""
    drawing = ["temperature", "top_", "min_", "record_", "dtype", "kv_dtype", "head_dtype"]
    drawing += ["vllm."] * (config.rollout.engine == "vllm")
    shown = ("policy.", "algorithm.", "data.order", *(f"rollout.{key}" for key in drawing))
    changed = differences(RunConfig(), config)
    values = {key: new for key, _, new in changed if key.startswith(shown) and new is not None}
    settings = [f"{key}={new if isinstance(new, str) else json.dumps(new)}" for key, new in values.items()]
    return [f"settings    {' '.join(settings)}"] if settings else []


def _evaluation_lines(data: Data, config: RunConfig) -> list[str]:
    every, before = config.evaluation.every, config.evaluation.before_training
    times = ["before training"] * before + [f"every {every} steps and at the end"] * bool(every)
    if not times:
        return ["evaluation  none (evaluation.every=0, evaluation.before_training=false)"]
    return [
        f"evaluation  {name}: {len(problems)} problems x {config.evaluation.samples_per_problem} samples, "
        + " and ".join(times)
        for name, problems in data.evaluation.items()
    ]


def _draws(algorithm: AlgorithmConfig) -> tuple[int, int]:
    """Problems that a step takes of the training set, at least and at most."""
    wanted = algorithm.prompts_per_step
    match algorithm.sampling:
        case DynamicSampling(rounds=rounds):
            return wanted, rounds * wanted
        case OverSampling() as sampling:
            return sampling.problems(wanted), sampling.problems(wanted)
        case _:
            return wanted, wanted


def _data_lines(data: Data, config: RunConfig) -> list[str]:
    least, most = _draws(config.algorithm)
    lines = _training_lines(data.train, config.steps * least, config.steps * most)
    lines += _evaluation_lines(data, config)
    shared = {name: count for name, count in data.overlap.items() if count}
    lines += [f"overlap     {name}: {count} problems are also trained on" for name, count in shared.items()]
    return lines + [f"left out    {line}" for line in left_out(data.sets)]


def _training_lines(train: ProblemSet, least: int, most: int) -> list[str]:
    """What is trained on, and how often it is passed through by so many draws."""

    def times(problems: float) -> str:
        passes = f"{least / problems:.2f}" if least == most else f"{least / problems:.2f} to {most / problems:.2f}"
        return f"passed through {passes} times"

    if not train.parts:
        return [f"training    {len(train)} problems, {times(len(train))}"]
    total = sum(part.weight for part in train.parts)
    shares = [(part, float(part.weight / total)) for part in train.parts]
    return [f"training    {len(train)} problems in {len(shares)} parts"] + [
        f"training    {part.name}: {share:.1%} of each step, {part.problems} problems, {times(part.problems / share)}"
        for part, share in shares
    ]
