"""Opening a run: what it trains on, where it stands, what it writes to."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from beamline.chat import BeamChat
from beamline.checkpoint import CheckpointStore, open_checkpoint, write_atomic
from beamline.config import to_yaml
from beamline.config.schema import RunConfig
from beamline.data import ProblemSet, check_disjoint, load, usable
from beamline.records import Group
from beamline.report import MetricsWriter, rollouts_path, write_report, write_rollouts
from beamline.rollout.rows import rows
from beamline.runtime.console import RunConsole
from beamline.runtime.engines import Engines, build, check_model
from beamline.runtime.export import export
from beamline.runtime.resume import (
    alone_in,
    check_same,
    clear_unsaved,
    cut_metrics,
    environment,
    fingerprint,
    resume_from,
)
from beamline.runtime.timing import Timings, peak_memory


@dataclass(frozen=True, slots=True)
class Data:
    """The problems of a run."""

    train: ProblemSet
    evaluation: dict[str, ProblemSet]


def load_data(config: RunConfig, chat: BeamChat) -> Data:
    """Make or read every problem set, leave out prompts over the limit, and hold the sets against each other.

    Raises:
        DataError: a set cannot be used, or an evaluation problem is also trained on.
    """
    limit = config.rollout.max_prompt_tokens
    train = usable(load("train", config.data.train, config.seed, "train"), chat, limit)
    evaluation = {
        name: usable(load(name, source, config.seed, "eval"), chat, limit)
        for name, source in config.data.evaluation.items()
    }
    for problems in evaluation.values():
        check_disjoint(train, problems)
    return Data(train, evaluation)


def write_data_report(run: Path, data: Data) -> None:
    """``data.json``: the size of each problem set, and everything that was left out of it, with the reason."""
    record = {
        problems.name: {
            "problems": len(problems),
            "excluded": [{"where": e.where, "reason": e.reason} for e in problems.excluded],
        }
        for problems in (data.train, *data.evaluation.values())
    }
    write_atomic(run / "data.json", [json.dumps(record, indent=2).encode() + b"\n"])


@dataclass(slots=True)
class Run:
    """A run at work: what was built for it, and where it stands."""

    config: RunConfig
    engines: Engines
    chat: BeamChat
    data: Data
    store: CheckpointStore
    metrics: MetricsWriter
    console: RunConsole
    timings: Timings
    fresh: bool
    step: int = 0
    saved_step: int = -1
    skipped_updates: int = 0
    line: dict[str, float] = field(default_factory=dict)
    last_line_at: float = field(default_factory=time.perf_counter)

    def due(self, every: int, step: int | None = None) -> bool:
        """Whether something that happens every so many steps, and after the last, happens now."""
        now = self.step if step is None else step
        return every > 0 and (now % every == 0 or now == self.config.steps)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step's line of metrics; from here on the step is done. Shows it, and refreshes the report."""
        updates = step * self.config.updates_per_step - self.skipped_updates
        counts = {"policy/updates": updates, "policy/skipped_updates": self.skipped_updates} if step else {}
        now = time.perf_counter()
        spent = self.timings.take() | {"timing/step": now - self.last_line_at}
        self.last_line_at = now
        self.line = {"step": step, "weights_version": step} | dict(metrics) | counts | spent | _speeds(metrics, spent)
        self.line["memory/peak_bytes"] = peak_memory()
        self.metrics.append(self.line)
        self.step = step
        self.console.step_line(self.line)
        if self.due(self.config.report.every):
            with self.timings("report"):
                write_report(self.config.output, self.config.report.samples)

    def dump(self, step: int, groups: list[Group]) -> None:
        """Write what was sampled, when it is due."""
        every = self.config.report.rollouts_every
        if every and (step % every == 0 or step == self.config.steps):
            write_rollouts(rollouts_path(self.config.output, step), rows(groups, self.chat, step))

    def save(self) -> None:
        """Write a checkpoint of the step that is done."""
        state = {
            "skipped_updates": self.skipped_updates,
            "environment": environment(self.config),
            "train_problems": fingerprint(self.data.train),
            "config": self.config.model_dump(mode="json"),
        }
        with self.timings("checkpoint"):
            self.store.save(self.step, state, self.engines.learner.save)
        self.saved_step = self.step

    def export(self) -> None:
        """Write the newest checkpoint as a Hugging Face folder, if the recipe asks for it; refresh the report."""
        newest = self.store.latest()
        if self.config.checkpoint.export and newest is not None:
            export(self.config, newest, self.config.output / "export" / newest.name)
        page = write_report(self.config.output, self.config.report.samples)
        self.console.print(f"report: {page}")


@contextmanager
def open_run(config: RunConfig) -> Iterator[Run]:
    """Build or resume everything a run needs; while entered, its progress is shown.

    Raises:
        ModelError, DataError, CheckpointError, ResumeError: the run cannot begin or go on.
    """
    store = CheckpointStore(config.checkpoint_dir, config.checkpoint.keep)
    checkpoint = resume_from(config, store)
    check_model(config)
    engines, chat = build(config)
    data = load_data(config, chat)
    opened = None if checkpoint is None else open_checkpoint(checkpoint)
    if opened is not None:
        check_same(config, data.train, opened.run_state)
        engines.learner.load(opened.reader)
    with alone_in(config.output):
        if opened is None:
            clear_unsaved(config.output)
        else:
            cut_metrics(config.output / "metrics.jsonl", opened)
        write_atomic(config.output / "config.yaml", [to_yaml(config).encode()])
        write_data_report(config.output, data)
        step = 0 if opened is None else opened.step
        with RunConsole(config.steps, step) as console:
            console.print(f"run {config.name} in {config.output}" + (f", resumed at step {step}" if opened else ""))
            if step >= config.steps:
                console.print(f"nothing is left to do: {step} of {config.steps} steps are done")
            for problems in (data.train, *data.evaluation.values()):
                console.print(f"data {problems.name}: {len(problems)} problems, {len(problems.excluded)} left out")
            run = Run(
                config=config,
                engines=engines,
                chat=chat,
                data=data,
                store=store,
                metrics=MetricsWriter(config.output / "metrics.jsonl"),
                console=console,
                timings=Timings(),
                fresh=opened is None,
                step=step,
                saved_step=-1 if opened is None else step,
                skipped_updates=0 if opened is None else int(opened.run_state["skipped_updates"]),
            )
            yield run


def _speeds(metrics: Mapping[str, float], spent: Mapping[str, float]) -> dict[str, float]:
    """Response tokens a second of sampling, and of everything that the learner does."""
    if "train/tokens" not in metrics:
        return {}
    learning = spent["timing/old_logprobs"] + spent["timing/update"]
    return {
        "timing/sampling_tokens_per_s": metrics["train/tokens"] / spent["timing/sampling"],
        "timing/training_tokens_per_s": metrics["train/tokens"] / learning,
    }
