"""The command line over several processes, as torchrun starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from beamline.checkpoint import ShardReader
from beamline.transfer.group import free_port
from tests.cluster.ranks import variables
from tests.cluster.test_runs import SETTINGS, lines
from tests.cluster.test_updates import saved

ROOT = Path(__file__).parents[2]
LIMIT = 150.0  # seconds
COMMAND = ("-m", "tests.cluster.command")
MEGATRON = ("learner=megatron", "learner.micro_batch_tokens=512")


def train(output: Path, *settings: str) -> list[str]:
    return [*COMMAND, "train", "recipes/quickstart.yaml", *SETTINGS, *MEGATRON, f"output={output}", *settings]


Process = subprocess.Popen[str]


@contextmanager
def started(size: int, arguments: list[str], environment: Mapping[str, str] | None = None) -> Iterator[list[Process]]:
    """So many processes; what is left of them is killed at the end."""
    port, shared = free_port(), {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **(environment or {})}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | shared | (variables(rank, size, port) if size > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(processes: list[Process]) -> list[tuple[int, str]]:
    """The exit code and the output of each."""
    deadline, found = time.monotonic() + LIMIT, []
    for process in processes:
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        found.append((process.returncode, output))
    return found


def run(size: int, arguments: list[str], environment: Mapping[str, str] | None = None) -> list[tuple[int, str]]:
    with started(size, arguments, environment) as processes:
        return ended(processes)


def ran(size: int, arguments: list[str]) -> list[str]:
    """The output of each of the processes, which must have ended well."""
    found = run(size, arguments)
    assert [code for code, _ in found] == [0] * size, "\n".join(output for _, output in found)
    return [output for _, output in found]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run on two tensor ranks, of two steps, and what its processes wrote."""
    output = tmp_path_factory.mktemp("two") / "run"
    return output, ran(2, train(output, "learner.parallel.tp=2", "checkpoint.export=true"))


def test_a_run_on_two_ranks_learns_what_one_learns(two: tuple[Path, list[str]], tmp_path: Path) -> None:
    output, (first, second) = two
    ran(1, train(tmp_path / "one"))
    ours, theirs = lines(output), lines(tmp_path / "one")
    assert [line["step"] for line in ours] == [0, 1, 2]
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        for figure in ("train/reward_mean", "policy/loss", "policy/grad_norm", "policy/counted_tokens"):
            assert one[figure] == pytest.approx(other[figure], rel=1e-3, abs=1e-6), figure
        assert one["mismatch/logprob_abs_diff_mean"] < 1e-4
    assert "agree on a probe" in first
    assert "export" in os.listdir(output)
    assert "report: " in first
    for said in ("training data", "agree on a probe", "report: "):
        assert said not in second


