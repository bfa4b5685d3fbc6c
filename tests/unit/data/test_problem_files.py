import json
from pathlib import Path
from typing import Any

import pytest

from beamline.config.schema import FileSource
from beamline.data import DataError, Excluded, ProblemSet, load
from beamline.records import Message, Problem

GOOD = {"question": "1+1", "answer": "2"}


def write(folder: Path, *lines: bytes | str | dict[str, Any]) -> Path:
    """A file with one line for each argument; dictionaries become JSON."""
    path = folder / "sums.jsonl"
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in encoded) + b"\n")
    return path


def read(path: Path) -> ProblemSet:
    return load("sums", FileSource(source="file", path=path), seed=0, pool="train")


def test_a_row_becomes_a_problem_with_the_rest_of_its_columns_as_extra(tmp_path: Path) -> None:
    row = {"id": "a", "question": " 1 + 1\n", "answer": "2", "level": 3, "tags": ["x"]}
    problems = read(write(tmp_path, row))
    user = (Message("user", " 1 + 1\n"),)
    assert problems == ProblemSet("sums", (Problem("a", user, "2", "sums", {"level": 3, "tags": ["x"]}),))


def test_ids_are_the_line_of_the_file_or_those_given(tmp_path: Path) -> None:
    rows = [{"question": q, "answer": 0} | extra for q, extra in (("a", {}), ("b", {"id": 7}), ("c", {"id": "x"}))]
    assert [p.id for p in read(write(tmp_path, rows[0], "", *rows[1:])).problems] == ["sums:1", "7", "x"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (12, "12"),
        (" +12 ", "+12"),
        ("-0", "-0"),
        (-3, "-3"),
        (10**4000, str(10**4000)),
        (0.5, "0.5"),
        (34.0, "34"),
        (1e300, "1e+300"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("x", "x"),
    ],
    ids=range(10),
)
def test_answers_are_text_or_numbers(tmp_path: Path, answer: Any, text: str) -> None:
    (problem,) = read(write(tmp_path, {"question": "?", "answer": answer})).problems
    assert problem.answer == text


