"""A run that is killed, stopped or out of disk goes on to the bytes of one that was not; nothing is ever lost."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from beamline.algorithms.loss import LossConfig
from beamline.checkpoint import CheckpointStore, files, verify
from beamline.config.algorithm import AlgorithmConfig
from beamline.config.policy import PolicyConfig
from beamline.config.schema import LearnerConfig
from beamline.learner.torch import TorchLearner
from beamline.report import metrics, read_metrics, read_rollouts, reproducible
from beamline.report.rollouts import find_rollouts
from beamline.runtime.resume import alone_in, clear_unsaved
from beamline.transfer.local import LocalChannel
from tests.faults import disk_full, failing_operation
from tests.samples import make_experience
from tests.system.conftest import Cli
from tests.system.runs import PER_STEP, PROBLEMS, SAMPLES, STEPS, TINY, Process, last_step, newest, results, tensors
from tests.tiny_beam import random_beam

MEMORY = Path("/dev/shm")
PROC = Path("/proc/self/status")


def test_a_run_killed_at_random_moments_ends_with_the_bytes_of_an_uninterrupted_one(
    reference: Path, tmp_path: Path
) -> None:
    run, rng = tmp_path / "run", random.Random(20)
    arguments = ("train", TINY, f"output={run}", "checkpoint.every=1", "checkpoint.resume=latest")
    moments = [
        (lambda: last_step(run) >= 0, rng.random()),  # nothing was saved yet
        (lambda: (run / "checkpoints" / ".global_step_2.staging").exists() or last_step(run) > 2, 0.0),
        (lambda: last_step(run) >= 3, rng.random()),
    ]
    for happened, steps_later in moments:
        process = Process(tmp_path / "log", *arguments)
        process.until(happened)
        then = time.monotonic() + steps_later * read_metrics(run / "metrics.jsonl")[-1]["timing/step"]
        process.until(lambda then=then: time.monotonic() >= then)
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
        assert last_step(run) < STEPS
    last = Process(tmp_path / "log", *arguments)
    assert last.end() == 0, last.output
    assert results(run) == results(reference)


def test_every_epoch_is_a_new_order_of_all_problems(reference: Path) -> None:
    order = [row["problem"] for dump in find_rollouts(reference) for row in read_rollouts(dump)[::SAMPLES]]
    assert len(order) == STEPS * PER_STEP
    first, second, third = order[:PROBLEMS], order[PROBLEMS : 2 * PROBLEMS], order[2 * PROBLEMS :]
    assert len(set(first)) == PROBLEMS
    assert sorted(first) == sorted(second)
    assert set(third) < set(first)
    assert first != second
    assert len(set(third)) == len(third)


def test_a_signal_finishes_the_step_and_saves_and_the_run_goes_on(reference: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    arguments = ("train", TINY, f"output={run}", "checkpoint.every=0", "checkpoint.resume=latest")
    for number in (signal.SIGINT, signal.SIGTERM):
        before = max(last_step(run), 0)
        process = Process(tmp_path / "log", *arguments)
        process.until(lambda before=before: last_step(run) > before)
        assert process.end(number) == 128 + number
        assert f"stopped by {number.name}; saved, go on with checkpoint.resume=latest" in process.output
        assert "Traceback" not in process.output
        assert before < last_step(run) < STEPS
        assert verify(newest(run)).step == last_step(run)
    ended = cli(*arguments)
    assert ended.code == 0, ended.err
    assert results(run) == results(reference)


@pytest.mark.skipif(not PROC.exists(), reason="only Linux tells which signals a process handles")
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    long_step = ("algorithm.samples_per_prompt=400", "evaluation.every=0", "evaluation.before_training=false")
    process = Process(tmp_path / "log", "train", TINY, f"output={tmp_path / 'run'}", *long_step)
    process.until(lambda: last_step(tmp_path / "run") == 0)
    before = cpu_seconds(process.pid)
    process.until(lambda: cpu_seconds(process.pid) > before + 0.2)  # in the middle of step 1
    os.kill(process.pid, signal.SIGINT)
    process.until(lambda: not handles(process.pid, signal.SIGTERM))  # both handlers go with the first signal
    assert process.end(signal.SIGINT) == 130
    assert "Traceback" not in process.output
    assert last_step(tmp_path / "run") == 0
    assert not (tmp_path / "run" / "checkpoints").exists()


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


def cpu_seconds(pid: int) -> float:
    """What a process has spent so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tiny_learner(seed: int) -> TorchLearner:
    small = {"num_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]}
    return TorchLearner(random_beam(seed, **small, **layers), PolicyConfig(), LearnerConfig(), LocalChannel())


def test_a_full_disk_at_any_operation_of_a_save_keeps_the_checkpoint_before() -> None:
    learner, other = tiny_learner(0), tiny_learner(1)
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        before, directory = Path(folder, "before"), Path(folder, "checkpoints")

        def save(directory: Path, step: int) -> dict[str, str]:
            return tensors(CheckpointStore(directory, keep=2).save(step, {}, learner.save))

        with failing_operation():
            old = save(before, step=1)
        loss = LossConfig(AlgorithmConfig(), response_limit=8, seed=0, on_policy=True)
        learner.step(learner.prepare([make_experience(rows=6, response=3)], loss))
        shutil.copytree(before, directory)
        with failing_operation() as disk:
            new = save(directory, step=2)
        assert all(old[name] != new[name] for name in new)
        usable: set[str] = set()
        for n in range(1, disk.performed + 1):
            shutil.rmtree(directory)
            shutil.copytree(before, directory)
            with pytest.raises(OSError, match="No space left"), failing_operation(n, disk_full()):
                save(directory, step=2)
            last = CheckpointStore(directory, keep=2).latest()
            assert last is not None, disk.trace[n - 1]
            assert tensors(last) == (old if last.name == "global_step_1" else new), disk.trace[n - 1]
            if last.name not in usable:
                other.load(verify(last).reader)
                usable.add(last.name)
            with failing_operation():
                assert save(directory, step=2) == new
            assert tensors(directory / "global_step_1") == old
        assert usable == {"global_step_1", "global_step_2"}


class SmallDisk:
    """Stands in for the module ``os`` of the file operations: there is room for so many bytes more."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, block: memoryview) -> int:
        if len(block) > self._room:
            raise disk_full()
        self._room -= len(block)
        return os.write(descriptor, block)

    def fsync(self, descriptor: int) -> None:
        if not self._room:
            raise disk_full()
        os.fsync(descriptor)


def test_a_run_whose_disk_fills_up_says_so_and_goes_on_when_there_is_room(
    reference: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, size = tmp_path / "run", sum(file.stat().st_size for file in newest(reference).rglob("*.*"))
    arguments = ("train", TINY, f"output={run}", "checkpoint.resume=latest")
    with monkeypatch.context() as patched:
        patched.setattr(files, "os", SmallDisk(room=int(1.5 * size)))
        ended = cli(*arguments)
    assert ended.code == 1
    assert f"cannot write {run / 'checkpoints'}" in ended.err
    assert "No space left on device; free space there" in ended.err
    assert newest(run).name == "global_step_2"
    ended = cli(*arguments)
    assert ended.code == 0, ended.err
    assert results(run) == results(reference)


def test_metrics_that_cannot_be_written_end_the_run_with_their_path(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "os", SmallDisk(room=0))
    ended = cli("train", TINY, f"output={tmp_path}", "evaluation.before_training=false")
    assert ended.code == 1
    assert f"cannot write {tmp_path / 'metrics.jsonl'}: No space left on device" in ended.err


def test_other_threads_are_refused_unless_allowed(finished: Path, cli: Cli) -> None:
    arguments = ("train", TINY, f"output={finished}", "checkpoint.resume=latest", "runtime.threads=2")
    refused = cli(*arguments)
    assert refused.code == 1
    assert "threads: 1 -> 2" in refused.err
    assert "checkpoint.allow_other_machine=true accepts that" in refused.err
    allowed = cli(*arguments, "checkpoint.allow_other_machine=true")
    assert allowed.code == 0, allowed.err
    assert f"resumed at step {STEPS}" in allowed.out


def test_other_settings_are_refused_unless_allowed(finished: Path, cli: Cli) -> None:
    arguments = ("train", TINY, f"output={finished}", "checkpoint.resume=latest", "learner.optimizer.lr=1e-3")
    refused = cli(*arguments)
    assert refused.code == 1
    assert "learner.optimizer.lr: 0.0002 -> 0.001" in refused.err
    allowed = cli(*arguments, "checkpoint.allow_other_config=true")
    assert allowed.code == 0, allowed.err
    assert f"resumed at step {STEPS}" in allowed.out


def test_a_run_that_begins_anew_removes_only_what_a_run_wrote(finished: Path) -> None:
    (finished / "rollouts" / "notes.txt").write_text("mine")
    clear_unsaved(finished)
    assert not (finished / "metrics.jsonl").exists()
    assert [path.name for path in (finished / "rollouts").iterdir()] == ["notes.txt"]


def test_a_dry_run_refuses_what_the_run_would_refuse(finished: Path, cli: Cli) -> None:
    arguments = ("train", TINY, f"output={finished}", "checkpoint.resume=latest", "--dry-run")
    assert f"begins      from {newest(finished)}" in cli(*arguments).out
    ended = cli(*arguments, "learner.optimizer.lr=1e-3")
    assert ended.code == 1
    assert "learner.optimizer.lr: 0.0002 -> 0.001" in ended.err


def test_a_run_is_not_begun_in_the_folder_of_another(finished: Path, cli: Cli) -> None:
    before = results(finished)
    ended = cli("train", TINY, f"output={finished}")
    assert ended.code == 1
    assert str(finished / "metrics.jsonl") in ended.err
    assert "checkpoint.resume=latest" in ended.err
    assert results(finished) == before


def test_a_checkpoint_of_another_run_is_branched_off_with_its_metrics(
    reference: Path, tmp_path: Path, cli: Cli
) -> None:
    saved = reference / "checkpoints" / "global_step_4"
    ended = cli("train", TINY, f"output={tmp_path / 'branch'}", f"checkpoint.resume={saved}")
    assert ended.code == 0, ended.err
    assert "resumed at step 4" in ended.out
    branch, whole = results(tmp_path / "branch"), results(reference)
    assert branch == {name: whole[name] for name in branch}
    earlier = ("rollouts", "export/evals")  # stay with the run that they are of
    assert [name for name in whole if name not in branch and not name.startswith(earlier)] == []


@pytest.mark.parametrize(("name", "reason"), [("nowhere", "there is no such folder"), ("", "is not a checkpoint")])
def test_a_path_that_is_no_checkpoint_is_refused(name: str, reason: str, tmp_path: Path, cli: Cli) -> None:
    ended = cli("train", TINY, f"output={tmp_path / 'run'}", f"checkpoint.resume={tmp_path / name}")
    assert ended.code == 1
    assert str(tmp_path / name) in ended.err
    assert reason in ended.err


def test_going_back_within_a_run_is_refused_while_later_checkpoints_are_there(finished: Path, cli: Cli) -> None:
    before = results(finished)
    earlier = finished / "checkpoints" / "global_step_4"
    ended = cli("train", TINY, f"output={finished}", f"checkpoint.resume={earlier}")
    assert ended.code == 1
    assert "branch off in another folder" in ended.err
    assert results(finished) == before


def test_going_back_after_the_later_checkpoints_were_removed_gives_the_same_bytes_again(
    reference: Path, finished: Path, cli: Cli
) -> None:
    shutil.rmtree(finished / "checkpoints" / "global_step_6")
    ended = cli("train", TINY, f"output={finished}", "checkpoint.resume=latest")
    assert ended.code == 0, ended.err
    assert results(finished) == results(reference)


def test_a_run_whose_checkpoints_lie_elsewhere_is_not_begun_anew(finished: Path, tmp_path: Path, cli: Cli) -> None:
    before = results(finished)
    other = tmp_path / "mistyped"
    ended = cli("train", TINY, f"output={finished}", "checkpoint.resume=latest", f"checkpoint.dir={other}")
    assert ended.code == 1
    assert f"checkpoint.dir={finished / 'checkpoints'}" in ended.err
    assert results(finished) == before


def test_a_checkpoint_of_another_run_is_refused_in_a_folder_that_holds_one(
    reference: Path, finished: Path, cli: Cli
) -> None:
    before = results(finished)
    foreign = reference / "checkpoints" / "global_step_4"
    ended = cli("train", TINY, f"output={finished}", f"checkpoint.resume={foreign}")
    assert ended.code == 1
    assert "branch off in another folder" in ended.err
    assert results(finished) == before


def test_a_run_whose_checkpoints_were_moved_away_is_not_begun_anew(finished: Path, cli: Cli) -> None:
    (finished / "checkpoints").rename(finished / "elsewhere")
    metrics = (finished / "metrics.jsonl").read_bytes()
    ended = cli("train", TINY, f"output={finished}", "checkpoint.resume=latest")
    assert ended.code == 1
    assert "has saved checkpoints in" in ended.err
    assert (finished / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("state", ['{"updates": "x"}', '{"config": [1]}', "[1]"])
def test_a_damaged_run_state_is_an_error_that_names_it(finished: Path, cli: Cli, state: str) -> None:
    path, manifest = newest(finished) / "run_state.json", newest(finished) / "manifest.json"
    size = path.stat().st_size
    path.write_text(state.ljust(size))
    metrics = (finished / "metrics.jsonl").read_bytes()
    ended = cli("train", TINY, f"output={finished}", "checkpoint.resume=latest", f"steps={STEPS + 1}")
    assert ended.code == 1
    assert "run_state.json" in ended.err
    assert manifest.exists()
    assert (finished / "metrics.jsonl").read_bytes() == metrics


def test_two_processes_do_not_work_in_one_folder(finished: Path, cli: Cli) -> None:
    with alone_in(finished):
        ended = cli("train", TINY, f"output={finished}", "checkpoint.resume=latest")
    assert ended.code == 1
    assert f"another process is at work in {finished}" in ended.err


def test_other_problems_under_the_same_name_are_refused(tmp_path: Path, cli: Cli) -> None:
    problems = tmp_path / "sums.jsonl"
    rows = [json.dumps({"question": f"{n}+{n}", "answer": 2 * n}) for n in range(10, 20)]
    problems.write_text("\n".join(rows))
    arguments = ("train", TINY, f"output={tmp_path / 'run'}", "checkpoint.resume=latest", "data.train.source=file")
    assert cli(*arguments, f"data.train.path={problems}", "steps=1").code == 0
    problems.write_text("\n".join(rows[:-1]))
    ended = cli(*arguments, f"data.train.path={problems}", "steps=2")
    assert ended.code == 1
    assert "the problems of data set 'train'" in ended.err


def test_metrics_that_end_before_the_checkpoint_are_an_error(finished: Path, cli: Cli) -> None:
    path = finished / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    ended = cli("train", TINY, f"output={finished}", "checkpoint.resume=latest")
    assert ended.code == 1
    assert f"{path} has no line of step {STEPS}" in ended.err


def test_a_checkpoint_of_another_version_is_refused_with_the_key(finished: Path, cli: Cli) -> None:
    state = newest(finished) / "run_state.json"
    state.write_text(state.read_text().replace('"steps"', '"stepz"'))
    ended = cli("train", TINY, f"output={finished}", "checkpoint.resume=latest")
    assert ended.code == 1
    assert "another version of beamline" in ended.err
    assert "stepz" in ended.err


def test_a_run_that_is_extended_equals_one_that_was_long_from_the_start(
    reference: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    arguments = ("train", TINY, f"output={run}", "checkpoint.resume=latest")
    short = cli(*arguments, "steps=3")
    assert short.code == 0, short.err
    assert "resumed" not in short.out
    shutil.rmtree(run / "export" / "global_step_3")
    assert cli(*arguments).code == 0
    assert results(run) == results(reference)


def begun(folder: Path, seed: int, cli: Cli) -> Path:
    """The first two steps of a run."""
    ended = cli("train", TINY, f"output={folder}", f"seed={seed}", "steps=2", "evaluation.every=0")
    assert ended.code == 0, ended.err
    return folder


def test_the_same_seed_gives_the_same_bytes(reference: Path, tmp_path: Path, cli: Cli) -> None:
    runs = [begun(tmp_path, 0, cli), reference]
    first, second = (
        (
            tensors(run / "checkpoints" / "global_step_2"),
            [reproducible(line) for line in read_metrics(run / "metrics.jsonl")[:3]],
            [dump.read_bytes() for dump in find_rollouts(run)[:2]],
        )
        for run in runs
    )
    assert first == second


def test_another_seed_gives_other_problems_and_answers_the_same_evaluation_otherwise(
    reference: Path, tmp_path: Path, cli: Cli
) -> None:
    runs = [begun(tmp_path, 1, cli), reference]
    mine, theirs = (tensors(run / "checkpoints" / "global_step_2") for run in runs)
    assert all(mine[name] != theirs[name] for name in mine if name.endswith(".safetensors"))
    mine, theirs = ({row["question"] for dump in find_rollouts(run) for row in read_rollouts(dump)} for run in runs)
    assert not mine & theirs
    first, second = (evaluated(run) for run in runs)
    assert [row["question"] for row in first] == [row["question"] for row in second]
    assert [row["response"] for row in first] != [row["response"] for row in second]


def evaluated(run: Path) -> list[dict[str, Any]]:
    """What the model answered before training."""
    lines = (run / "export" / "evals" / "step_0" / "arithmetic.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
