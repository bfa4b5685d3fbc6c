import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from beamline.tasks.grade_file import STANDARD_INPUT, GradeFileError, grade_file
from beamline.tasks.graders import GRADERS, Verdict
from beamline.tasks.pool import GradingTask, Outcome


class FakePool:
    """Grades at once and answers in batches, the last of them first; counts the tasks that it holds."""

    def __init__(self, batch: int = 7) -> None:
        self.batch = batch
        self.held: list[tuple[Any, GradingTask]] = []
        self.most = 0
        self.tasks = 0

    def submit(self, key: Any, task: GradingTask) -> None:
        self.held.append((key, task))
        self.tasks += 1
        self.most = max(self.most, len(self.held))

    def poll(self, timeout: float) -> Sequence[tuple[Any, Outcome]]:
        assert 0 < timeout <= 10
        taken, self.held = self.held[-self.batch :], self.held[: -self.batch]
        return [(key, self.outcome(task)) for key, task in reversed(taken)]

    def outcome(self, task: GradingTask) -> Outcome:
        if task.response in ("hang", "break"):
            status = "timeout" if task.response == "hang" else "error"
            return Outcome(status, None, 2.5, f"it did {task.response}")
        return Outcome("graded", GRADERS[task.grader](task.response, task.answer), 0.25, None)  # type: ignore[index]


def write(folder: Path, *rows: Any) -> Path:
    file = folder / "responses.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def row(response: str, answer: str = "34") -> dict[str, str]:
    return {"response": response, "answer": answer, "id": "kept out"}


def graded(grader: str, file: Path, pool: FakePool | None = None) -> list[dict[str, Any]]:
    out = io.StringIO()
    lines = grade_file(grader, file, out, pool or FakePool())
    written = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(written) == lines
    return written


def test_an_answer_may_be_an_integer_but_no_truth_value(tmp_path: Path) -> None:
    assert [line["correct"] for line in graded("math", write(tmp_path, {"response": "034", "answer": 34}))] == [True]
    with pytest.raises(GradeFileError, match="'answer' must be text, not True"):
        graded("math", write(tmp_path, {"response": "1", "answer": True}))


def test_each_row_becomes_a_line(tmp_path: Path) -> None:
    file = write(tmp_path, row("Answer: 34"), row("Answer: 35"), row("nothing"))
    assert graded("math", file) == [
        {"correct": True, "parsed": "34", "status": "graded", "seconds": 0.25},
        {"correct": False, "parsed": "35", "status": "graded", "seconds": 0.25},
        {"correct": False, "parsed": None, "status": "graded", "seconds": 0.25}
        | {"parsed": GRADERS["math"]("nothing", "34").parsed},
    ]


def test_what_could_not_be_graded_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    file = write(tmp_path, row("hang"), row("break"))
    assert graded("math", file) == [
        {"correct": None, "parsed": None, "status": "timeout", "seconds": 2.5, "error": "it did hang"},
        {"correct": None, "parsed": None, "status": "error", "seconds": 2.5, "error": "it did break"},
    ]


def test_many_rows_keep_their_order_in_a_bounded_window(tmp_path: Path) -> None:
    file = write(tmp_path, *(row(f"Answer: {number}", str(number % 100)) for number in range(5_000)))
    pool = FakePool(batch=300)
    lines = graded("integer", file, pool)
    assert [line["parsed"] for line in lines] == [str(number) for number in range(5_000)]
    assert [line["correct"] for line in lines] == [number < 100 for number in range(5_000)]
    assert pool.most <= 1_000


def test_blank_lines_are_no_rows_and_an_empty_file_has_none(tmp_path: Path) -> None:
    assert len(graded("math", write(tmp_path, "", row("34"), "  ", row("35"), ""))) == 2
    assert graded("math", write(tmp_path)) == []


