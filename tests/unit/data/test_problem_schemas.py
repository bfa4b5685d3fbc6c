"""Rows of other systems, in every format of file, without conversion."""

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from beamline.config.schema import FileSource
from beamline.data import DataError, Excluded, ProblemSet, files, from_rows, load
from beamline.data.files import read_rows, rows_of
from beamline.records import Message

USER = [{"role": "user", "content": "1+1"}]

ROWS: dict[str, dict[str, Any]] = {
    "verl": {
        "data_source": "math_dapo",
        "prompt": USER,
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": "a-1"},
    },
    "skyrl": {"prompt": USER, "env_class": "aime", "reward_spec": {"method": "rule", "ground_truth": "2"}},
    "slime text": {"prompt": "1+1", "label": "2"},
    "slime messages": {"prompt": USER, "label": 2},
    "trl answer": {"prompt": USER, "answer": "2"},
    "trl solution": {"prompt": "1+1", "solution": "2"},
    "trl ground_truth": {"prompt": "1+1", "ground_truth": "2"},
    "plain": {"question": "1+1", "answer": "2"},
}


def read(path: Path) -> ProblemSet:
    return load("set", FileSource(path=path), seed=0, pool="train")


def in_memory(*rows: Any) -> ProblemSet:
    return from_rows("set", rows_of(rows), "rows", "the rows")


def write(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("schema", ROWS)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_every_schema_reads_the_same_from_every_format(tmp_path: Path, schema: str, suffix: str) -> None:
    problems = read(write(tmp_path, suffix, [ROWS[schema]]))
    assert problems == in_memory(ROWS[schema])
    (problem,) = problems.problems
    assert (problem.messages, problem.answer, problem.source) == ((Message("user", "1+1"),), "2", "set")


@pytest.mark.parametrize("schema", ["slime text", "trl solution", "trl ground_truth", "plain"])
def test_text_columns_also_read_the_same_from_csv(tmp_path: Path, schema: str) -> None:
    assert read(write(tmp_path, ".csv", [ROWS[schema]])) == in_memory(ROWS[schema])


def test_capital_letters_in_the_suffix_are_no_obstacle(tmp_path: Path) -> None:
    path = write(tmp_path, ".json", [ROWS["plain"]]).rename(tmp_path / "rows.JSON")
    assert len(read(path)) == 1


def test_other_columns_are_kept() -> None:
    (verl,) = in_memory(ROWS["verl"]).problems
    assert verl.extra == {
        "data_source": "math_dapo",
        "ability": "MATH",
        "reward_model": {"style": "rule"},
        "extra_info": {"index": "a-1"},
    }
    (skyrl,) = in_memory(ROWS["skyrl"]).problems
    assert skyrl.extra == {"env_class": "aime", "reward_spec": {"method": "rule"}}


def test_other_columns_become_what_json_can_hold(tmp_path: Path) -> None:
    odd = {
        "day": datetime.date(2024, 2, 3),
        "price": Decimal("1.50"),
        "raw": b"\x00\xff",
        "nested": [{"x": float("nan"), "y": [True, None]}],
    }
    (problem,) = read(write(tmp_path, ".parquet", [ROWS["plain"] | odd])).problems
    expected = {"day": "2024-02-03", "price": "1.50", "raw": "00ff", "nested": [{"x": "nan", "y": [True, None]}]}
    assert problem.extra == expected
    assert json.loads(json.dumps(problem.extra, allow_nan=False)) == expected


def test_half_a_character_in_another_column_is_spelled_out() -> None:
    (problem,) = in_memory(ROWS["plain"] | {"note": "\ud800", "\udfff": 1}).problems
    assert problem.extra == {"note": "\\ud800", "\\udfff": 1}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "?", "label": "a", "answer": "b", "solution": "c"}, "a"),
        ({"prompt": "?", "label": None, "answer": "b", "solution": "c"}, "b"),
        ({"prompt": "?", "reward_model": {"ground_truth": "d"}, "label": "a"}, "d"),
        ({"prompt": "?", "question": "?", "answer": "b"}, "b"),
    ],
)
def test_of_several_answers_the_first_that_is_given_counts(row: dict[str, Any], answer: str) -> None:
    (problem,) = in_memory(row).problems
    assert problem.answer == answer


def test_a_conversation_keeps_its_turns_and_reasoning() -> None:
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2", "reasoning": "one and one"},
        {"role": "user", "content": "and 1 more?", "reasoning": None},
    ]
    (problem,) = in_memory({"prompt": turns, "label": "3"}).problems
    assert problem.messages == (
        Message("system", "be brief"),
        Message("user", "1+1"),
        Message("assistant", "2", "one and one"),
        Message("user", "and 1 more?"),
    )


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"prompt": "?"},
        "no answer: beside 'prompt' a row needs one of reward_model, reward_spec, label, answer, solution,",
    ),
    ({"prompt": 3, "label": 1}, "'prompt' must be text or a list of messages, not 3"),
    ({"prompt": [], "label": 1}, "'prompt' must be text or a list of messages, not []"),
    ({"prompt": None, "label": 1}, "'prompt' must be text or a list of messages, not None"),
    ({"prompt": ["x"], "label": 1}, "'prompt[0]' must be a message with 'role' and 'content', not 'x'"),
    ({"prompt": [{"content": "x"}], "label": 1}, "'prompt[0].role' must be system, user, assistant or tool, not None"),
    ({"prompt": [{"role": "human", "content": "x"}], "label": 1}, "'prompt[0].role' must be system, user,"),
    ({"prompt": [*USER, {"role": "user"}], "label": 1}, "'prompt[1].content' must be text, not None"),
    (
        {"prompt": [{"role": "user", "content": [{"text": "x"}]}], "label": 1},
        "'prompt[0].content' must be text, not [{",
    ),
    ({"prompt": [{"role": "user", "content": "\ud800"}], "label": 1}, "'prompt[0].content' is not valid Unicode"),
    ({"prompt": [{**USER[0], "tool_calls": [1]}], "label": 1}, "'prompt[0].tool_calls' is not read; a message has"),
    (
        {"prompt": [*USER, {"role": "assistant", "content": "x"}], "label": 1},
        "'prompt' ends with a message of the",
    ),
    ({"prompt": "?", "reward_model": "2"}, "'reward_model' must be an object with 'ground_truth', not '2'"),
    ({"prompt": "?", "reward_model": {"style": "rule"}}, "'reward_model' must be an object with 'ground_truth', not {"),
    ({"prompt": "?", "reward_spec": {"ground_truth": None}}, "'reward_spec.ground_truth' must be text or a number"),
    ({"prompt": "?", "label": [1]}, "'label' must be text or a number, not [1]"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=range(len(BAD)))
