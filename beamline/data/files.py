"""Files of rows: Parquet, JSON Lines, JSON and CSV, told apart by their names; nothing is taken for another format."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from beamline.data.errors import DataError

_BATCH = 1 << 16  # rows of a Parquet file in memory at a time
_PARQUET = b"PAR1"  # the first and the last bytes of a Parquet file
_FOREIGN = {
    _PARQUET: "a Parquet file; name it *.parquet",
    b"\x1f\x8b": "compressed with gzip; unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first",
}
_LONGEST_CELL = 2**27  # characters of a CSV cell


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it stands in a file. ``unreadable`` says why ``value`` could not be read, where it could not.

    ``number`` counts from 1; ``where`` is what the row is called in messages. In a Parquet or CSV file an empty cell
    is a column that the row does not have.
    """

    number: int
    where: str
    value: Any
    unreadable: str | None = None


def rows_of(values: Iterable[Any]) -> Iterator[Row]:
    """Values in memory as rows."""
    return (Row(number, f"row {number}", value) for number, value in enumerate(values, start=1))


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in order.

    Raises:
        DataError: the file cannot be read, or is not what its name says.
    """
    return _READERS[_format(path)](path)


def is_parquet(path: Path) -> bool:
    """Whether a file is read in batches of columns.

    Raises:
        DataError: the file cannot be read, or is not what its name says.
    """
    return _format(path) == ".parquet"


def batches(path: Path) -> Iterator[pl.DataFrame]:
    """The rows of a Parquet file, in order, a part at a time.

    Raises:
        DataError: the file is damaged.
    """
    with explained(path):
        yield from pl.scan_parquet(path, glob=False).collect_batches(chunk_size=_BATCH, maintain_order=True)


def row_count(path: Path) -> int | None:
    """How many rows a file says that it has; None where only reading would tell.

    Raises:
        DataError: the file cannot be read.
    """
    if not is_parquet(path):
        return None
    with explained(path):
        return int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())


def frame_rows(frame: pl.DataFrame, numbers: Sequence[int]) -> Iterator[Row]:
    """The rows of a table under their numbers."""
    for number, cells in zip(numbers, frame.iter_rows(named=True), strict=True):
        yield Row(number, f"row {number}", {column: cell for column, cell in cells.items() if cell is not None})


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what a table's reader raises, be it a panic, into a :class:`DataError` with the file."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read {path}: {reason}; is it damaged or not complete?") from error


def _format(path: Path) -> str:
    """The format that a file's name promises, held against its first bytes."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(max(0, file.seek(0, 2) - 4))
            tail = file.read(4)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DataError(f"{path}: files of problems are named {', '.join('*' + known for known in _READERS)}")
    if suffix == ".parquet":
        if not (head == tail == _PARQUET):
            place = "begin" if head != _PARQUET else "end"
            raise DataError(f"{path} is no complete Parquet file: it does not {place} with {_PARQUET.decode()}")
        return suffix
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {what}")
    return suffix


def _parquet(path: Path) -> Iterator[Row]:
    first = 1
    for batch in batches(path):
        yield from frame_rows(batch, range(first, first + len(batch)))
        first += len(batch)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> Row:
    try:
        return Row(number, f"line {number}", json.loads(line))
    except (ValueError, RecursionError) as error:
        return Row(number, f"line {number}", None, f"not JSON: {error}")


def _json_array(path: Path) -> Iterator[Row]:
    content = path.read_bytes()
    try:
        values = json.loads(content) if content.strip() else []
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}; with one object a line it is named *.jsonl") from error
    if not isinstance(values, list):
        raise DataError(f"{path} holds a {type(values).__name__}, not an array of objects")
    return rows_of(values)


def _csv(path: Path) -> Iterator[Row]:
    # Bytes that are not UTF-8 become lone surrogates, which bar the row that they stand in and no other.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        csv.field_size_limit(_LONGEST_CELL)  # a setting of the process; its default is 128 KiB
        reader = csv.reader(file, strict=True)
        try:
            columns = next(reader, [])
            twice = {column for column in columns if columns.count(column) > 1}
            if twice:
                raise DataError(f"{path} has the column {sorted(twice)[0]!r} more than once")
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                yield _csv_row(number, columns, cells)
        except csv.Error as error:
            raise DataError(f"{path}: line {reader.line_num} is not CSV: {error}") from error


def _csv_row(number: int, columns: list[str], cells: list[str]) -> Row:
    where = f"row {number}"
    if len(cells) != len(columns):
        return Row(number, where, None, f"{len(cells)} cells in a table of {len(columns)} columns")
    return Row(number, where, {column: cell for column, cell in zip(columns, cells, strict=True) if cell})


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".json": _json_array,
    ".csv": _csv,
}