def test_a_run_goes_on_on_another_mesh_with_the_same_weights(two: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Four ranks with experts apart and two stages, then two again: what was read is what was written, bit for bit."""
    output, _ = two
    newest = output / "checkpoints" / "global_step_1"
    on = tmp_path / "on"
    mesh = ("learner.parallel.tp=2", "learner.parallel.ep=2", "learner.parallel.pp=2")
    ran(4, train(on, *mesh, f"checkpoint.resume={newest}"))
    ours, theirs = lines(on), lines(output)
    assert [line["step"] for line in ours] == [0, 1, 2]
    assert ours[:2] == theirs[:2]
    assert ours[2]["policy/grad_norm"] == pytest.approx(theirs[2]["policy/grad_norm"], rel=1e-4)
    again = tmp_path / "again"
    ran(2, train(again, "learner.parallel.tp=2", f"checkpoint.resume={newest}"))
    one, other = saved(again / "checkpoints" / "global_step_2"), saved(output / "checkpoints" / "global_step_2")
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)
    moments = [ShardReader(run / "checkpoints" / "global_step_2").slices("optimizer") for run in (again, output)]
    assert moments[0] == moments[1]


def test_what_is_in_the_folder_can_be_previewed_evaluated_and_exported_by_one_process(
    two: tuple[Path, list[str]], tmp_path: Path
) -> None:
    output, _ = two
    ran(1, [*COMMAND, "export", str(output), str(tmp_path / "model")])
    assert (tmp_path / "model" / "config.json").exists()
    (said,) = ran(1, [*COMMAND, "eval", str(output), "--set", "evaluation.samples_per_problem=1"])
    assert "avg@1" in said
    first, second = ran(2, [*train(tmp_path / "new", "learner.parallel.tp=2"), "--dry-run"])
    assert "begins      at the first step" in first
    assert "begins" not in second


@pytest.mark.parametrize(
    ("size", "arguments", "said"),
    [
        (
            2,
            [*COMMAND, "export", "runs/none", "model"],
            "beamline export runs in one process, and torchrun has started 2",
        ),
        (2, [*train(Path("none")), "learner=torch"], "learner.engine=torch: it runs in one process, and torchrun has"),
        (1, train(Path("none"), "learner.parallel.tp=2"), "torchrun --nproc-per-node 2 -m beamline train"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(size: int, arguments: list[str], said: str) -> None:
    for code, output in run(size, arguments):
        assert code in (1, 2)
        assert said in output


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = variables(0, 2, taken.getsockname()[1])
        ((code, output),) = run(1, train(tmp_path / "run", "learner.parallel.tp=2"), place)
    assert code == 1
    assert f"LaunchError: rank 0 did not find the others of 2 at 127.0.0.1:{place['MASTER_PORT']}" in output
    assert "Traceback" not in output


# Ends


@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        ("1:update:2:die", "update: another rank of the learner has ended", None),
        ("0:update:2:die", None, "rank 1 of the learner: the first one has ended"),
        ("1:of_supply:3:fail", "RankFailedError: rank 1 of the learner: Traceback", "ZeroDivisionError: told to fail"),
        (
            "1:update:2:fail",
            "RankFailedError: update: another rank of the learner has ended",
            "it failed, and they wait",
        ),
        ("1:__init__:1:die", "rank 0 of the learner ends, because rank 1 has", None),
        ("0:apply:1:hang,1:apply:1:die", "rank 0 of the learner ends, because rank 1 has", None),
        ("0:apply:1:die,1:apply:1:hang", None, "rank 1 of the learner ends, because rank 0 has"),
    ],
)
def test_a_rank_that_dies_or_fails_ends_the_others_with_a_word(
    fault: str, first: str | None, second: str | None, tmp_path: Path
) -> None:
    began = time.monotonic()
    found = run(2, train(tmp_path / "run", "learner.parallel.tp=2"), {"FAULT": fault})
    assert time.monotonic() - began < LIMIT / 2
    for (code, output), said in zip(found, (first, second), strict=True):
        if said is None:
            assert code == -signal.SIGKILL
        else:
            assert said in output
    assert any(code not in (0, -signal.SIGKILL) for code, _ in found)


def test_a_run_under_torchrun_that_is_interrupted_finishes_its_step_and_saves(tmp_path: Path) -> None:
    """torchrun passes the signal on to all ranks."""
    output = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with started(1, [*launcher, *train(output, "learner.parallel.tp=2", "steps=50", "checkpoint.every=0")]) as (
        process,
    ):
        deadline = time.monotonic() + LIMIT
        while not (output / "metrics.jsonl").exists() or len(lines(output)) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        ((code, said),) = ended([process])
    steps = len(lines(output)) - 1
    assert code
    assert "stopping after this step" in said
    assert said.count("stopping after this step") == 1
    assert "stopped by SIGTERM; saved" in said
    assert "go on:  torchrun --nproc-per-node 2 -m beamline train " in said
    assert json.loads((output / "checkpoints" / f"global_step_{steps}" / "run_state.json").read_text())["updates"] > 0