def test_a_row_that_fits_no_schema_is_left_out_with_its_number_and_the_reason(row: dict[str, Any], reason: str) -> None:
    problems = in_memory(ROWS["plain"], row)
    assert len(problems) == 1
    (excluded,) = problems.excluded
    assert excluded.where == "row 2"
    assert excluded.reason.startswith(reason)


def test_a_long_value_is_cut_in_the_reason() -> None:
    (excluded,) = in_memory(ROWS["plain"], {"prompt": "?", "label": ["x" * 5000]}).excluded
    assert len(excluded.reason) < 200


def test_a_table_without_the_columns_is_an_error_that_names_those_it_has(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet", [{"text": "1+1", "target": "2"}])
    with pytest.raises(DataError, match=r"no usable row; row 1: no problem: .*\('text', 'target'\)"):
        read(path)


def test_an_empty_cell_of_a_table_is_a_column_that_the_row_does_not_have(tmp_path: Path) -> None:
    rows = [{"id": "a", "question": "1+1", "answer": "2"}, {"id": None, "question": "2+2", "answer": "4"}]
    rows += [{"id": None, "question": "3+3", "answer": None}]
    missing = "no answer: beside 'question' a row needs 'answer', and it has 'question'"
    for suffix in (".parquet", ".csv"):
        problems = read(write(tmp_path, suffix, rows))
        assert [p.id for p in problems.problems] == ["a", "rows:2"]
        assert problems.excluded == (Excluded("row 3", missing),)


def test_rows_of_two_schemas_in_one_table_are_each_read_in_their_own(tmp_path: Path) -> None:
    path = tmp_path / "both.parquet"
    frames = [pl.DataFrame([ROWS["verl"]]), pl.DataFrame([{"question": "2+2", "answer": "4"}])]
    pl.concat(frames, how="diagonal").write_parquet(path)
    assert [p.answer for p in read(path).problems] == ["2", "4"]


def test_row_numbers_go_on_over_the_parts_that_a_table_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BATCH", 7)
    path = tmp_path / "long.parquet"
    answers = ["1" if n % 10 == 0 else "" for n in range(1, 51)]
    pl.DataFrame({"question": [f"{n}" for n in range(50)], "answer": answers}).write_parquet(path, row_group_size=20)
    problems = read(path)
    assert [p.id for p in problems.problems] == [f"long:{n}" for n in (10, 20, 30, 40, 50)]
    assert [e.where for e in problems.excluded] == [f"row {n}" for n in range(1, 50) if n % 10]


def indexed(*indices: Any, ids: tuple[Any, ...] = ()) -> list[str]:
    rows = [{"question": f"{n}?", "answer": 1, "extra_info": {"index": index}} for n, index in enumerate(indices)]
    for row, identity in zip(rows, ids, strict=False):
        if identity is not None:
            row["id"] = identity
    return [problem.id for problem in in_memory(*rows).problems]


def test_ids_are_indices_where_every_row_has_another_one() -> None:
    assert indexed(7, "x", 3) == ["7", "x", "3"]
    assert indexed(7, "x", 7) == ["rows:1", "rows:2", "rows:3"]
    assert indexed(7, None, 3) == ["rows:1", "rows:2", "rows:3"]
    assert indexed(7, True, 3) == ["rows:1", "rows:2", "rows:3"]
    assert indexed(7, 7, 3, ids=("own",)) == ["own", "7", "3"]


def test_a_row_that_is_nested_too_deeply_is_left_out_and_no_other(tmp_path: Path) -> None:
    fine = '{"prompt": "1+1", "answer": "2", "note": ' + "[" * 40 + "]" * 40 + "}"
    deep = '{"prompt": "2+2", "answer": "4", "note": ' + "[" * 900 + "]" * 900 + "}"
    file = tmp_path / "deep.jsonl"
    file.write_text(f"{fine}\n{deep}\n")
    problems = from_rows("deep", read_rows(file), "deep", str(file))
    assert [problem.answer for problem in problems.problems] == ["2"]
    assert problems.excluded == (Excluded("line 2", "'note' is nested more than 50 deep"),)


def test_a_plain_problem_may_be_called_so() -> None:
    (problem,) = from_rows("set", rows_of([{"problem": "1+1?", "answer": "2"}]), "own", "memory").problems
    assert (problem.messages, problem.answer) == ((Message("user", "1+1?"),), "2")
