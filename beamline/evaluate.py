"""Measuring accuracy: several samples of every problem, graded, with an interval over problems."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from beamline.algorithms.evaluation import SetResult, set_result
from beamline.chat import BeamChat
from beamline.checkpoint import write_atomic
from beamline.checkpoint.files import make_empty_folder, make_folder, write_json
from beamline.config.schema import FileSource, RunConfig
from beamline.data import DataError, ProblemSet
from beamline.records import SamplingParams
from beamline.report.problems import write_problems
from beamline.rollout.collect import Job, sample
from beamline.rollout.grading import Grading
from beamline.rollout.rows import rows
from beamline.rollout.sampler import Sampler
from beamline.runtime.console import RunConsole
from beamline.runtime.data import evaluation_sets, left_out, write_data_report
from beamline.runtime.engines import load_chat, model_folder, require_engine, sampler_of
from beamline.runtime.subject import find_subject
from beamline.runtime.tables import evaluation_table, problem_table
from beamline.tasks.grading import open_pool
from beamline.tasks.pool import GradingPool

_MOST_SHOWN = 64  # problems that are listed one by one on the terminal


def evaluate(
    config: RunConfig,
    sets: Mapping[str, ProblemSet],
    sampler: Sampler,
    chat: BeamChat,
    pool: GradingPool,
    step: int,
    console: RunConsole,
) -> dict[str, SetResult]:
    """Sample every problem of every set several times, grade the responses, and sum up."""
    k, params = config.evaluation.samples_per_problem, evaluation_params(config, chat)
    measured = {}
    for name, problems in sets.items():
        job = Job("eval", step, problems.problems, k, params)
        grading = Grading(pool, job, chat, config.reward)
        with console.phase(f"eval {name}", job.size) as bar:
            deadline = config.rollout.deadline_seconds
            drawn = sample(sampler, job, chat, deadline, grading.add, lambda done: bar.advance(len(done.token_ids)))
        measured[name] = set_result(grading.finish(drawn), k)
    return measured


def evaluation_metrics(measured: Mapping[str, SetResult]) -> dict[str, float]:
    """The ``eval/`` metrics of what was measured."""
    return {f"eval/{name}/{key}": value for name, of in measured.items() for key, value in of.metrics.items()}


def write_evaluation(folder: Path, measured: Mapping[str, SetResult], chat: BeamChat, step: int) -> None:
    """Write responses (``<set>.jsonl``), how each problem came out (``<set>.problems.jsonl``) and ``metrics.json``."""
    make_folder(folder)
    for name, of in measured.items():
        lines = (json.dumps(row).encode() + b"\n" for row in rows(of.groups, chat, step))
        write_atomic(folder / f"{name}.jsonl", lines)
        write_problems(folder, name, of.problems)
    write_json(folder / "metrics.json", {"step": step} | evaluation_metrics(measured))


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
    """Evaluate a run's newest checkpoint, a checkpoint, an adapter, a model folder or ``starter``; print the figures.

    Settings are the checkpoint's, the packaged model's or the defaults; ``recipe`` and ``settings`` replace them.

    Raises:
        ModelError, DataError, ConfigError, CheckpointError: the model, data or settings cannot be used.
        FileExistsError: there is something in ``out``.
    """
    if out is not None:
        make_empty_folder(out)
    subject = find_subject(name, settings, recipe)
    require_engine(subject.config)
    config, step, (module, adapters) = subject.config, subject.step, subject.weights()
    chat = load_chat(config)
    sets = _problem_sets(config, files, chat)
    with open_pool(config.reward) as pool, RunConsole(config.steps, config.steps) as console:
        params, samples = evaluation_params(config, chat), config.evaluation.samples_per_problem
        console.print(
            f"{subject.checkpoint or config.policy.lora.adapter_path or model_folder(config)}, step {step}: "
            f"{samples} samples a problem of up to {params.max_tokens} tokens at temperature {params.temperature}"
        )
        with closing(sampler_of(config, module, step, adapters)) as sampler:
            measured = evaluate(config, sets, sampler, chat, pool, step, console)
        if out is not None:
            write_evaluation(out, measured, chat, step)
            write_data_report(out, sets.values())
        for line in left_out(sets.values()):
            console.print(f"left out of {line}")
        _show(console, measured, samples, out)
    return evaluation_metrics(measured)


def _show(console: RunConsole, measured: Mapping[str, SetResult], k: int, out: Path | None) -> None:
    console.show(evaluation_table(measured, k))
    for name, of in measured.items():
        if len(of.problems) <= _MOST_SHOWN:
            console.show(problem_table(name, of.problems))
        else:
            where = out / f"{name}.problems.jsonl" if out else "--out DIR writes it"
            console.print(f"how each of the {len(of.problems):,} problems of {name} went: {where}")


def _problem_sets(config: RunConfig, files: Sequence[Path], chat: BeamChat) -> dict[str, ProblemSet]:
    named = {file.stem: file for file in files}
    if len(named) < len(files):
        raise DataError(f"problem files need different names, their sets are named so: {', '.join(map(str, files))}")
    sources = {name: FileSource(path=file) for name, file in named.items()} or config.data.evaluation
    if not sources:
        raise DataError("there is nothing to evaluate on: give a problem file, or set data.evaluation")
    return evaluation_sets(config, sources, chat)
