"""Going on with a run: from which checkpoint, whether machine, settings and data are still the same, what is cut."""

import fcntl
import hashlib
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import tokenizers
import torch
import transformers

import beamline
from beamline.checkpoint import Checkpoint, CheckpointError, CheckpointStore, write_atomic
from beamline.config import ConfigError, differences, load_config
from beamline.config.compose import escaped
from beamline.config.schema import RunConfig
from beamline.data import ProblemSet
from beamline.errors import BeamlineError
from beamline.report import find_evaluations, read_metrics, truncate_after
from beamline.report.rollouts import find_rollouts, step_of
from beamline.runtime.determinism import cpu_family

# Settings that a resumed run may change: they do not shape what any one step does. (Threads belong to the machine.)
_FREE = (
    "name",
    "output",
    "steps",
    "checkpoint",
    "report",
    "evaluation.every",
    "evaluation.before_training",
    "learner.parallel",
    "data.allow_overlap",
    "reward.grading.workers",
    "rollout.deadline_seconds",
    "rollout.vllm.bucket_mb",
    "rollout.vllm.devices",
    "rollout.vllm.expert_parallel",
    "rollout.vllm.max_restarts",
    "rollout.vllm.max_sequences",
    "rollout.vllm.memory_share",
    "rollout.vllm.pipeline_parallel",
    "rollout.vllm.replicas",
    "rollout.vllm.start_seconds",
    "rollout.vllm.tensor_parallel",
    "rollout.vllm.token_seconds",
    "rollout.vllm.weights",
    "algorithm.guard",
    "runtime",
)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of its run, beside tensors."""

    updates: Annotated[int, msgspec.Meta(ge=0)]
    skipped_updates: Annotated[int, msgspec.Meta(ge=0)]
    problems_drawn: Annotated[int, msgspec.Meta(ge=0)]
    environment: dict[str, str | int]
    problems: dict[str, str]
    base: str
    config: dict[str, Any]


class ResumeError(BeamlineError, RuntimeError):
    """A run that cannot be gone on with as asked."""


def run_state(checkpoint: Checkpoint) -> RunState:
    """The state of the run in a checkpoint.

    Raises:
        CheckpointError: it is not what this version writes.
    """
    try:
        return msgspec.convert(checkpoint.run_state, RunState)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{checkpoint.path / 'run_state.json'} is not a run's state: {error}") from error


@contextmanager
def alone_in(output: Path) -> Iterator[None]:
    """Hold a run's folder, which is made where there is none.

    Raises:
        ResumeError: another process is at work in it.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResumeError(
                f"another process is at work in {output}; wait for its end, or choose another folder (output=...)"
            ) from None
        yield


def environment(config: RunConfig) -> dict[str, str | int]:
    """What has to be equal for a resumed run to give the same bytes."""
    return {
        "cpu": cpu_family(),
        "threads": config.runtime.threads,
        "python": platform.python_version(),
        "beamline": beamline.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
    }


