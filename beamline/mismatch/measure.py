"""``beamline mismatch``: measure, show, and write down."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from beamline.checkpoint.files import make_empty_folder
from beamline.config import ConfigError, Problem
from beamline.mismatch.causes import causes, size
from beamline.mismatch.evaluator import Evaluator
from beamline.mismatch.frozen import freeze
from beamline.mismatch.routing import routing
from beamline.mismatch.setup import learner_setup
from beamline.mismatch.tables import show
from beamline.report import write_report
from beamline.report.mismatch import Mismatch, as_json, write_mismatch
from beamline.report.page import write_mismatch_page
from beamline.runtime.console import RunConsole
from beamline.runtime.subject import Subject, find_subject


def measure(subject: Subject, settings: Sequence[str], sequences: int, console: RunConsole) -> Mismatch:
    """Draw a batch with a subject's sampler and explain what its learner makes of it.

    Raises:
        ConfigError: the subject samples by vLLM, which cannot be taken apart cause by cause.
        ModelError, DataError, CheckpointError, SamplingStalledError: it cannot be measured.
    """
    if subject.config.rollout.engine != "local":
        reason = "the mismatch of the local sampler is what can be explained; --set rollout=local puts it in its place"
        raise ConfigError([Problem(reason, "rollout.engine", subject.config.rollout.engine)])
    weights = subject.weights()
    batch = freeze(subject, weights, sequences, console)
    other = subject.other_weights(weights)
    evaluate = Evaluator(subject, {"these": weights} | ({"other": other[1]} if other else {}), batch, console)
    found, end = causes(subject.config, evaluate, other[0] if other else None)
    return Mismatch(
        model=subject.name,
        step=subject.step,
        settings=tuple(settings),
        seed=subject.config.seed,
        r3=subject.config.policy.r3,
        sequences=len(batch.rollouts),
        tokens=len(evaluate.recorded),
        observed=size(evaluate(learner_setup(subject.config)) - evaluate.recorded),
        causes=tuple(found),
        residual=size(evaluate(end) - evaluate.recorded).mean,
        routing=routing(subject.config, evaluate),
    )


def explain_mismatch(name: str, settings: Sequence[str], sequences: int, as_text: bool, out: Path | None) -> None:
    """Measure a run, a checkpoint or a model, and show what was found, or print it as JSON and nothing else.

    A run gets ``mismatch.json`` and a new ``report.html``; ``out`` gets ``mismatch.json`` and ``mismatch.html``.

    Raises:
        ModelError, DataError, ConfigError, CheckpointError, SamplingStalledError: it cannot be measured.
        FileExistsError: there is something in ``out``.
    """
    if out is not None:
        make_empty_folder(out)
    with redirect_stdout(sys.stderr) if as_text else nullcontext():
        subject = find_subject(name, settings)
        with RunConsole(subject.config.steps, subject.config.steps) as console:
            found = measure(subject, settings, sequences, console)
            if not as_text:
                show(console, found)
            for path in _write(subject, found, out):
                console.print(f"written: {path}")
    if as_text:
        json.dump(as_json(found), sys.stdout, indent=2)
        sys.stdout.write("\n")


def _write(subject: Subject, found: Mismatch, out: Path | None) -> list[Path]:
    written = []
    if subject.run is not None:
        written += [write_mismatch(subject.run, found), write_report(subject.run, subject.config.report.samples)]
    if out is not None:
        written += [write_mismatch(out, found), write_mismatch_page(out, found)]
    return written
