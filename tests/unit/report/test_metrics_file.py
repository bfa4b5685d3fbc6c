"""metrics.jsonl: whole lines, finite numbers, cut where a run goes on."""

import json
import math
from pathlib import Path

import pytest

from beamline.report import MetricsWriter, read_metrics, reproducible, truncate_after


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(4):
        writer.append({"step": step, "policy/lr": 0.1 * step, "timing/step": 2.5})
    return path


def test_lines_come_back_as_written(path: Path) -> None:
    lines = read_metrics(path)
    assert lines[3] == {"step": 3, "policy/lr": 0.1 * 3, "timing/step": 2.5}
    assert len(lines) == 4
    assert isinstance(lines[3]["step"], int)


def test_a_new_writer_appends(path: Path) -> None:
    MetricsWriter(path).append({"step": 4})
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_by_name(path: Path, value: float) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"step 4: policy/loss is -?(nan|inf)"):
        MetricsWriter(path).append({"step": 4, "policy/loss": value})
    assert path.read_bytes() == before


def test_an_undefined_key_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="'policy/los' is not defined"):
        MetricsWriter(path).append({"step": 4, "policy/los": 1.0})


@pytest.mark.parametrize("value", ["1", None, True, [1.0]])
def test_a_value_that_is_no_number_is_refused(path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="policy/loss must be an int or a float"):
        MetricsWriter(path).append({"step": 4, "policy/loss": value})  # type: ignore[dict-item]


def test_a_line_without_a_step_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="needs the key 'step'"):
        MetricsWriter(path).append({"policy/lr": 1.0})


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_was_written_is_refused(path: Path, step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} cannot follow step 3"):
        MetricsWriter(path).append({"step": step})


def test_a_torn_last_line_is_left_out(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2]


def test_a_torn_line_before_the_last_is_an_error(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:-5] + "\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a JSON object of numbers"):
        read_metrics(path)


def test_nothing_is_appended_to_a_torn_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="ends in a torn line"):
        MetricsWriter(path)


def test_truncation_keeps_the_bytes_up_to_the_step(path: Path) -> None:
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    path.write_bytes(path.read_bytes() + b'{"step": 4, "poli')
    truncate_after(path, 2)
    assert path.read_bytes() == kept


def test_truncation_after_a_step_that_is_not_there_is_an_error(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match="no line of step 9; its last line is of step 3"):
        truncate_after(path, 9)
    assert path.read_bytes() == before


def test_only_times_and_memory_are_not_reproducible() -> None:
    line = {"step": 1, "train/tokens": 9, "timing/step": 1.0, "memory/peak_bytes": 5}
    assert reproducible(line) == {"step": 1, "train/tokens": 9}


def test_numbers_keep_every_digit(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "m").append({"step": 1, "policy/loss": 0.1 + 0.2, "train/tokens": 2**53 + 1})
    assert json.loads((tmp_path / "m").read_text()) == read_metrics(tmp_path / "m")[0]
    assert read_metrics(tmp_path / "m")[0] == {"step": 1, "policy/loss": 0.1 + 0.2, "train/tokens": 2**53 + 1}
