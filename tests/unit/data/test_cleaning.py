"""Cleaning is exact: against a plain loop, in one piece or in parts, from memory or from a file."""

import io
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.data.cleaning import Cleaned, clean, distinct
from beamline.data.files import rows_of
from beamline.data.wording import AFTER, BEFORE, dapo


def row(text: str = "1+1", answer: Any = "2", index: Any = 0, **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    } | columns


def cleaned(*rows: Any, **options: Any) -> Cleaned:
    return clean(rows_of(rows), "a source", **options)


def in_parts(rows: list[dict[str, Any]], size: int) -> Cleaned:
    """The way that a Parquet file takes."""
    frame = pl.DataFrame(rows)
    found, read = distinct((frame[start : start + size] for start in range(0, len(frame), size)), lambda rows: None)
    return clean(found, "a source", read=read)


def naive(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int, int]:
    """What stays, how many are duplicates, and how many are dropped for contradictory answers."""
    unique: list[dict[str, Any]] = []
    columns = ("data_source", "prompt", "ability", "reward_model")
    for candidate in rows:
        if all(any(candidate[column] != other[column] for column in columns) for other in unique):
            unique.append(candidate)
    stay = []
    for candidate in unique:
        answers = [r["reward_model"]["ground_truth"] for r in unique if r["prompt"] == candidate["prompt"]]
        if all(answer == answers[0] for answer in answers):
            stay.append(candidate)
    return stay, len(rows) - len(unique), len(unique) - len(stay)


TEXT = st.sampled_from(["a", "b", "a ", "A", "é", "e\u0301", "ab", "\n"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"content": TEXT.filter(str.strip), "role": st.sampled_from(["user", "system"])}),
    min_size=1,
    max_size=2,
).filter(lambda messages: messages[-1]["role"] == "user")
ROW = st.fixed_dictionaries(
    {
        "data_source": st.sampled_from(["x", "y"]),
        "prompt": MESSAGES,
        "ability": st.sampled_from(["MATH", "LOGIC"]),
        "reward_model": st.fixed_dictionaries(
            {"ground_truth": st.sampled_from(["1", "2", " 1", "01"]), "style": st.sampled_from(["rule", "other"])}
        ),
    }
)


@given(rows=st.lists(ROW, min_size=1, max_size=40), size=st.integers(1, 41))
def test_cleaning_is_what_a_plain_loop_does(rows: list[dict[str, Any]], size: int) -> None:
    rows = [row | {"extra_info": {"index": index}} for index, row in enumerate(rows)]
    stay, duplicates, conflicting = naive(rows)
    for result in (cleaned(*rows), in_parts(rows, size)):
        counts = result.counts()
        assert result.frame().to_dicts() == stay
        assert (counts["in"], counts["out"]) == (len(rows), len(stay))
        assert counts["exact_duplicates"] == duplicates
        assert counts["conflicting_answers"]["rows"] == conflicting


def test_the_first_appearance_stays_in_its_place() -> None:
    rows = [row(text, index=index) for index, text in enumerate("cabacbdc")]
    for result in (cleaned(*rows), in_parts(rows, 3)):
        assert [r.prompt[0].content for r in result.rows] == ["c", "a", "b", "d"]
        assert [r.extra_info for r in result.rows] == [{"index": index} for index in (0, 1, 2, 6)]


def test_answers_are_compared_as_text_that_is_nowhere_trimmed() -> None:
    result = cleaned(row("a", "1"), row("a", "1 "), row("b", 2), row("b", "2"))
    assert [r.prompt[0].content for r in result.rows] == ["b"]
    (conflict,) = result.conflicts
    assert (conflict.answers, conflict.rows) == (("1", "1 "), 2)


def test_a_prompt_with_several_answers_is_dropped_in_all_its_rows() -> None:
    rows = [row("a", "1"), row("b", "5"), row("a", "2"), row("a", "1", data_source="other"), row("a", "1")]
    result = cleaned(*rows)
    assert [r.prompt[0].content for r in result.rows] == ["b"]
    assert result.counts()["conflicting_answers"] == {
        "rows": 3,
        "prompts": 1,
        "examples": [{"prompt": "a", "answers": ("1", "2"), "rows": 3}],
    }


def test_a_conflict_shows_the_problem_without_its_wording() -> None:
    (conflict,) = cleaned(row(dapo("How many?"), "1"), row(dapo("How many?"), "2")).conflicts
    assert conflict.prompt == "How many?"


