"""Cleaning: rows in any schema become distinct rows in DAPO's columns, without prompts of contradictory answers.

Two rows are the same when data source, prompt, ability, expected answer and style are, exactly; the first one stays,
with its ``extra_info``. A prompt that then has more than one expected answer is dropped in all its rows: nobody can
say which answer is right.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

import polars as pl

from beamline.data.errors import UnusableError
from beamline.data.files import Row, frame_rows
from beamline.data.problem_set import Excluded
from beamline.data.schemas import SCHEMAS, Item, read_row, shown
from beamline.data.wording import bare, dapo
from beamline.records import Message

Wording = Literal["keep", "dapo"]
Advance: TypeAlias = Callable[[int], None]

_KEY = ("data_source", "ability", *SCHEMAS, *chain.from_iterable(SCHEMAS.values()))
"""The columns that a cleaned row is made from, but for ``extra_info``: rows that agree in them become equal rows."""

_NUMBER = "\0number"  # column of a row's number, which no other has
_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class CleanRow:
    """A row in DAPO's columns."""

    data_source: str
    prompt: tuple[Message, ...]
    ability: str
    ground_truth: str
    style: str
    extra_info: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it another row than others."""
        return self.data_source, self.prompt, self.ability, self.ground_truth, self.style


@dataclass(frozen=True, slots=True)
class Conflict:
    """A prompt with several expected answers, and the number of its distinct rows."""

    prompt: str
    answers: tuple[str, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The rows that stay, in the order of their first appearance, and what became of all others."""

    rows: tuple[CleanRow, ...]
    read: int
    duplicates: int
    conflicts: tuple[Conflict, ...]
    unusable: tuple[Excluded, ...]

    def counts(self) -> dict[str, Any]:
        """Every row that was read, accounted for, with the first examples."""
        return {
            "in": self.read,
            "exact_duplicates": self.duplicates,
            "conflicting_answers": {
                "rows": sum(conflict.rows for conflict in self.conflicts),
                "prompts": len(self.conflicts),
                "examples": [asdict(conflict) for conflict in self.conflicts[:_EXAMPLES]],
            },
            "unusable": {
                "rows": len(self.unusable),
                "examples": [asdict(excluded) for excluded in self.unusable[:_EXAMPLES]],
            },
            "out": len(self.rows),
        }

    def frame(self) -> pl.DataFrame:
        """The rows that stay as a table in DAPO's columns."""
        fields = ["content", "role"]
        if any(message.reasoning is not None for row in self.rows for message in row.prompt):
            fields.append("reasoning")
        prompt = pl.List(pl.Struct(dict.fromkeys(fields, pl.String)))
        prompts = [[{field: getattr(m, field) for field in fields} for m in row.prompt] for row in self.rows]
        rewards = [{"ground_truth": row.ground_truth, "style": row.style} for row in self.rows]
        return pl.DataFrame(
            [
                pl.Series("data_source", [row.data_source for row in self.rows], pl.String),
                pl.Series("prompt", prompts, prompt),
                pl.Series("ability", [row.ability for row in self.rows], pl.String),
                pl.Series("reward_model", rewards, pl.Struct({"ground_truth": pl.String, "style": pl.String})),
                _struct("extra_info", [row.extra_info for row in self.rows]),
            ]
        )


def distinct(batches: Iterable[pl.DataFrame], advance: Advance) -> tuple[list[Row], int]:
    """The first of all rows that agree in the columns that matter, and how many rows there are.

    This is the part of cleaning that a table does much faster than :func:`clean`, which gives the same rows without.
    """
    kept: pl.DataFrame | None = None
    read = 0
    for batch in batches:
        numbered = batch.with_row_index(_NUMBER, offset=read + 1)
        read += len(batch)
        advance(len(batch))
        together = numbered if kept is None else pl.concat([kept, numbered])
        kept = together.unique([c for c in batch.columns if c in _KEY] or None, keep="first", maintain_order=True)
    if kept is None:
        return [], 0
    return list(frame_rows(kept.drop(_NUMBER), kept[_NUMBER].to_list())), read


