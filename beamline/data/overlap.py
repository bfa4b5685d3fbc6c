"""Whether two problems are the same, and whether evaluation asks what is trained on."""

import re
from collections.abc import Iterator

from beamline.data.errors import DataError
from beamline.data.problem_set import ProblemSet
from beamline.data.wording import bare
from beamline.records import Problem

# Commands that space a formula or size its brackets, and marks of where it begins and ends: they change how it looks.
_LOOKS = re.compile(r"\\(?:[,;:! ()\[\]]|(?:left|right|displaystyle|quad|qquad)(?![A-Za-z]))")
_BESIDE_SIGN = re.compile(r" (?:(?=\W)|(?<=\W ))")


def comparable(problem: Problem) -> str:
    """What two statements of one problem have in common.

    It is the text without system turns, the instructions of a known wording, case, the looks of formulas, and spacing
    but between words: ``1 + 2`` is ``1+2``, and ``12 3`` is not ``1 23``.
    """
    turns = (bare(message.content) for message in problem.messages if message.role != "system")
    return _normalized("\n".join(turns))


def check_disjoint(train: ProblemSet, *evaluation: ProblemSet, allow: bool = False) -> dict[str, int]:
    """Count the problems of each evaluation set that are also trained on, see :func:`comparable`.

    Raises:
        DataError: there are some, and ``allow`` is false.
    """
    trained = {comparable(problem): problem.id for problem in train.problems} if evaluation else {}
    counts = {}
    for problems in evaluation:
        shared = [(p, trained[text]) for p, text in _texts(problems) if text in trained]
        if shared and not allow:
            first, known_as = shared[0]
            raise DataError(
                f"{len(shared)} of {len(problems)} problems of evaluation set {problems.name!r} are also trained on, "
                f"first {first.id!r} (training problem {known_as!r}): {bare(first.text)[:80]!r}; "
                "remove them from one of the two, or accept and count them with data.allow_overlap=true"
            )
        counts[problems.name] = len(shared)
    return counts


def _texts(problems: ProblemSet) -> Iterator[tuple[Problem, str]]:
    return ((problem, comparable(problem)) for problem in problems.problems)


def _normalized(text: str) -> str:
    plain = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("$", " ").replace("~", " ")
    return _BESIDE_SIGN.sub("", " ".join(_LOOKS.sub(" ", plain).split())).casefold()
