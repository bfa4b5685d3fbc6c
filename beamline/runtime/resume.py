"""Going on with a run: from which checkpoint, whether machine, settings and data are still the same, what is cut."""

import fcntl
import hashlib
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from beamline.checkpoint import Checkpoint, CheckpointStore
from beamline.config import ConfigError, differences, load_config
from beamline.config.schema import RunConfig
from beamline.data import ProblemSet
from beamline.errors import BeamlineError
from beamline.report import read_metrics, truncate_after
from beamline.report.rollouts import find_rollouts, step_of
from beamline.runtime.determinism import cpu_family

# Settings that a resumed run may change: they do not shape what any one step does. (Threads belong to the machine.)
_FREE = ("name", "output", "steps", "checkpoint", "report", "evaluation.every", "rollout.deadline_seconds", "runtime")


class ResumeError(BeamlineError, RuntimeError):
    """A run that cannot be gone on with as asked."""


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
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def fingerprint(problems: ProblemSet) -> str:
    """A hash of everything that training takes from a problem set."""
    digest = hashlib.sha256()
    for problem in problems.problems:
        digest.update(repr((problem.id, problem.messages, problem.answer)).encode())
    return digest.hexdigest()


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
        return path
    for trace in (config.output / "metrics.jsonl", config.checkpoint_dir / "latest"):
        if trace.exists():
            raise ResumeError(
                f"{trace} shows that a run is there already; go on with it (checkpoint.resume=latest), "
                "or choose another folder (output=...)"
            )
    return None


def _check_nothing_saved(config: RunConfig) -> None:
    """A run may begin anew where it ended before its first checkpoint, and nowhere else."""
    metrics = config.output / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    done = int(lines[-1]["step"]) if lines else 0
    first_save = config.checkpoint.every or config.steps
    if done > first_save:
        raise ResumeError(
            f"{metrics} tells of {done} steps, but {config.checkpoint_dir} holds no checkpoint; set checkpoint.dir to "
            "where the checkpoints are, or choose another folder (output=...)"
        )


def cut_metrics(path: Path, checkpoint: Checkpoint) -> None:
    """Leave in a run's metrics and rollouts only what came before a checkpoint.

    Raises:
        ResumeError: the metrics have no line of the checkpoint's step.
    """
    try:
        truncate_after(path, checkpoint.step)
    except (FileNotFoundError, ValueError) as error:
        raise ResumeError(
            f"{checkpoint.path} cannot be gone on from in {path.parent}: {error}; "
            "set output to the folder of the checkpoint's run, or checkpoint.resume to a checkpoint of this one"
        ) from error
    for dump in find_rollouts(path.parent):
        if step_of(dump) > checkpoint.step:
            dump.unlink()


def clear_unsaved(output: Path) -> None:
    """Remove what a run left that ended before its first checkpoint."""
    (output / "metrics.jsonl").unlink(missing_ok=True)
    for dump in find_rollouts(output):
        dump.unlink()


def check_same(config: RunConfig, train: ProblemSet, saved: Mapping[str, Any]) -> None:
    """Hold the machine, the training problems and the configuration against those of a checkpoint.

    Raises:
        ResumeError: something differs that shapes the result, and the recipe does not allow it.
    """
    now = environment(config)
    other = [f"{k}: {saved['environment'].get(k)} -> {v}" for k, v in now.items() if saved["environment"].get(k) != v]
    if other and not config.checkpoint.allow_other_machine:
        raise ResumeError(
            "the checkpoint was made elsewhere, so the bytes of this run would differ from an uninterrupted one ("
            + "; ".join(other)
            + "); checkpoint.allow_other_machine=true accepts that"
        )
    if config.checkpoint.allow_other_config:
        return
    try:
        before = load_config(None, base=saved["config"])
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
    if fingerprint(train) != saved["train_problems"]:
        changed.append("data.train: other problems than before under the same name")
    if changed:
        raise ResumeError(
            "the checkpoint was made under other settings (" + "; ".join(changed) + "); "
            "set them back, or accept the change with checkpoint.allow_other_config=true"
        )
