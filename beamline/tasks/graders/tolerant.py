"""The default grader: finds the answer however it is announced, and compares what it means."""

import re
from functools import lru_cache

from beamline.tasks.graders import exotic
from beamline.tasks.graders.committed import find_committed
from beamline.tasks.graders.plain import notation, squeezed
from beamline.tasks.graders.reading import read, read_as_list
from beamline.tasks.graders.syntax import Unreadable
from beamline.tasks.graders.values import Compound, Value, same, text_of
from beamline.tasks.graders.verdict import Verdict

_NAME = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z0-9'-]{3,40}")  # such as ``June20``: compared as a text


def grade_math(response: str, answer: str) -> Verdict:
    """Right when the committed answer means what the expected one does.

    Rational numbers must be equal exactly: 0.333 and 1/3 differ, as do 3.14 and pi. ``50%`` is 0.5 and also 50. Units
    may be left out but must not contradict. Order counts in tuples and intervals, not in sets and lists. An answer that
    this package's own reader does not know (sums, integrals, limits) is compared by its text and by math-verify.
    """
    committed = find_committed(response)
    if committed is None:
        return Verdict(False, None)
    truth = _expected(answer)
    parsed = None if committed.value is None else text_of(committed.value)
    if truth is None:
        text = _squeezed_notation(committed.text)
        alike = text is not None and (text == _squeezed_notation(answer) or exotic.equal(answer, committed.text))
        return Verdict(alike, parsed or text)
    if committed.value is None:
        return Verdict(False, None)
    return Verdict(same(truth, committed.value) or _same_as_list(truth, committed.text), parsed)


def why_unreadable(answer: str) -> str | None:
    """Why no response can be judged against an expected answer, or ``None``."""
    try:
        read(answer)
    except Unreadable as reason:
        text = _squeezed_notation(answer)
        if exotic.readable(answer) or (text is not None and _NAME.fullmatch(text)):
            return None
        return f"not an answer that can be judged, {reason}"
    return None


@lru_cache(maxsize=4096)
def _expected(answer: str) -> Value | None:
    """What an expected answer means; many responses are compared with each."""
    try:
        return read(answer)
    except Unreadable:
        return None


def _same_as_list(truth: Value, text: str) -> bool:
    """Whether a text such as ``100,200,300`` is the expected list rather than one number."""
    if not isinstance(truth, Compound) or truth.kind not in ("list", "set") or "," not in text:
        return False
    try:
        return same(truth, read_as_list(text))
    except Unreadable:
        return False


def _squeezed_notation(text: str) -> str | None:
    try:
        return squeezed(notation(text)) or None
    except Unreadable:
        return None
