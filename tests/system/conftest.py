import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from beamline.cli import main
from tests.system.runs import ADAPTED, TINY, Process


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """The command line in this process, which spares the seconds that torch takes to import.

    What ``main`` does not turn into a message is raised: it would be a traceback on the user's terminal.
    """
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, str(threads))  # so that what the command sets is undone

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["beamline", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return Ended(int(end.value.code or 0), *capsys.readouterr())

    yield run
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def run_once(tmp_path_factory: pytest.TempPathFactory, name: str, *settings: str) -> Path:
    """The folder of an uninterrupted run of ``tiny.yaml``, the same for all workers; not to be changed."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    run = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run / "report.html").exists():  # the last thing that a run writes
            process = Process(shared / f"{name}.log", "train", TINY, f"output={run}", *settings)
            assert process.end() == 0, process.output
    return run


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trains every weight."""
    return run_once(tmp_path_factory, "reference")


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of training adapters on all linear layers of the starter, with replayed routes."""
    return run_once(tmp_path_factory, "adapted", *ADAPTED)


@pytest.fixture
def finished(reference: Path, tmp_path: Path) -> Path:
    """A copy of the reference run that a test may change."""
    return Path(shutil.copytree(reference, tmp_path / "finished"))
