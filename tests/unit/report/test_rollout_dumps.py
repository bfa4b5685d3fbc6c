"""Rollout dumps: what goes in comes out, the same rows are the same bytes."""

import math
from pathlib import Path
from random import Random

import pytest

from beamline.report import read_rollouts, rollouts_path, write_rollouts
from beamline.report.rollouts import find_rollouts
from tests.fake_run import fake_row as row


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    rows = [row(0), row(1, "naïve 数 \u2028 line\nbreak \ud800 \x00"), row(2, "")]
    path = rollouts_path(tmp_path, 3)
    write_rollouts(path, iter(rows))
    assert read_rollouts(path) == rows


def test_no_row_is_an_empty_dump(tmp_path: Path) -> None:
    write_rollouts(rollouts_path(tmp_path, 3), [])
    assert read_rollouts(rollouts_path(tmp_path, 3)) == []


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for step in (1, 2):
        write_rollouts(rollouts_path(tmp_path, step), [row(n) for n in range(50)])
    assert rollouts_path(tmp_path, 1).read_bytes() == rollouts_path(tmp_path, 2).read_bytes()


def test_a_number_that_is_not_finite_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="problem 'p', sample 1"):
        write_rollouts(rollouts_path(tmp_path, 3), [row(0), row(1, reward=math.nan)])
    assert find_rollouts(tmp_path) == []


@pytest.mark.parametrize("kept", [20, -1])
def test_a_dump_that_was_cut_is_an_error(tmp_path: Path, kept: int) -> None:
    path = rollouts_path(tmp_path, 3)
    write_rollouts(path, [row(n) for n in range(50)])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="is damaged: it ends before its last row"):
        read_rollouts(path)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = rollouts_path(tmp_path, 3)
    write_rollouts(path, [row(0, Random(0).randbytes(4000).hex())])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        read_rollouts(path)


def test_dumps_are_listed_by_step(tmp_path: Path) -> None:
    for step in (1_000_000, 25, 3):
        write_rollouts(rollouts_path(tmp_path, step), [row(0)])
    assert find_rollouts(tmp_path) == [rollouts_path(tmp_path, step) for step in (3, 25, 1_000_000)]
    assert rollouts_path(tmp_path, 3) == tmp_path / "rollouts" / "step_000003.jsonl.zst"
