"""Problem sets: generated, or read from rows, with every exclusion counted and explained."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction

from beamline.chat import BeamChat, PromptError
from beamline.config.schema import ArithmeticSource, FileSource, Source
from beamline.data.competition import prepared_rows
from beamline.data.errors import DataError, UnusableError
from beamline.data.files import Row, read_rows
from beamline.data.order import Part
from beamline.data.overlap import comparable
from beamline.data.problem_set import Excluded, ProblemSet, in_extra_info
from beamline.data.schemas import Item, read_row, shown
from beamline.records import Problem
from beamline.tasks import arithmetic
from beamline.tasks.graders import GraderName, unusable_answer
from beamline.tasks.partition import Pool


def load(name: str, source: Source, seed: int, pool: Pool) -> ProblemSet:
    """Make or read a problem set.

    Raises:
        DataError: the file cannot be read, no row of it can be used, or fewer problems exist than were asked for.
    """
    if isinstance(source, FileSource):
        return from_rows(name, read_rows(source.path), source.path.stem, str(source.path))
    own = 0 if pool == "eval" else seed  # runs of any seed are compared on the same evaluation problems
    try:
        if isinstance(source, ArithmeticSource):
            return ProblemSet(name, tuple(arithmetic.generate(own, pool, source.problems, source.levels)))
        rows = prepared_rows(own, pool, source.problems)
    except ValueError as error:
        raise DataError(f"data set {name!r}: {error}") from error
    return from_rows(name, rows, "competition", "the generated problems")


def from_rows(name: str, rows: Iterable[Row], stem: str, origin: str) -> ProblemSet:
    """The problems of rows in any schema that is known.

    Of rows that ask the same the first stays, and none where their answers differ.

    A problem's id is its ``id``; else its ``extra_info.index``, where every row without an id has another one; else
    ``<stem>:<number of the row>``. ``origin`` is what messages call the whole.

    Raises:
        DataError: no row can be used.
    """
    read: list[tuple[Row, Item]] = []
    excluded: list[tuple[Row, str]] = []
    for row in rows:
        try:
            read.append((row, read_row(row)))
        except UnusableError as reason:
            excluded.append((row, str(reason)))
    problems = [
        Problem(identity, item.messages, item.answer.strip(), name, item.extra)
        for (_, item), identity in zip(read, _identities(read, stem), strict=True)
    ]
    texts = [comparable(problem) for problem in problems]
    answers: dict[str, dict[str, str]] = {}  # to each question, with the first problem that gives it
    for problem, text in zip(problems, texts, strict=True):
        answers.setdefault(text, {}).setdefault(problem.answer, problem.id)
    by_id: dict[str, Problem] = {}
    by_text: dict[str, Problem] = {}
    for (row, _), problem, text in zip(read, problems, texts, strict=True):
        if len(answers[text]) > 1:
            excluded.append((row, _contradiction(answers[text])))
        elif problem.id in by_id:
            excluded.append((row, f"id {problem.id!r} was used before"))
        elif text in by_text:
            excluded.append((row, f"the same question as {by_text[text].id!r}"))
        else:
            by_id[problem.id] = by_text[text] = problem
    if not by_id:
        detail = f"; {excluded[0][0].where}: {excluded[0][1]}" if excluded else " (the file is empty)"
        raise DataError(f"{origin} has no usable row{detail}")
    in_order = sorted(excluded, key=lambda pair: pair[0].number)
    return ProblemSet(name, tuple(by_id.values()), tuple(Excluded(row.where, reason) for row, reason in in_order))


def _identities(read: list[tuple[Row, Item]], stem: str) -> list[str]:
    indices = [_index(item) for _, item in read if item.id is None]
    indexed = None not in indices and len(set(indices)) == len(indices)
    return [_first(item.id, _index(item) if indexed else None, f"{stem}:{row.number}") for row, item in read]


def _first(*choices: str | None) -> str:
    return next(choice for choice in choices if choice is not None)


def _index(item: Item) -> str | None:
    index = in_extra_info(item.extra, "index")
    return str(index) if isinstance(index, str | int) and not isinstance(index, bool) else None


def _contradiction(answers: Mapping[str, str]) -> str:
    """Nobody can say which of several answers to one question is right."""
    return "the question has " + " and ".join(f"the answer {shown(a)} in {of!r}" for a, of in answers.items())


def usable(problems: ProblemSet, chat: BeamChat, limit: int, grader: GraderName) -> ProblemSet:
    """Leave out the problems that cannot be asked, or not be judged.

    Those are problems whose prompt has over ``limit`` tokens or cannot be rendered at all, and those with an expected
    answer that the grader cannot hold a response against.

    Raises:
        DataError: no problem is left.
    """
    reasons = [_unusable(problem, chat, limit, grader) for problem in problems.problems]
    pairs = list(zip(problems.problems, reasons, strict=True))
    kept = tuple(problem for problem, reason in pairs if reason is None)
    left_out = tuple(Excluded(problem.id, reason) for problem, reason in pairs if reason is not None)
    if not kept:
        first = left_out[0]
        raise DataError(
            f"data set {problems.name!r}: no problem of {len(pairs)} can be used; {first.where}: {first.reason}"
        )
    return ProblemSet(problems.name, kept, problems.excluded + left_out)


def _unusable(problem: Problem, chat: BeamChat, limit: int, grader: GraderName) -> str | None:
    unjudged = unusable_answer(grader, problem.answer)
    if unjudged is not None:
        return f"reward.grader={grader} cannot judge by its answer: {unjudged}"
    try:
        tokens = len(chat.prompt_ids(problem.messages))
    except PromptError as reason:
        return str(reason)
    return f"prompt of {tokens} tokens; rollout.max_prompt_tokens is {limit}" if tokens > limit else None


def mixture(name: str, sets: Iterable[tuple[ProblemSet, float]]) -> ProblemSet:
    """One training set of several with their weights; the set's name goes before its problems' ids.

    A problem that an earlier part has too is left out of the later one, so that no part counts for another.

    Raises:
        DataError: nothing is left of a part.
    """
    by_text: dict[str, Problem] = {}
    parts: list[Part] = []
    excluded: list[Excluded] = []
    for problems, weight in sets:
        before = len(by_text)
        excluded += [Excluded(f"{problems.name}, {e.where}", e.reason) for e in problems.excluded]
        for problem in problems.problems:
            named = replace(problem, id=f"{problems.name}/{problem.id}")
            same = by_text.setdefault(comparable(problem), named)
            if same is not named:
                excluded.append(Excluded(f"{problems.name}, {problem.id}", f"the same question as {same.id!r}"))
        count = len(by_text) - before
        if not count:
            raise DataError(f"data.train: part {problems.name!r} has no problem that is not in an earlier part too")
        # As it was written: 0.7 and 0.3 are seven to three, which their nearest doubles are not.
        parts.append(Part(problems.name, Fraction(repr(weight)), count))
    return ProblemSet(name, tuple(by_text.values()), tuple(excluded), tuple(parts))