def test_text_beyond_ascii_survives(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text(
        json.dumps(row("Schrödinger’s 🐈", "Schrödinger’s 🐈"), ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert graded("exact", file)[0]["parsed"] == "Schrödinger’s 🐈"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: a list, not an object"),
        ('"text"', "line 3: a str, not an object"),
        ('{"response": "34"}', "line 3: 'answer' is missing; there are 'response'"),
        ('{"answer": "34"}', "line 3: 'response' is missing"),
        ("{}", "line 3: 'response' is missing; there are no keys"),
        ('{"response": 34, "answer": "34"}', "line 3: 'response' must be text, not 34"),
        ('{"response": "34", "answer": null}', "line 3: 'answer' must be text, not None"),
        (
            '{"response": "34", "answer": "1/2"}',
            "line 3: integer cannot grade against this answer: not an integer: '1/2'",
        ),
        ('{"response": "34", "answer": ""}', "line 3: integer cannot grade against this answer: the answer is empty"),
        ('{"response": "\\ud800", "answer": "34"}', "line 3: 'response' is not valid Unicode"),
        ("[" * 100_000, "line 3: not JSON"),
        ('{"response": ' + "9" * 10_000 + "}", "line 3: not JSON"),
    ],
)
def test_a_faulty_row_is_an_error_before_anything_is_graded(tmp_path: Path, line: str, reason: str) -> None:
    file = write(tmp_path, row("34"), "", line, row("34"))
    out, pool = io.StringIO(), FakePool()
    with pytest.raises(GradeFileError) as caught:
        grade_file("integer", file, out, pool)
    assert f"{file}, {reason}" in str(caught.value)
    assert (out.getvalue(), pool.tasks) == ("", 0)


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_bytes(b'{"response": "\xff", "answer": "34"}\n')
    with pytest.raises(GradeFileError, match="line 1: not JSON"):
        graded("math", file)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GradeFileError, match=r"cannot read .*missing\.jsonl: No such file"):
        graded("math", tmp_path / "missing.jsonl")
    with pytest.raises(GradeFileError, match=r"cannot read .*: Is a directory"):
        graded("math", tmp_path)


def test_an_unknown_grader_is_an_error_that_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(GradeFileError, match="no grader is called 'maths'; there are math, integer"):
        graded("maths", write(tmp_path, row("34")))


class Stream(io.BytesIO):
    """What a pipe is: it can be read once."""

    def seekable(self) -> bool:
        return False


class StandardInput:
    def __init__(self, buffer: io.BytesIO) -> None:
        self.buffer = buffer


def feed(monkeypatch: pytest.MonkeyPatch, stream: io.BytesIO) -> None:
    monkeypatch.setattr(sys, "stdin", StandardInput(stream))


def test_standard_input_is_graded_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, Stream(b'{"response": "34", "answer": "34"}\n' * 2_500))
    assert [line["correct"] for line in graded("math", STANDARD_INPUT)] == [True] * 2_500


def test_a_faulty_row_of_a_stream_is_an_error_when_those_before_it_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, Stream(b'{"response": "34", "answer": "34"}\n' * 10 + b"nonsense\n"))
    out = io.StringIO()
    with pytest.raises(GradeFileError, match="standard input, line 11: not JSON"):
        grade_file("math", STANDARD_INPUT, out, FakePool())
    assert len(out.getvalue().splitlines()) == 10


def test_a_file_as_standard_input_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, io.BytesIO(b'{"response": "34", "answer": "34"}\nnonsense\n'))
    out = io.StringIO()
    with pytest.raises(GradeFileError, match="standard input, line 2: not JSON"):
        grade_file("math", STANDARD_INPUT, out, FakePool())
    assert out.getvalue() == ""


def test_a_reader_that_hangs_up_is_no_fault_of_the_file(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, os.strerror(32))

    with pytest.raises(BrokenPipeError):
        grade_file("math", write(tmp_path, row("34")), Closed(), FakePool())


def test_verdicts_are_those_of_the_grader(tmp_path: Path) -> None:
    (line,) = graded("dapo_strict", write(tmp_path, row("Answer: 034")))
    assert Verdict(line["correct"], line["parsed"]) == GRADERS["dapo_strict"]("Answer: 034", "34")