BAD_ROWS: list[tuple[bytes | str | dict[str, Any], str]] = [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    (b'{"question": "\xff"}', "not JSON"),
    (b"\x00\x01\x02", "not JSON"),
    ('{"question": "1", "answer": ' + "1" * 5000 + "}", "not JSON"),
    ("[1, 2]", "a list, not an object"),
    ("null", "a NoneType, not an object"),
    ({"answer": 1}, "no problem: none of 'prompt', 'question' and 'problem' is among its columns ('answer')"),
    ({}, "no problem: none of 'prompt', 'question' and 'problem' is among its columns (no column)"),
    ({"question": None, "answer": 1}, "'question' must be text, not None"),
    ({"question": 3, "answer": 1}, "'question' must be text, not 3"),
    ({"question": " \n", "answer": 1}, "'question' must be text"),
    ({"question": "\ud800", "answer": 1}, "'question' is not valid Unicode"),
    ({"question": "?"}, "no answer: beside 'question' a row needs 'answer', and it has 'question'"),
    ({"question": "?", "answer": True}, "'answer' must be text or a number, not True"),
    ({"question": "?", "answer": None}, "'answer' must be text or a number, not None"),
    ({"question": "?", "answer": " "}, "'answer' is empty"),
    ({"question": "?", "answer": [1]}, r"'answer' must be text or a number, not [1]"),
    ({"question": "?", "answer": "\udfff"}, "'answer' is not valid Unicode"),
    ('{"question": "?", "answer": NaN}', "'answer' must be text or a number, not nan"),
    ('{"question": "?", "answer": -Infinity}', "'answer' must be text or a number, not -inf"),
    ({"question": "?", "answer": 1, "id": None}, "'id' must be text or a number, not None"),
    ({"question": "?", "answer": 1, "id": [1]}, "'id' must be text or a number, not [1]"),
    ({"question": "?", "answer": 1, "id": "\udfff"}, "'id' is not valid Unicode"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_left_out_with_its_line_and_the_reason(
    tmp_path: Path, row: bytes | str | dict[str, Any], reason: str
) -> None:
    problems = read(write(tmp_path, GOOD, "", row, {"question": "2+2", "answer": 4}))
    assert [p.answer for p in problems.problems] == ["2", "4"]
    (excluded,) = problems.excluded
    assert excluded.where == "line 3"
    assert excluded.reason.startswith(reason)


def test_all_bad_rows_of_a_file_are_counted_in_order(tmp_path: Path) -> None:
    problems = read(write(tmp_path, *(row for row, _ in BAD_ROWS), GOOD))
    assert [e.where for e in problems.excluded] == [f"line {n}" for n in range(1, len(BAD_ROWS) + 1)]
    assert len(problems) == 1


def test_a_question_asked_before_is_left_out_whatever_its_spacing_and_case(tmp_path: Path) -> None:
    rows = [{"question": q, "answer": 1, "id": q} for q in ("Add 1+1", "add 1 + 1", "ADD\t1+1 ", "add 1+2")]
    problems = read(write(tmp_path, *rows))
    assert [p.id for p in problems.problems] == ["Add 1+1", "add 1+2"]
    assert problems.excluded == tuple(Excluded(f"line {n}", "the same question as 'Add 1+1'") for n in (2, 3))


def test_an_id_used_before_is_left_out(tmp_path: Path) -> None:
    problems = read(write(tmp_path, GOOD | {"id": "7"}, {"question": "2+2", "answer": 4, "id": 7}))
    assert len(problems) == 1
    assert problems.excluded == (Excluded("line 2", "id '7' was used before"),)


def test_rows_are_listed_in_the_order_of_the_file_whatever_is_wrong_with_them(tmp_path: Path) -> None:
    problems = read(write(tmp_path, GOOD, GOOD, "{", GOOD, "["))
    assert [e.where for e in problems.excluded] == [f"line {n}" for n in (2, 3, 4, 5)]


def test_a_question_with_several_answers_is_left_out_in_all_its_rows(tmp_path: Path) -> None:
    other = {"question": "2+2", "answer": "4"}
    problems = read(write(tmp_path, GOOD | {"id": "a"}, other, GOOD | {"answer": "3"}, GOOD | {"id": "b"}))
    assert [problem.text for problem in problems.problems] == ["2+2"]
    reason = "the question has the answer '2' in 'a' and the answer '3' in 'sums:3'"
    assert problems.excluded == tuple(Excluded(f"line {n}", reason) for n in (1, 3, 4))


def test_a_question_left_out_for_its_id_does_not_bar_the_same_question_later(tmp_path: Path) -> None:
    other = {"question": "2+2", "answer": 4}
    problems = read(write(tmp_path, GOOD | {"id": "a"}, other | {"id": "a"}, other | {"id": "b"}))
    assert [p.id for p in problems.problems] == ["a", "b"]


def test_a_file_without_a_usable_row_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    path = write(tmp_path, "", {"question": "?", "answer": True}, "{")
    with pytest.raises(
        DataError, match=r"no usable row; line 2: 'answer' must be text or a number, not True"
    ) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl has no usable row \(the file is empty\)"):
        read(tmp_path / "empty.jsonl")


def test_a_missing_file_and_a_folder_are_errors_that_name_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*no\.jsonl: No such file"):
        read(tmp_path / "no.jsonl")
    with pytest.raises(DataError, match="Is a directory"):
        read(tmp_path)


def test_a_binary_file_is_an_error_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "model.jsonl").write_bytes(bytes(range(256)) * 20)
    with pytest.raises(DataError, match="no usable row; line 1: not JSON"):
        read(tmp_path / "model.jsonl")


def test_windows_line_ends_and_a_byte_order_mark_are_no_obstacle(tmp_path: Path) -> None:
    lines = b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n" + b'{"question": "2+2", "answer": 4}'
    problems = read(write(tmp_path, lines))
    assert [p.text for p in problems.problems] == ["1+1", "2+2"]
    assert problems.excluded == ()
