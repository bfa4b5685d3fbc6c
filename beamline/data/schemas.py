"""What a row asks and which answer it expects, in the columns that others use.

=============  ==================================  =============================================
schema         the problem                         the expected answer
=============  ==================================  =============================================
verl, DAPO     ``prompt``: messages                ``reward_model.ground_truth``
SkyRL          ``prompt``: messages                ``reward_spec.ground_truth``
slime          ``prompt``: text or messages        ``label``
TRL            ``prompt``: text or messages        ``answer``, ``solution`` or ``ground_truth``
plain          ``question`` or ``problem``: text   ``answer``
=============  ==================================  =============================================

Where a row has several of them the first in this order counts; the others are kept beside it.
"""

import math
import re
from dataclasses import dataclass, fields
from datetime import date, time
from decimal import Decimal
from typing import Any, get_args, get_type_hints

from beamline.data.errors import UnusableError
from beamline.data.files import Row
from beamline.records import Message

SCHEMAS = {
    "prompt": ("reward_model", "reward_spec", "label", "answer", "solution", "ground_truth"),
    "question": ("answer",),
    "problem": ("answer",),
}
"""The columns that can hold the expected answer to the problem in a column."""

_NESTED = ("reward_model", "reward_spec")
_ROLES = get_args(get_type_hints(Message)["role"])
_FIELDS = tuple(field.name for field in fields(Message))
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell half a character, no tokenizer reads one
_DEEPEST = 50
_EXACT = 2**53  # doubles below it are the integers that they seem to be


@dataclass(frozen=True, slots=True)
class Item:
    """What a row says. ``answer`` is the text as it stands there; ``extra`` has all other columns, fit for JSON."""

    messages: tuple[Message, ...]
    answer: str
    id: str | None
    extra: dict[str, Any]


def read_row(row: Row) -> Item:
    """Read a row in whichever schema it has.

    Raises:
        UnusableError: the row fits none, with the reason.
    """
    value = row.value
    if row.unreadable is not None:
        raise UnusableError(row.unreadable)
    if not isinstance(value, dict):
        raise UnusableError(f"a {type(value).__name__}, not an object with a problem and its answer")
    question, answer = _columns(value)
    for column, cell in value.items():
        if not _is_shallow(cell):
            raise UnusableError(f"{shown(column)} is nested more than {_DEEPEST} deep")
    messages = _messages(value[question], question)
    text, rest = _answer(value[answer], answer)
    extra = {_plain(key): _plain(cell) for key, cell in value.items() if key not in ("id", question, answer)}
    return Item(messages, text, _identity(value), extra | rest)


def answer_text(value: Any, name: str) -> str:
    """An expected answer as text: 34 and 34.0 are ``34``, 0.5 is ``0.5``.

    Raises:
        UnusableError: it is neither text nor a finite number, or it is empty.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)  # tables hold integers beside empty cells so
    if isinstance(value, bool) or not (isinstance(value, str | int) or _is_finite(value)):
        raise UnusableError(f"{name!r} must be text or a number, not {shown(value)}")
    text = f"{value:f}" if isinstance(value, Decimal) else str(value)
    if not text.strip():
        raise UnusableError(f"{name!r} is empty")
    return _unicode(text, name)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float | Decimal) and math.isfinite(value)


def shown(value: Any) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _columns(row: dict[Any, Any]) -> tuple[str, str]:
    """The columns of the problem and of the answer."""
    question = next((column for column in SCHEMAS if column in row), None)
    if question is None:
        raise UnusableError(
            f"no problem: none of 'prompt', 'question' and 'problem' is among its columns ({_names(row)})"
        )
    there = [column for column in SCHEMAS[question] if column in row]
    if not there:
        several = f"one of {', '.join(SCHEMAS[question])}" if question == "prompt" else "'answer'"
        raise UnusableError(f"no answer: beside {question!r} a row needs {several}, and it has {_names(row)}")
    return question, next((column for column in there if row[column] is not None), there[0])


def _names(row: dict[Any, Any]) -> str:
    return ", ".join(map(repr, list(row)[:10])) or "no column"


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    if isinstance(value, str) or column != "prompt":
        return (Message("user", _content(value, column)),)
    if not isinstance(value, list) or not value:
        raise UnusableError(f"{column!r} must be text or a list of messages, not {shown(value)}")
    messages = tuple(_message(turn, f"{column}[{index}]") for index, turn in enumerate(value))
    if messages[-1].role not in ("user", "tool"):
        raise UnusableError(f"{column!r} ends with a message of the {messages[-1].role}, after which nothing is asked")
    return messages


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise UnusableError(f"{where!r} must be a message with 'role' and 'content', not {shown(turn)}")
    given = {key: field for key, field in turn.items() if field is not None}
    role: Any = given.get("role")
    if role not in _ROLES:
        raise UnusableError(f"'{where}.role' must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, not {shown(role)}")
    unknown = [key for key in given if key not in _FIELDS]
    if unknown:
        raise UnusableError(f"'{where}.{unknown[0]}' is not read; a message has {', '.join(_FIELDS)}")
    reasoning = _content(given["reasoning"], f"{where}.reasoning") if "reasoning" in given else None
    return Message(role, _content(given.get("content"), f"{where}.content"), reasoning)


def _content(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UnusableError(f"{name!r} must be text, not {shown(value)}")
    return _unicode(value, name)


def _answer(value: Any, column: str) -> tuple[str, dict[str, Any]]:
    """The text of the answer, and what else its column holds."""
    if column not in _NESTED:
        return answer_text(value, column), {}
    if not isinstance(value, dict) or "ground_truth" not in value:
        raise UnusableError(f"{column!r} must be an object with 'ground_truth', not {shown(value)}")
    rest = {_plain(key): _plain(cell) for key, cell in value.items() if key != "ground_truth"}
    return answer_text(value["ground_truth"], f"{column}.ground_truth"), {column: rest} if rest else {}


def _identity(row: dict[Any, Any]) -> str | None:
    if "id" not in row:
        return None
    value = row["id"]
    if not isinstance(value, str | int):
        raise UnusableError(f"'id' must be text or a number, not {shown(value)}")
    return _unicode(str(value), "id")


def _unicode(text: str, name: str) -> str:
    if not text.isascii() and _SURROGATE.search(text):
        raise UnusableError(f"{name!r} is not valid Unicode: {shown(text)}")
    return text


def _is_shallow(value: Any) -> bool:
    """Whether a cell is nested no deeper than all who read it later can follow."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [
            below
            for cell in level
            if isinstance(cell, dict | list | tuple)
            for below in (cell.values() if isinstance(cell, dict) else cell)
        ]
        if not level:
            return True
    return False


def _plain(value: Any) -> Any:
    """A cell as JSON can hold it; dates, decimals and the like become text."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if isinstance(value, date | time) else str(value)
