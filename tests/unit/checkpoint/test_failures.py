"""Every file operation of a save fails in turn; the last checkpoint must survive, and the next save must work."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from beamline.checkpoint import CheckpointStore, ShardWriter, verify
from beamline.model.layout import TensorSlice
from tests.faults import Crash, disk_full, failing_operation

MEMORY = Path("/dev/shm")

HALVES = [
    TensorSlice("w", "bfloat16", (6, 2), (0, 0), (2, 2)),
    TensorSlice("w", "bfloat16", (6, 2), (2, 0), (6, 2)),
]
MOMENT = TensorSlice.whole("w/exp_avg", "float32", (6, 2))

# steps saved before, the step whose save fails, and how many checkpoints are kept
SCENARIOS = {
    "first save": ([], 1, 2),
    "second save": ([1], 2, 2),
    "save that removes an older one": ([1, 2], 3, 2),
    "save that removes the only other": ([1], 2, 1),
    "the only step again": ([1], 1, 1),
    "an older step again": ([1, 2], 1, 2),
}


def save(directory: Path, step: int, content: int, keep: int = 2) -> None:
    """``content`` tells two saves of one step apart."""

    def write(writer: ShardWriter) -> None:
        weights = np.full((6, 2), content, np.uint16)
        writer.write("policy", HALVES, (weights[:2], weights[2:]))
        writer.write("optimizer", [MOMENT], [np.full((6, 2), content, np.float32)])
        writer.write_state("learner", {"updates": content})

    CheckpointStore(directory, keep).save(step, {"content": content}, write)


def newest(directory: Path) -> tuple[int, int] | None:
    """Step and content of the newest checkpoint, after checking all of its bytes."""
    path = CheckpointStore(directory, keep=2).latest()
    if path is None:
        return None
    checkpoint = verify(path)
    content = checkpoint.run_state["content"]
    whole = TensorSlice.whole("w", "bfloat16", (6, 2))
    assert (checkpoint.reader.read("policy", whole) == content).all()
    assert (checkpoint.reader.read("optimizer", MOMENT).view(np.float32) == content).all()
    assert checkpoint.reader.read_state("learner") == {"updates": content}
    return checkpoint.step, content


def check_pointer(directory: Path, known: list[tuple[int, int] | None]) -> None:
    """``latest`` names the checkpoint before or the new one, and what it names is whole unless it is being replaced."""
    pointer = directory / "latest"
    steps = [step for step, _ in filter(None, known)]
    if not pointer.exists():
        assert None in known
        return
    step = int(pointer.read_text())
    assert step in steps
    replaced = directory / f".global_step_{step}.replaced"
    verify(replaced if replaced.exists() else directory / f"global_step_{step}")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that is possible: thousands of files come and go, and syncs are simulated."""
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int, int]:
    """A directory with earlier checkpoints, the step to save now, and how many to keep."""
    earlier, step, keep = SCENARIOS[request.param]
    (tmp_path / "before").mkdir()
    with failing_operation():
        for content, saved in enumerate(earlier, start=10):
            save(tmp_path / "before", saved, content, keep)
    return tmp_path / "before", step, keep


@pytest.mark.parametrize("kind", ["full disk", "crash"])
def test_a_failure_at_any_operation_loses_nothing(scenario: tuple[Path, int, int], kind: str, tmp_path: Path) -> None:
    before, step, keep = scenario
    directory = tmp_path / "checkpoints"
    known = [newest(before), (step, 99)]
    shutil.copytree(before, directory)
    with failing_operation() as disk:
        save(directory, step, 99, keep)
    assert newest(directory) == (step, 99)
    outcomes = []
    for n in range(1, disk.performed + 1):
        shutil.rmtree(directory)
        shutil.copytree(before, directory)
        error = disk_full() if kind == "full disk" else Crash()
        with pytest.raises(type(error)), failing_operation(n, error):
            save(directory, step, 99, keep)
        outcomes.append(newest(directory))
        assert outcomes[-1] in known, f"operation {n}: {disk.trace[n - 1]}"
        check_pointer(directory, known)
        with failing_operation():
            save(directory, step + 1, 100, keep)
        assert newest(directory) == (step + 1, 100)
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
    assert outcomes[0] == known[0]
    assert outcomes == sorted(outcomes, key=known.index), "a failure after the new one is committed brings it back"


def test_a_crash_in_the_save_after_a_crash_loses_nothing(tmp_path: Path) -> None:
    before, once, twice = tmp_path / "before", tmp_path / "once", tmp_path / "twice"
    with failing_operation():
        save(before, 1, 10)
    shutil.copytree(before, once)
    with failing_operation() as disk:
        save(once, 1, 99)
    renamed = [n for n, item in enumerate(disk.trace, start=1) if item == ("replace", once / "global_step_1")]
    shutil.rmtree(once)
    shutil.copytree(before, once)
    with pytest.raises(Crash), failing_operation(renamed[0], Crash()):
        save(once, 1, 99)
    assert newest(once) == (1, 10)
    assert not (once / "global_step_1").exists()
    for n in range(1, disk.performed + 1):
        shutil.copytree(once, twice)
        with pytest.raises(Crash), failing_operation(n, Crash()):
            save(twice, 1, 99)
        assert newest(twice) in [(1, 10), (1, 99)]
        shutil.rmtree(twice)


def test_a_failed_save_gives_its_space_back(tmp_path: Path) -> None:
    with failing_operation() as disk:
        save(tmp_path / "whole", 1, 10)
    writes = [n for n, (name, _) in enumerate(disk.trace, start=1) if name == "write"]
    with pytest.raises(OSError, match="free space"), failing_operation(writes[-2], disk_full()):
        save(tmp_path / "failed", 1, 10)
    assert list((tmp_path / "failed").iterdir()) == []


def test_every_new_name_is_synced_before_another_name_changes(tmp_path: Path) -> None:
    with failing_operation() as disk:
        for step in (1, 2, 3, 3):
            save(tmp_path, step, step)
    for at, (name, path) in enumerate(disk.trace):
        if name in ("replace", "mkdir"):
            assert disk.trace[at + 1 : at + 3] == [("open", path.parent), ("fsync", path.parent)]


@contextmanager
def audited() -> Iterator[list[tuple[str, str]]]:
    """Changes of the file system as the interpreter itself reports them."""
    seen: list[tuple[str, str]] = []
    kinds = {"os.rename": "replace", "os.mkdir": "mkdir", "os.remove": "unlink", "os.rmdir": "rmdir", "open": "open"}
    active = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if active[0] and event in kinds and not reads:
            seen.append((kinds[event], str(args[1] if event == "os.rename" else args[0])))

    sys.addaudithook(hook)  # cannot be removed, only silenced
    try:
        yield seen
    finally:
        active[0] = False


def test_no_change_of_the_disk_goes_past_the_injector(tmp_path: Path) -> None:
    with failing_operation() as disk, audited() as seen:
        for step in (1, 2, 3, 3):
            save(tmp_path, step, step)
    opened = [item for item in disk.trace if item[0] == "open" and item[1].suffix == ".tmp"]
    named = [item for item in disk.trace if item in opened or item[0] in ("replace", "mkdir", "unlink", "rmdir")]
    assert seen == [(name, str(path)) for name, path in named]
