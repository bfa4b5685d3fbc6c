"""Measuring accuracy: several samples of every problem, graded, with an interval over problems."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from beamline.algorithms.statistics import evaluation_statistics
from beamline.chat import BeamChat
from beamline.checkpoint import open_checkpoint, write_atomic
from beamline.config import load_config
from beamline.config.compose import escaped
from beamline.config.schema import FileSource, RunConfig
from beamline.data import DataError, ProblemSet
from beamline.policy import model
from beamline.records import SamplingParams
from beamline.rollout.collect import Job, graded, sample
from beamline.rollout.rows import rows
from beamline.rollout.sampler import Sampler
from beamline.runtime.console import RunConsole
from beamline.runtime.determinism import make_deterministic
from beamline.runtime.engines import load_chat, load_module, model_folder, sampler_of
from beamline.runtime.export import find_checkpoint, saved_config
from beamline.runtime.session import evaluation_sets


def evaluate(
    config: RunConfig,
    sets: Mapping[str, ProblemSet],
    sampler: Sampler,
    chat: BeamChat,
    step: int,
    console: RunConsole,
    dumps: Path | None = None,
) -> dict[str, float]:
    """The ``eval/`` metrics of every problem set; with ``dumps``, also each response as ``<dumps>/<set>.jsonl``."""
    metrics: dict[str, float] = {}
    k = config.evaluation.samples_per_problem
    for name, problems in sets.items():
        job = Job("eval", step, problems.problems, k, evaluation_params(config, chat))
        with console.phase(f"eval {name}", len(problems) * k) as bar:
            deadline = config.rollout.deadline_seconds
            drawn = sample(sampler, job, chat, deadline, lambda done: bar.advance(len(done.token_ids)))
        groups = [graded(group, chat, job.params.max_tokens, config.reward) for group in drawn]
        if dumps is not None:
            dumps.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(row).encode() + b"\n" for row in rows(groups, chat, step))
            write_atomic(dumps / f"{name}.jsonl", lines)
        metrics |= {f"eval/{name}/{key}": value for key, value in evaluation_statistics(groups, k).items()}
    return metrics


def evaluation_params(config: RunConfig, chat: BeamChat) -> SamplingParams:
    """How evaluation draws."""
    settings = config.evaluation
    return SamplingParams(
        max_tokens=settings.max_response_tokens or config.rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop_ids=chat.stop_ids,
    )


def evaluate_model(
    name: str, files: Sequence[Path], recipe: Path | None, settings: Sequence[str], out: Path | None
) -> dict[str, float]:
    """Evaluate a run's newest checkpoint, a checkpoint, a model folder or ``starter``, and print the figures.

    Settings are the checkpoint's own, or the defaults; ``recipe`` and ``settings`` replace them.

    Raises:
        ModelError, DataError, ConfigError, CheckpointError: the model, data or settings cannot be used.
    """
    if out is not None:
        _check_free(out, files)
    checkpoint = find_checkpoint(Path(name))
    base = {} if checkpoint is None else saved_config(checkpoint)
    path = name if checkpoint is None else base["model"]["path"]
    # As an override, so that a recipe's own model does not take the place of the one that was asked for.
    config = load_config(recipe, [f"model.path={json.dumps(escaped(path))}", *settings], base)
    make_deterministic(config.runtime.threads)
    module, step = load_module(config), 0
    if checkpoint is not None:
        opened = open_checkpoint(checkpoint)
        model.restore(module, opened.reader)
        step = opened.step
    chat = load_chat(config)
    sets = _problem_sets(config, files, chat)
    with RunConsole(config.steps, config.steps) as console:
        params, samples = evaluation_params(config, chat), config.evaluation.samples_per_problem
        console.print(
            f"{checkpoint or model_folder(config)}, step {step}: {samples} samples a problem of up to "
            f"{params.max_tokens} tokens at temperature {params.temperature}"
        )
        metrics = evaluate(config, sets, sampler_of(config, module, step), chat, step, console, out)
        for problems in sets.values():
            for excluded in problems.excluded:
                console.print(f"left out of {problems.name}, {excluded.where}: {excluded.reason}")
        for key, value in metrics.items():
            console.print(f"{key:<50} {value:.4f}")
    return metrics


def _check_free(out: Path, files: Sequence[Path]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    there = [out / f"{file.stem}.jsonl" for file in files if (out / f"{file.stem}.jsonl").exists()]
    if there:
        raise DataError(f"{there[0]} is there already; give --out an empty folder")


def _problem_sets(config: RunConfig, files: Sequence[Path], chat: BeamChat) -> dict[str, ProblemSet]:
    named = {file.stem: file for file in files}
    if len(named) < len(files):
        raise DataError(f"problem files need different names, their sets are named so: {', '.join(map(str, files))}")
    sources = {name: FileSource(path=file) for name, file in named.items()} or config.data.evaluation
    if not sources:
        raise DataError("there is nothing to evaluate on: give a problem file, or set data.evaluation")
    return evaluation_sets(config, sources, chat)