def clean(rows: Iterable[Row], data_source: str, wording: Wording = "keep", read: int | None = None) -> Cleaned:
    """Clean rows. ``data_source`` is for rows that name none; ``wording="dapo"`` puts DAPO's around every problem.

    ``read`` is the number of rows that there were before :func:`distinct`.
    """
    kept: dict[tuple[Any, ...], CleanRow] = {}
    unusable: dict[str, Excluded] = {}
    count = 0
    for row in rows:
        count += 1
        try:
            made = _clean_row(row, read_row(row), data_source, wording)
            kept.setdefault(made.key, made)
        except UnusableError as reason:
            unusable.setdefault(_same(row), Excluded(row.where, str(reason)))
    total = count if read is None else read
    by_prompt: dict[tuple[Message, ...], list[CleanRow]] = {}
    for made in kept.values():
        by_prompt.setdefault(made.prompt, []).append(made)
    conflicts = {prompt: group for prompt, group in by_prompt.items() if len({row.ground_truth for row in group}) > 1}
    return Cleaned(
        rows=tuple(row for row in kept.values() if row.prompt not in conflicts),
        read=total,
        duplicates=total - len(kept) - len(unusable),
        conflicts=tuple(_conflict(group) for group in conflicts.values()),
        unusable=tuple(unusable.values()),
    )


def _clean_row(row: Row, item: Item, data_source: str, wording: Wording) -> CleanRow:
    extra = dict(item.extra)
    source, ability = _text(extra, "data_source", data_source), _text(extra, "ability", "MATH")
    reward = extra.get("reward_model")
    style = _text(reward, "style", "rule") if isinstance(reward, dict) else "rule"
    if reward == {}:
        del extra["reward_model"]
    info = extra.pop("extra_info", None)
    about = info if isinstance(info, dict) else {} if info is None else {"extra_info": info}
    index = {} if about.get("index") is not None else {"index": str(row.number) if item.id is None else item.id}
    messages = _worded(item.messages) if wording == "dapo" else item.messages
    return CleanRow(source, messages, ability, item.answer, style, about | index | extra)


def _text(columns: dict[str, Any], column: str, default: str) -> str:
    """Take a text out of the columns of a row."""
    value = columns.pop(column, None)
    if value is not None and not isinstance(value, str):
        raise UnusableError(f"{column!r} must be text, not {shown(value)}")
    return default if value is None else value


def _worded(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    *before, last = messages
    return (*before, replace(last, content=dapo(last.content)) if last.role == "user" else last)


def _same(row: Row) -> str:
    """Equal for rows that cannot be used and agree in the columns that matter."""
    if not isinstance(row.value, dict):
        return f"{row.number}"
    return repr([(column, row.value[column]) for column in _KEY if column in row.value])


def _conflict(group: list[CleanRow]) -> Conflict:
    text = bare(group[0].prompt[-1].content).strip()
    answers = tuple(dict.fromkeys(row.ground_truth for row in group))
    return Conflict(text if len(text) <= 200 else f"{text[:197]}...", answers, len(group))


def _struct(name: str, values: list[dict[str, Any]]) -> pl.Series:
    """One struct of all fields that occur; a row without a field has null there."""
    fields = dict.fromkeys(field for value in values for field in value)
    columns = {field: _column(field, [value.get(field) for value in values]) for field in fields}
    return pl.DataFrame(columns).to_struct(name)


def _column(name: str, values: list[Any]) -> pl.Series:
    """Values as a column of their type; as JSON text where no type keeps all of them as they are."""
    try:
        column = pl.Series(name, values, strict=True)
        if _portable(column.dtype) and json.dumps(column.to_list()) == json.dumps(values):  # 1 is not true
            return column
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        pass  # there is no such type
    return pl.Series(name, [None if value is None else json.dumps(value) for value in values], pl.String)


def _portable(dtype: Any) -> bool:
    """Whether every reader of Parquet knows a type."""
    if isinstance(dtype, pl.Struct):
        return bool(dtype.fields) and all(_portable(field.dtype) for field in dtype.fields)
    if isinstance(dtype, pl.List):
        return _portable(dtype.inner)
    return dtype in (pl.String, pl.Boolean, pl.Int64, pl.UInt64, pl.Float64)
