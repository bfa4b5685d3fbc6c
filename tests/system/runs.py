"""The command line in processes of its own, and what runs leave behind, to be compared."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beamline
from beamline.checkpoint import CheckpointStore
from beamline.report import read_metrics, reproducible
from beamline.report.rollouts import find_rollouts

ROOT = Path(beamline.__file__).parents[1]
TINY = Path(__file__).with_name("tiny.yaml")
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
STEPS, PROBLEMS, PER_STEP, SAMPLES = 6, 10, 4, 4
"""What ``tiny.yaml`` says: steps, training problems, problems of a step, samples of a problem."""

LORA = ("policy.lora.rank=8", "policy.lora.alpha=16", "policy.r3=true")
FAST = ("learner.optimizer.lr=2e-2", "learner.optimizer.warmup_updates=0")  # so that answers change
ADAPTED = ("steps=3", "checkpoint.every=1", *FAST, *LORA)

_DEADLINE = 120.0  # seconds; only a test that fails comes near it


class Process:
    """A command at work; its output goes to a file."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "beamline", *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self.log.read_text()

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that the command does; the command must not end before."""
        deadline = time.monotonic() + _DEADLINE
        while not happened():
            assert self._process.poll() is None, f"ended with {self._process.returncode}: {self.output}"
            assert time.monotonic() < deadline, self.output
            time.sleep(0.002)

    def end(self, signal: int | None = None) -> int:
        """Send a signal, if there is one, wait for the end, and return the exit code."""
        if signal is not None:
            self._process.send_signal(signal)
        return self._process.wait(_DEADLINE)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines of Python in a process of their own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=_DEADLINE, check=False
    )


def last_step(run: Path) -> int:
    """The last step in a run's metrics, -1 before there is any."""
    metrics = run / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    return int(lines[-1]["step"]) if lines else -1


def newest(run: Path) -> Path:
    """The newest checkpoint of a run."""
    path = CheckpointStore(run / "checkpoints", keep=0).latest()
    assert path is not None, f"{run} has no checkpoint"
    return path


def tensors(checkpoint: Path) -> dict[str, str]:
    """Hashes of everything that the learner saved."""
    return _hashes(checkpoint, [*checkpoint.glob("*/*.safetensors"), checkpoint / "learner.json"])


def results(run: Path) -> dict[str, Any]:
    """All that a run leaves and that its seed decides: newest checkpoint, rollouts, export, evaluations, metrics."""
    checkpoint = newest(run)
    exported = [path for path in (run / "export").rglob("*") if path.is_file()]
    lines = read_metrics(run / "metrics.jsonl")
    return (
        {f"{checkpoint.name}/{name}": digest for name, digest in tensors(checkpoint).items()}
        | _hashes(run, find_rollouts(run) + exported)
        | {f"metrics of step {line['step']}": reproducible(line) for line in lines}
    )


def _hashes(folder: Path, files: list[Path]) -> dict[str, str]:
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