def test_every_row_is_accounted_for() -> None:
    rows = [row("a"), row("a"), row("b", "1"), row("b", "2"), row("", "3"), row("c", None), row("d", ability=3), 7]
    counts = cleaned(*rows).counts()
    assert counts["unusable"]["examples"] == [
        {"where": "row 5", "reason": "'prompt[0].content' must be text, not ''"},
        {"where": "row 6", "reason": "'reward_model.ground_truth' must be text or a number, not None"},
        {"where": "row 7", "reason": "'ability' must be text, not 3"},
        {"where": "row 8", "reason": "a int, not an object with a problem and its answer"},
    ]
    parts = (counts["exact_duplicates"], counts["conflicting_answers"]["rows"], counts["unusable"]["rows"])
    assert (counts["in"], parts, counts["out"]) == (8, (1, 2, 4), 1)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_rows_that_cannot_be_used_are_duplicates_of_each_other_on_both_ways(size: int) -> None:
    rows = [row("", index=1), row("a"), row("", index=2), row("a", None), row("a", None), row("", "3")]
    counts = cleaned(*rows).counts()
    assert (counts["exact_duplicates"], counts["unusable"]["rows"], counts["out"]) == (2, 3, 1)
    assert in_parts(rows, size).counts() == counts


def test_other_schemas_get_the_columns_of_dapo() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "1+1"}], "label": "2"},
        {"question": "2+2", "answer": 4, "id": "mine", "level": 3},
        {"prompt": "3+3", "reward_spec": {"method": "rule", "ground_truth": "6"}, "extra_info": {"index": "i"}},
    ]
    assert cleaned(*rows).frame().to_dicts() == [
        {
            "data_source": "a source",
            "prompt": [{"content": text, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": info,
        }
        for text, answer, info in (
            ("1+1", "2", {"index": "1", "level": None, "reward_spec": None}),
            ("2+2", "4", {"index": "mine", "level": 3, "reward_spec": None}),
            ("3+3", "6", {"index": "i", "level": None, "reward_spec": {"method": "rule"}}),
        )
    ]


def test_the_wording_is_put_around_the_last_message_of_the_user_alone() -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    result = cleaned(row(prompt=turns), row(dapo("2+2")), wording="dapo")
    assert [[m.content for m in r.prompt] for r in result.rows] == [
        ["be brief", f"{BEFORE}\n\n1+1\n\n{AFTER}"],
        [f"{BEFORE}\n\n2+2\n\n{AFTER}"],
    ]


def test_rows_that_only_their_wording_told_apart_are_duplicates_once_it_is_the_same() -> None:
    rows = [row("1+1"), row(dapo("1+1"))]
    assert (len(cleaned(*rows).rows), len(cleaned(*rows, wording="dapo").rows)) == (2, 1)


def test_reasoning_of_past_turns_is_kept() -> None:
    turns = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2", "reasoning": "one and one"},
        {"role": "user", "content": "+1"},
    ]
    prompts = cleaned({"prompt": turns, "label": 3}, {"prompt": "5+5", "label": 10}).frame()["prompt"].to_list()
    assert prompts[0] == [{"content": t["content"], "role": t["role"], "reasoning": t.get("reasoning")} for t in turns]
    assert prompts[1] == [{"content": "5+5", "role": "user", "reasoning": None}]


def infos(*infos: Any) -> list[Any]:
    """The additional information of some rows, through a file."""
    frame = cleaned(*(row(str(n), extra_info=info) for n, info in enumerate(infos))).frame()
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    buffer.seek(0)
    return [{k: v for k, v in info.items() if k != "index"} for info in pl.read_parquet(buffer)["extra_info"]]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([{"a": 1}, {"b": "x"}], [{"a": 1, "b": None}, {"a": None, "b": "x"}]),
        ([{"a": {"x": [1]}}, {"a": None}], [{"a": {"x": [1]}}, {"a": None}]),
        ([{"a": 1}, {"a": 1.5}], [{"a": "1"}, {"a": "1.5"}]),
        ([{"a": 1}, {"a": True}], [{"a": "1"}, {"a": "true"}]),
        ([{"a": {"x": 1}}, {"a": {"y": 2}}], [{"a": '{"x": 1}'}, {"a": '{"y": 2}'}]),
        ([{"a": [{"x": 1}]}, {"a": [{"x": "s"}]}], [{"a": '[{"x": 1}]'}, {"a": '[{"x": "s"}]'}]),
        ([{"a": {}}, {"a": [{}]}], [{"a": "{}"}, {"a": "[{}]"}]),
        ([{"a": []}, {}], [{"a": "[]"}, {"a": None}]),
        ([{"a": None}, {}], [{"a": None}, {"a": None}]),
        ([{"a": 10**30}, {"a": 1}], [{"a": str(10**30)}, {"a": "1"}]),
        ([{"": 1}, {"a.b": 2}], [{"": 1, "a.b": None}, {"": None, "a.b": 2}]),
        (["text", None], [{"extra_info": "text"}, {"extra_info": None}]),
    ],
    ids=range(12),
)
def test_additional_information_of_any_kind_is_kept_as_it_is_or_as_json(given: list[Any], kept: list[Any]) -> None:
    assert infos(*given) == kept
