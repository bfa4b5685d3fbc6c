"""Opening a run: what it trains on, where it stands, what it writes to."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from beamline.chat import BeamChat
from beamline.checkpoint import Checkpoint, CheckpointStore, open_checkpoint, verify, write_atomic
from beamline.config import to_yaml
from beamline.config.schema import RunConfig
from beamline.records import Group
from beamline.report import MetricsWriter, rollouts_path, write_report, write_rollouts
from beamline.rollout.rows import rows
from beamline.runtime.console import RunConsole
from beamline.runtime.data import Data, load_data, write_data_report
from beamline.runtime.engines import Engines, base_fingerprint, build, load_chat, load_models
from beamline.runtime.export import export
from beamline.runtime.resume import (
    ResumeError,
    alone_in,
    check_same,
    clear_unsaved,
    environment,
    go_back,
    resume_from,
    run_state,
)
from beamline.runtime.timing import Timings, peak_memory
from beamline.tasks.grading import open_pool
from beamline.tasks.pool import GradingPool


@dataclass(slots=True)
class Run:
    """A run at work: what was built for it, and where it stands."""

    config: RunConfig
    engines: Engines
    chat: BeamChat
    pool: GradingPool
    data: Data
    store: CheckpointStore
    metrics: MetricsWriter
    console: RunConsole
    timings: Timings
    fresh: bool
    base: str
    step: int = 0
    saved_step: int = -1
    updates: int = 0
    skipped_updates: int = 0
    problems_drawn: int = 0
    guarded: bool = False
    line: dict[str, float] = field(default_factory=dict)
    last_line_at: float = field(default_factory=time.perf_counter)

    def due(self, every: int, step: int | None = None) -> bool:
        """Whether something that happens every so many steps, and after the last, happens now."""
        now = self.step if step is None else step
        return every > 0 and (now % every == 0 or now == self.config.steps)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step's line of metrics; from here on the step is done. Shows it, and refreshes the report."""
        counts = {"policy/updates": self.updates, "policy/skipped_updates": self.skipped_updates}
        now = time.perf_counter()
        spent = self.timings.take() | {"timing/step": now - self.last_line_at}
        self.last_line_at = now
        self.line = {"step": step, "weights_version": step} | dict(metrics) | counts | spent | _speeds(metrics, spent)
        self.line["memory/peak_bytes"] = peak_memory()
        self.metrics.append(self.line)
        self.step = step
        self.console.step_line(self.line)
        if self.due(self.config.report.every) and step < self.config.steps:  # the last one comes with the end
            with self.timings("report"):
                write_report(self.config.output, self.config.report.samples)

    def report(self) -> None:
        """Write the report, and say where it is."""
        self.console.print(f"report: {write_report(self.config.output, self.config.report.samples)}")

    def dump(self, step: int, groups: list[Group]) -> None:
        """Write what was sampled, when it is due."""
        if self.due(self.config.report.rollouts_every, step):
            with self.timings("report"):
                write_rollouts(rollouts_path(self.config.output, step), rows(groups, self.chat, step))

    def save(self) -> None:
        """Write a checkpoint of the step that is done."""
        state = {
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "problems_drawn": self.problems_drawn,
            "environment": environment(self.config),
            "problems": self.data.fingerprints(),
            "base": self.base,
            "config": self.config.model_dump(mode="json"),
        }
        with self.timings("checkpoint"):
            self.store.save(self.step, state, self.engines.learner.save)
        self.saved_step = self.step

    def export(self) -> None:
        """Write the newest checkpoint as a Hugging Face folder, if the recipe asks for it."""
        newest = self.store.latest()
        if self.config.checkpoint.export and newest is not None:
            export(self.config, newest, self.config.output / "export" / newest.name)


def open_from(config: RunConfig, data: Data, base: str, path: Path) -> Checkpoint:
    """Open the checkpoint to go on from, and make sure that the run can with its data and its base's fingerprint.

    Raises:
        CheckpointError: it is damaged.
        ResumeError: something differs that shapes the result.
    """
    checkpoint = verify(path) if config.checkpoint.verify else open_checkpoint(path)
    check_same(config, data.fingerprints(), base, run_state(checkpoint))
    return checkpoint


@contextmanager
def open_run(config: RunConfig) -> Iterator[Run]:
    """Build or resume everything a run needs; while entered, its progress is shown.

    Raises:
        ModelError, DataError, CheckpointError, ResumeError, EngineFailedError: the run cannot begin or go on.
    """
    store = CheckpointStore(config.checkpoint_dir, config.checkpoint.keep)
    checkpoint = resume_from(config, store)
    chat = load_chat(config)
    data = load_data(config, chat)
    base = base_fingerprint(config)
    opened = None if checkpoint is None else open_from(config, data, base, checkpoint)
    models = load_models(config, begins=opened is None)
    with alone_in(config.output), alone_in(config.checkpoint.dir) if config.checkpoint.dir else nullcontext():
        if resume_from(config, store) != checkpoint:
            raise ResumeError(f"another process has worked in {config.output} in the meantime; start again")
        step = 0 if opened is None else opened.step
        state = None if opened is None else run_state(opened)
        with (
            closing(build(config, models)) as engines,
            open_pool(config.reward) as pool,
            RunConsole(config.steps, step) as console,
        ):
            if opened is None:
                clear_unsaved(config.output)
            else:
                engines.learner.load(opened.reader)
                go_back(config.output, opened)
            write_atomic(config.output / "config.yaml", [to_yaml(config).encode()])
            write_data_report(config.output, data.sets, data.overlap)
            _announce(console, config, data, None if opened is None else step)
            run = Run(
                config=config,
                engines=engines,
                chat=chat,
                pool=pool,
                data=data,
                store=store,
                metrics=MetricsWriter(config.output / "metrics.jsonl"),
                console=console,
                timings=Timings(),
                fresh=opened is None,
                base=base,
                step=step,
                saved_step=-1 if opened is None else step,
                updates=0 if state is None else state.updates,
                skipped_updates=0 if state is None else state.skipped_updates,
                problems_drawn=0 if state is None else state.problems_drawn,
            )
            yield run


def _announce(console: RunConsole, config: RunConfig, data: Data, resumed_at: int | None) -> None:
    resumed = "" if resumed_at is None else f", resumed at step {resumed_at}"
    console.print(f"run {config.name} in {config.output}{resumed}")
    for kind, problems in (("training", data.train), *(("evaluation", each) for each in data.evaluation.values())):
        console.print(f"{kind} data {problems.name}: {len(problems)} problems, {len(problems.excluded)} left out")
    for name, count in data.overlap.items():
        if count:
            console.print(f"evaluation data {name}: {count} problems are also trained on (data.allow_overlap)")
    if resumed_at is not None and resumed_at >= config.steps:
        console.print(f"nothing is left to do: {resumed_at} of {config.steps} steps are done")


def _speeds(metrics: Mapping[str, float], spent: Mapping[str, float]) -> dict[str, float]:
    """Response tokens a second of sampling, and of everything that the learner does where it made an update."""
    if "train/tokens" not in metrics:
        return {}
    sampled = metrics["train/tokens"] + metrics["train/tokens_unjudged"]
    speeds = {"timing/sampling_tokens_per_s": sampled / spent["timing/sampling"]}
    if "policy/grad_norm" in metrics:
        learning = spent["timing/old_logprobs"] + spent["timing/update"]
        speeds["timing/training_tokens_per_s"] = metrics["policy/counted_tokens"] / learning
    return speeds
