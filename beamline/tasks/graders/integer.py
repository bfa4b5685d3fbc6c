"""The grader of problems whose answer is an integer, as in AIME: cheap, and without algebra."""

import re

from beamline.tasks.graders.committed import find_committed
from beamline.tasks.graders.reading import read
from beamline.tasks.graders.syntax import Unreadable
from beamline.tasks.graders.values import Compound, Value
from beamline.tasks.graders.verdict import Verdict

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")


def grade_integer(response: str, answer: str) -> Verdict:
    """Right when the committed answer is the expected integer.

    It must be written as an integer: ``034``, ``+34``, ``1,234``, ``x = 34``, ``34 cm`` and ``34.0`` are read,
    ``68/2`` and ``30+4`` are not.
    """
    committed = find_committed(response)
    said = None if committed is None else _integer(committed.value)
    return Verdict(said is not None and said == expected_integer(answer), None if said is None else str(said))


def expected_integer(answer: str) -> int | None:
    """The integer that an expected answer is, or ``None``; written in any way that a response may use."""
    if _INTEGER.fullmatch(answer.strip()):
        return int(answer)
    try:
        return _integer(read(answer))
    except Unreadable:
        return None


def _integer(value: Value | None) -> int | None:
    while isinstance(value, Compound) and value.kind in ("quantity", "assign", "choice") and value.items:
        value = value.items[0]
    if isinstance(value, Compound) or value is None or value.op != "num":
        return None
    return value.number.numerator if value.number.denominator == 1 else None