def fingerprints(sets: Iterable[ProblemSet]) -> dict[str, str]:
    """For each problem set, a hash of everything that a run takes from it."""
    texts = {s.name: repr(([(p.id, p.messages, p.answer) for p in s.problems], s.difficulties)) for s in sets}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def resume_from(config: RunConfig, store: CheckpointStore) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` names, or None to begin.

    Raises:
        ResumeError: ``none`` in a folder that holds a run, or a checkpoint that is not there.
    """
    resume = config.checkpoint.resume
    if resume == "latest":
        latest = store.latest()
        if latest is None:
            _check_nothing_saved(config)
        return latest
    if resume != "none":
        path = Path(resume).expanduser()
        if not path.is_dir():
            raise ResumeError(
                f"checkpoint.resume={resume}: there is no such folder; use 'latest', 'none' or a checkpoint"
            )
        _check_newest(path, config, store)
        return path
    traces = [path for path in (config.output / "metrics.jsonl", store.latest()) if path is not None and path.exists()]
    if traces:
        raise ResumeError(
            f"{traces[0]} shows that a run is there already; go on with it (checkpoint.resume=latest), "
            "or choose another folder (output=...)"
        )
    return None


def _check_nothing_saved(config: RunConfig) -> None:
    """A run may begin anew where it ended before its first checkpoint, and nowhere else."""
    recipe = config.output / "config.yaml"
    if not recipe.exists():
        return
    before = load_config(recipe).checkpoint.dir or config.output / "checkpoints"
    metrics = config.output / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    saved = any("timing/checkpoint" in line for line in lines)
    if saved or CheckpointStore(before, keep=0).latest() is not None:
        raise ResumeError(
            f"the run in {config.output} has saved checkpoints in {before}, and {config.checkpoint_dir} has none; "
            f"go on with it (checkpoint.dir={before}), or choose another folder (output=...)"
        )


def _check_newest(path: Path, config: RunConfig, store: CheckpointStore) -> None:
    """Going back within a run, or over to another one, would leave steps that its metrics do not tell of."""
    latest = store.latest()
    if latest is not None and path.resolve() == latest.resolve():
        return
    traces = [trace for trace in (latest, config.output / "metrics.jsonl") if trace is not None and trace.exists()]
    if traces:
        raise ResumeError(
            f"{path} is not the newest checkpoint of the run in {config.output}, of which {traces[0]} tells; "
            "branch off in another folder (output=...), or remove what is later first"
        )


def go_back(output: Path, checkpoint: Checkpoint) -> None:
    """Leave in a run's metrics and dumps what came before a checkpoint; a new folder takes the metrics of its run.

    Raises:
        ResumeError: the metrics have no line of the checkpoint's step.
    """
    metrics = output / "metrics.jsonl"
    runs = (Path(str(run_state(checkpoint).config.get("output", ""))), checkpoint.path.resolve().parents[1])
    source = next((run / metrics.name for run in runs if (run / metrics.name).exists()), None)
    if not metrics.exists() and source is not None:
        write_atomic(metrics, [source.read_bytes()])
    try:
        truncate_after(metrics, checkpoint.step)
    except (FileNotFoundError, ValueError) as error:
        raise ResumeError(
            f"{checkpoint.path} cannot be gone on from in {output}: {error}; choose another folder (output=...)"
        ) from error
    _remove_dumps(output, after=checkpoint.step)


def clear_unsaved(output: Path) -> None:
    """Remove what a run left that ended before its first checkpoint."""
    (output / "metrics.jsonl").unlink(missing_ok=True)
    _remove_dumps(output, after=-1)


def _remove_dumps(output: Path, after: int) -> None:
    for dump in find_rollouts(output):
        if step_of(dump) > after:
            dump.unlink()
    for step, folder in find_evaluations(output):
        if step > after:
            shutil.rmtree(folder)


def check_same(config: RunConfig, problems: Mapping[str, str], base: str, saved: RunState) -> None:
    """Hold machine, configuration, problems and base (their fingerprints) against those of a checkpoint.

    Raises:
        ResumeError: something differs that shapes the result, and the recipe does not allow it.
    """
    now = environment(config)
    then = saved.environment
    other = [f"{k}: {then.get(k)} -> {v}" for k, v in now.items() if then.get(k) != v]
    if other and not config.checkpoint.allow_other_machine:
        raise ResumeError(
            "the checkpoint was made elsewhere, so the bytes of this run would differ from an uninterrupted one ("
            + "; ".join(other)
            + "); checkpoint.allow_other_machine=true accepts that"
        )
    if config.checkpoint.allow_other_config:
        return
    try:
        before = load_config(None, base=escaped(saved.config))
    except ConfigError as error:
        raise ResumeError(
            f"the checkpoint's configuration is of another version of beamline ({error}); "
            "checkpoint.allow_other_config=true goes on without comparing"
        ) from error
    changed = [
        f"{key}: {old} -> {new}"
        for key, old, new in differences(before, config)
        if not any(key == free or key.startswith(free + ".") for free in _FREE)
    ]
    changed += [f"the weights in model.path={config.model.path}, which the run needs"] * (saved.base != base)
    changed += [
        f"the problems of data set {name!r}" for name in problems if saved.problems.get(name, "") != problems[name]
    ]
    if changed:
        raise ResumeError(
            "the checkpoint was made under other settings (" + "; ".join(changed) + "); "
            "set them back, or accept the change with checkpoint.allow_other_config=true"
        )
