"""Grading a file of responses: one JSON line in, one JSON line out, in order and in bounded memory."""

import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from beamline.errors import BeamlineError
from beamline.tasks.graders import GRADERS, unusable_answer
from beamline.tasks.pool import GradingTask, Outcome

STANDARD_INPUT = Path("-")

_WINDOW = 1_000  # rows that are being graded, or wait for one before them
_POLL_SECONDS = 1.0
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell half a character


class GradeFileError(BeamlineError, ValueError):
    """A row that cannot be graded, with its line number and the reason, or a file that cannot be read."""


class Pool(Protocol):
    """What is needed of a grading pool."""

    def submit(self, key: Any, task: GradingTask) -> None:
        """Have a task graded."""

    def poll(self, timeout: float) -> Sequence[tuple[Any, Outcome]]:
        """Outcomes, as soon as there are any."""


def grade_file(grader: str, file: Path, out: TextIO, pool: Pool) -> int:
    """Grade every row of a JSON Lines file, and write a line for each to ``out`` in the same order.

    A row has ``response`` (the text of the final channel) and ``answer``, both texts; an answer may be an integer. A
    line has ``correct`` and ``parsed`` (both null where the status is not ``graded``), ``status``, ``seconds`` spent in
    the grader, and ``error`` where it was not graded. Blank lines are no rows. ``-`` is the standard input.

    A file is checked as a whole before anything is graded. What cannot be read twice, such as a pipe, is checked row by
    row, and the rows before a faulty one are graded and written first.

    Returns:
        The number of rows.

    Raises:
        GradeFileError: there is no such grader; the file cannot be read; a row is not JSON, lacks a key, has a value
            that is no text, or an answer that the grader cannot judge.
    """
    if grader not in GRADERS:
        raise GradeFileError(f"no grader is called {grader!r}; there are {', '.join(GRADERS)}")
    if file == STANDARD_INPUT:
        return _grade_lines(grader, sys.stdin.buffer, "standard input", out, pool)
    try:
        lines = file.open("rb")
    except OSError as error:
        raise GradeFileError(f"cannot read {file}: {error.strerror}") from error
    with lines:
        return _grade_lines(grader, lines, str(file), out, pool)


def _grade_lines(grader: str, lines: BinaryIO, name: str, out: TextIO, pool: Pool) -> int:
    if lines.seekable():
        start = lines.tell()
        for _ in _tasks(grader, lines, name):
            pass
        lines.seek(start)
    return _grade(_tasks(grader, lines, name), out, pool)


def _grade(tasks: Iterator[GradingTask], out: TextIO, pool: Pool) -> int:
    """Keep a window of rows in the pool; write each as soon as all before it are written."""
    waiting: deque[int] = deque()
    done: dict[int, Outcome] = {}
    rows, fault = 0, None
    more = True
    while more or waiting:
        while more and len(waiting) < _WINDOW:
            try:
                task = next(tasks, None)
            except GradeFileError as error:
                task, fault = None, error
            if task is None:
                more = False
                break
            pool.submit(rows, task)
            waiting.append(rows)
            rows += 1
        if waiting:
            done.update(pool.poll(_POLL_SECONDS))
        while waiting and waiting[0] in done:
            out.write(_line(done.pop(waiting.popleft())))
    if fault is not None:
        raise fault
    return rows


def _line(outcome: Outcome) -> str:
    verdict = outcome.verdict
    line: dict[str, Any] = {
        "correct": None if verdict is None else verdict.correct,
        "parsed": None if verdict is None else verdict.parsed,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 6),
    }
    if outcome.error is not None:
        line["error"] = outcome.error
    return json.dumps(line) + "\n"


def _tasks(grader: str, lines: BinaryIO, name: str) -> Iterator[GradingTask]:
    why_not = lru_cache(maxsize=100_000)(partial(unusable_answer, grader))
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        response, answer = _row(line, f"{name}, line {number}")
        reason = why_not(answer)
        if reason is not None:
            raise GradeFileError(f"{name}, line {number}: {grader} cannot grade against this answer: {reason}")
        yield GradingTask(grader, response, answer)


def _row(line: bytes, where: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise GradeFileError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise GradeFileError(f"{where}: a {type(row).__name__}, not an object with 'response' and 'answer'")
    if isinstance(row.get("answer"), int) and not isinstance(row["answer"], bool):
        row["answer"] = str(row["answer"])  # many files have integers as numbers
    return _text(row, "response", where), _text(row, "answer", where)


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        raise GradeFileError(f"{where}: {key!r} is missing; there are {', '.join(map(repr, row)) or 'no keys'}")
    value = row[key]
    if not isinstance(value, str):
        raise GradeFileError(f"{where}: {key!r} must be text, not {str(value)[:80]}")
    if _SURROGATE.search(value):
        raise GradeFileError(f"{where}: {key!r} is not valid Unicode")
    return value
