"""What a run would do, found out without doing it."""

from math import prod

from beamline.checkpoint import CheckpointStore
from beamline.config.schema import RunConfig
from beamline.data import ProblemSet
from beamline.model.beam import tensors
from beamline.runtime.data import Data, left_out, load_data
from beamline.runtime.engines import check_model, load_chat, load_module, positions
from beamline.runtime.resume import resume_from
from beamline.runtime.session import open_from


def preview(config: RunConfig) -> str:
    """Check configuration, model, data and the run's folder, and describe the run.

    Raises:
        ModelError, DataError, CheckpointError, ResumeError: what training would have met.
    """
    checkpoint = resume_from(config, CheckpointStore(config.checkpoint_dir, config.checkpoint.keep))
    shape = check_model(config)
    data = load_data(config, load_chat(config))
    if checkpoint is not None:
        open_from(config, data, checkpoint)
    load_module(config)
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
        f"sequences   up to {positions(config)} tokens, {config.rollout.slots} at a time",
        *_data_lines(data, config),
    ]
    return "\n".join(lines)


def _data_lines(data: Data, config: RunConfig) -> list[str]:
    lines = _training_lines(data.train, config.steps * config.algorithm.prompts_per_step)
    lines += [
        f"evaluation  {name}: {len(problems)} problems x {config.evaluation.samples_per_problem} samples"
        for name, problems in data.evaluation.items()
    ]
    shared = {name: count for name, count in data.overlap.items() if count}
    lines += [f"overlap     {name}: {count} problems are also trained on" for name, count in shared.items()]
    return lines + [f"left out    {line}" for line in left_out(data.sets)]


def _training_lines(train: ProblemSet, draws: int) -> list[str]:
    if not train.parts:
        return [f"training    {len(train)} problems, passed through {draws / len(train):.2f} times"]
    total = sum(part.weight for part in train.parts)
    shares = [(part, float(part.weight / total)) for part in train.parts]
    return [f"training    {len(train)} problems in {len(shares)} parts"] + [
        f"training    {part.name}: {share:.1%} of each step, {part.problems} problems, passed through "
        f"{draws * share / part.problems:.2f} times"
        for part, share in shares
    ]
