"""Files that are damaged, misnamed or odd end in an error with the file and the reason, whatever reads them."""

import json
import random
from pathlib import Path

import polars as pl
import pytest

from beamline.data import DataError
from beamline.data.files import is_parquet, read_rows, row_count


def rows(path: Path) -> list[tuple[str, object, str | None]]:
    return [(row.where, row.value, row.unreadable) for row in read_rows(path)]


def parquet(folder: Path, count: int = 500) -> Path:
    path = folder / "rows.parquet"
    pl.DataFrame({"question": [f"{n}+{n} is?" for n in range(count)], "answer": range(count)}).write_parquet(path)
    return path


def refused(path: Path) -> str:
    """The message of the error that reading ends in, which names the file."""
    with pytest.raises(DataError) as caught:
        rows(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_parquet_file_that_was_cut_or_is_none_at_all(tmp_path: Path) -> None:
    content = parquet(tmp_path).read_bytes()
    path = tmp_path / "bad.parquet"
    for damaged, reason in (
        (content[:-10], "does not end with PAR1"),
        (b"", "does not begin with PAR1"),
        (b'{"question": "1"}\n', "does not begin with PAR1"),
        (b"PAR1", "cannot read"),
        (b"PAR1" * 3, "cannot read"),
        (content[:200] + content[-60:], "cannot read"),
    ):
        path.write_bytes(damaged)
        assert reason in refused(path)


def test_a_parquet_file_with_wrong_bytes_is_read_or_refused(tmp_path: Path) -> None:
    content = parquet(tmp_path).read_bytes()
    path = tmp_path / "bad.parquet"
    rng = random.Random(0)
    refusals = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(8):
            damaged[rng.randrange(4, len(content) - 4)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            rows(path)
            row_count(path)
        except DataError:
            refusals += 1
    assert refusals > 30


def test_a_panic_of_the_reader_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> None:
        raise pl.exceptions.PanicException("index out of bounds\nbacktrace")

    path = parquet(tmp_path)
    monkeypatch.setattr(pl, "scan_parquet", panic)
    assert refused(path) == f"cannot read {path}: index out of bounds; is it damaged or not complete?"


def test_a_name_must_say_the_format(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("{}")
    assert r"files of problems are named *.parquet, *.jsonl, *.json, *.csv" in refused(tmp_path / "rows.txt")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_foreign_format_under_a_text_name_is_recognized(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    for content, reason in (
        (parquet(tmp_path).read_bytes(), "is a Parquet file; name it *.parquet"),
        (b"\x1f\x8b\x08\x00", "is compressed with gzip; unpack it first"),
        (b"\x28\xb5\x2f\xfd\x00", "is compressed with zstd; unpack it first"),
    ):
        path.write_bytes(content)
        assert reason in refused(path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv"])
def test_a_folder_and_a_file_that_is_not_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    assert "No such file" in refused(path)
    path.mkdir()
    assert "Is a directory" in refused(path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = parquet(tmp_path)
    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in refused(path)


def test_json_that_is_no_array(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for content, reason in (
        (b'{"question": "1"}', "holds a dict, not an array of objects"),
        (b'{"question": "1"}\n{"question": "2"}', "with one object a line it is named *.jsonl"),
        (b"[" * 100_000, "is not JSON"),
        (b'["\xff"]', "is not JSON"),
        (b"[1, 2", "is not JSON"),
    ):
        path.write_bytes(content)
        assert reason in refused(path)


def test_json_with_a_byte_order_mark_and_rows_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([{"a": 1}, 3]).encode())
    assert rows(path) == [("row 1", {"a": 1}, None), ("row 2", 3, None)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_an_empty_text_file_has_no_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.touch()
    assert rows(path) == []
    path.write_bytes(b"\n\n")
    assert rows(path) == []


def test_csv_with_quotes_line_breaks_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"say ""hi"",\nthen add",2\r\n\r\nplain,3\r\n')
    assert rows(path) == [
        ("row 1", {"question": 'say "hi",\nthen add', "answer": "2"}, None),
        ("row 2", {"question": "plain", "answer": "3"}, None),
    ]


def test_csv_rows_of_another_width_are_unreadable_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\na,1\nb\nc,1,2\nd,4\n")
    found = rows(path)
    assert [value for _, value, _ in found] == [{"question": "a", "answer": "1"}, None, None, found[3][1]]
    assert [why for *_, why in found[1:3]] == [f"{n} cells in a table of 2 columns" for n in (1, 3)]


def test_csv_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for content, reason in (
        (b'question,answer\n"never closed,1\n', "line 2 is not CSV: unexpected end of data"),
        (b'question,answer\n"a"b,1\n', "line 2 is not CSV"),
        (b"question,answer,answer\na,1,2\n", "has the column 'answer' more than once"),
    ):
        path.write_bytes(content)
        assert reason in refused(path)


def test_csv_bytes_that_are_not_utf8_bar_their_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"question,answer\na\xff,1\nb,2\n")
    assert [value for _, value, _ in rows(path)] == [
        {"question": "a\udcff", "answer": "1"},
        {"question": "b", "answer": "2"},
    ]


def test_only_a_parquet_file_tells_its_rows_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert (row_count(parquet(tmp_path)), row_count(tmp_path / "rows.csv")) == (500, None)
    assert not is_parquet(tmp_path / "rows.csv")


def test_a_name_with_signs_of_a_pattern_is_the_name_of_one_file(tmp_path: Path) -> None:
    path = parquet(tmp_path, 3).rename(tmp_path / "rows[0-9]*.parquet")
    parquet(tmp_path, 5).rename(tmp_path / "rows7x.parquet")
    assert (len(rows(path)), row_count(path)) == (3, 3)


def test_a_cell_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f'question,answer\n"{"1+" * 100_000}1",100001\n')
    (row,) = read_rows(path)
    assert len(row.value["question"]) == 200_001
