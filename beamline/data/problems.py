"""Problem sets: generated or read from a file, with every exclusion counted and explained."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamline.chat.beam import BeamChat
from beamline.config.schema import ArithmeticSource, FileSource
from beamline.errors import BeamlineError
from beamline.records import Message, Problem
from beamline.tasks import arithmetic
from beamline.tasks.grading import is_integer

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell half a character, no tokenizer reads one


class DataError(BeamlineError, ValueError):
    """A problem set that cannot be used, with the file and the reason."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A row or problem that was left out: where (a line number or an id), and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The problems of one set, and what was left out of it."""

    name: str
    problems: tuple[Problem, ...]
    excluded: tuple[Excluded, ...] = ()

    def __len__(self) -> int:
        return len(self.problems)


def load(name: str, source: ArithmeticSource | FileSource, seed: int, pool: arithmetic.Pool) -> ProblemSet:
    """Make or read a problem set.

    Raises:
        DataError: the file cannot be read, no row of it can be used, or fewer problems exist than were asked for.
    """
    if isinstance(source, FileSource):
        return _from_file(name, source.path)
    # Evaluation problems do not depend on the run's seed: runs are compared on the same ones.
    try:
        problems = arithmetic.generate(0 if pool == "eval" else seed, pool, source.problems, source.levels)
    except ValueError as error:
        raise DataError(f"data set {name!r}: {error}") from error
    return ProblemSet(name, tuple(problems))


def usable(problems: ProblemSet, chat: BeamChat, limit: int) -> ProblemSet:
    """Leave out the problems whose prompt has over ``limit`` tokens, or whose text would be read as control tokens.

    Raises:
        DataError: no problem is left.
    """
    reasons = [_unusable(problem, chat, limit) for problem in problems.problems]
    pairs = list(zip(problems.problems, reasons, strict=True))
    kept = tuple(problem for problem, reason in pairs if reason is None)
    left_out = tuple(Excluded(problem.id, reason) for problem, reason in pairs if reason is not None)
    if not kept:
        first = left_out[0]
        raise DataError(
            f"data set {problems.name!r}: no prompt of {len(pairs)} can be used; {first.where}: {first.reason}"
        )
    return ProblemSet(problems.name, kept, problems.excluded + left_out)


def _unusable(problem: Problem, chat: BeamChat, limit: int) -> str | None:
    control = next((token for token in chat.special_tokens if token in problem.text), None)
    if control is not None:
        return f"the text holds the control token {control}"
    tokens = len(chat.prompt_ids(problem.messages))
    return f"prompt of {tokens} tokens; rollout.max_prompt_tokens is {limit}" if tokens > limit else None


def check_disjoint(train: ProblemSet, evaluation: ProblemSet) -> None:
    """Make sure that no evaluation problem is trained on; texts are compared without case and spacing.

    Raises:
        DataError: they overlap.
    """
    trained = {_normalized(problem.text): problem.id for problem in train.problems}
    shared = [p for p in evaluation.problems if _normalized(p.text) in trained]
    if shared:
        first = shared[0]
        raise DataError(
            f"{len(shared)} of {len(evaluation)} problems of evaluation set {evaluation.name!r} are also trained on, "
            f"first {first.id!r} (training problem {trained[_normalized(first.text)]!r}): {first.text[:80]!r}; "
            "remove them from one of the two"
        )


def _normalized(text: str) -> str:
    """Without case, and without spacing but between words: ``1 + 2`` is ``1+2``, and ``12 3`` is not ``1 23``."""
    return " ".join(re.sub(r"\s*([^\w\s])\s*", r"\1", text).split()).casefold()


class _UnusableError(Exception):
    """Why a row is left out."""


def _from_file(name: str, path: Path) -> ProblemSet:
    by_id: dict[str, Problem] = {}
    by_text: dict[str, Problem] = {}
    excluded: list[Excluded] = []
    for number, line in _lines(path):
        try:
            problem = _parse(line, f"{path.stem}:{number}", name)
            if problem.id in by_id:
                raise _UnusableError(f"id {problem.id!r} was used before")
            same = by_text.setdefault(_normalized(problem.text), problem)
            if same is not problem:
                raise _UnusableError(f"the same question as {same.id!r}")
            by_id[problem.id] = problem
        except _UnusableError as reason:
            excluded.append(Excluded(f"line {number}", str(reason)))
    if not by_id:
        detail = f"; {excluded[0].where}: {excluded[0].reason}" if excluded else " (the file is empty)"
        raise DataError(f"{path} has no usable row{detail}")
    return ProblemSet(name, tuple(by_id.values()), tuple(excluded))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _parse(line: bytes, default_id: str, source: str) -> Problem:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _UnusableError(f"a {type(row).__name__}, not an object with 'question' and 'answer'")
    question, answer, identity = row.get("question"), row.get("answer"), row.get("id", default_id)
    if not isinstance(question, str) or not question.strip():
        raise _UnusableError(f"'question' must be text, not {question!r}")
    text = str(answer).strip() if isinstance(answer, str | int) and not isinstance(answer, bool) else ""
    if "answer" not in row:
        raise _UnusableError("'answer' is missing")
    if not is_integer(text):
        raise _UnusableError(f"'answer' must be an integer, not {answer!r}")
    if not isinstance(identity, str | int):
        raise _UnusableError(f"'id' must be text or a number, not {identity!r}")
    for column, value in (("question", question), ("id", str(identity))):
        if _SURROGATE.search(value):
            raise _UnusableError(f"{column!r} is not valid Unicode: {value!r}")
    extra = {key: value for key, value in row.items() if key not in ("id", "question", "answer")}
    return Problem(str(identity), (Message("user", question),), text, source, extra)
