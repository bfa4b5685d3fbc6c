"""Graders: pure functions of a response's final text and the expected answer.

``math`` reads any answer that mathematics has and compares values; ``integer`` is for integer answers; ``dapo_strict``
is the published DAPO rule; ``exact`` compares texts. Importing this package imports no algebra system: ``math`` does
so when it first meets an answer that arithmetic cannot judge.
"""

from collections.abc import Callable
from typing import Literal

from beamline.tasks.graders.dapo import grade_dapo, normalize
from beamline.tasks.graders.exact import grade_exact
from beamline.tasks.graders.integer import expected_integer, grade_integer
from beamline.tasks.graders.tolerant import grade_math, why_unreadable
from beamline.tasks.graders.verdict import Verdict

GraderName = Literal["math", "integer", "dapo_strict", "exact"]

GRADERS: dict[GraderName, Callable[[str, str], Verdict]] = {
    "math": grade_math,
    "integer": grade_integer,
    "dapo_strict": grade_dapo,
    "exact": grade_exact,
}

__all__ = ["GRADERS", "GraderName", "Verdict", "unusable_answer"]


def unusable_answer(grader: str, answer: str) -> str | None:
    """Why a grader cannot judge responses against an expected answer; ``None`` if it can.

    Raises:
        ValueError: there is no grader of that name.
    """
    if grader not in GRADERS:
        raise ValueError(f"no grader is called {grader!r}; there are {', '.join(GRADERS)}")
    if not answer.strip():
        return "the answer is empty"
    if grader == "integer":
        return None if expected_integer(answer) is not None else f"not an integer: {answer[:80]!r}"
    if grader == "dapo_strict":
        return None if normalize(answer) else f"nothing is left of {answer[:80]!r} after normalization"
    return why_unreadable(answer) if grader == "math" else None
