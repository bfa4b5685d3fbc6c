"""Sums, products, integrals and limits as expected answers: read and compared by math-verify.

Only the expected answer decides that this path is taken, so no response can choose the more lenient reader.
"""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from beamline.tasks.graders.brackets import masked, split
from beamline.tasks.graders.syntax import Unreadable

_OPERATORS = re.compile(r"\\(?:sum|prod|int|iint|lim|log|ln)(?![A-Za-z])")
_EQUALS = re.compile("=")
_NAME = re.compile(r"\s*\\?[A-Za-z]+\s*")
_RELATION = re.compile(
    r"\\(?:approx|neq?|sim(?:eq)?|cong|equiv|leq?|geq?|lt|gt|to|in|cup|cap|pm|mp|l?or|l?and)(?![A-Za-z])|[<>≈≠≤≥±]"
)
_LONGEST = 300
_DIGITS = 40


def readable(answer: str) -> bool:
    """Whether an expected answer is one that math-verify reads."""
    return len(answer) <= _LONGEST and _OPERATORS.search(answer) is not None and _parse(answer) is not None


def equal(answer: str, response: str) -> bool:
    """Whether math-verify holds a response for the expected answer; false for answers that are not ``readable``.

    Of a chain of equalities every side must be the answer, but for a name at its beginning: math-verify looks at one.

    Raises:
        MemoryError, RecursionError: the response needs more than there is.
    """
    if len(response) > _LONGEST or not readable(answer):
        return False
    try:
        sides, _ = split(response, _EQUALS)
        if _RELATION.search(masked(response)) and not _RELATION.search(masked(answer)):
            return False
    except Unreadable:
        return False
    if len(sides) > 1 and _NAME.fullmatch(sides[0]):
        sides = sides[1:]
    with _exhaustion_raised():
        return all(_verified(answer, side) for side in sides)


def _verified(answer: str, response: str) -> bool:
    from math_verify import verify

    truth, said = _parse(answer), _parse(response)
    return said is not None and bool(
        verify(truth, said, float_rounding=_DIGITS, numeric_precision=_DIGITS, timeout_seconds=None)
    )


@contextmanager
def _exhaustion_raised() -> Iterator[None]:
    """Raise what math-verify passes over although it says nothing of the answer: memory or stack ran out.

    It catches every exception in many places, so they are seen where they arise, by a trace function.
    """
    seen: list[type[BaseException]] = []

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_lines = False
        if event == "exception" and issubclass(arg[0], (MemoryError, RecursionError)):
            seen.append(arg[0])
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
        failed = sys.gettrace() is not watch  # Python drops a trace function that has no stack left itself
    finally:
        sys.settrace(before)
    if seen or failed:
        raise (seen[0] if seen else MemoryError)("math-verify ran out of memory or stack")


def _parse(text: str) -> Any:
    """The sympy object of a formula, without guesses at units or words; ``None`` if it is not read."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped, unused-ignore]
    from math_verify import LatexExtractionConfig, parse

    bare = re.sub(r"\\[()\[\]]|\$", " ", text).strip().rstrip(".")
    if re.search(r"\\text|\b[A-Za-z]{4,}(?![A-Za-z{])(?<!\\)", re.sub(r"\\[A-Za-z]+", " ", bare)):
        return None  # prose
    exact = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    found = parse(
        f"$${bare}$$",
        [LatexExtractionConfig(normalization_config=exact)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found[0] if len(found) == 1 else None
