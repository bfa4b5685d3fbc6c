from typing import Any

import pytest

from beamline.records import Key, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("min_tokens", -1),
        ("min_tokens", 9),
    ],
)
def test_a_value_out_of_its_range_is_an_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{name} must be .*, not {value}"):
        SamplingParams(**{"max_tokens": 8} | {name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"top_p": 1e-9, "min_p": 0.999},
        {"min_tokens": 1},
    ],
)
def test_the_ends_of_the_ranges_belong_to_them(values: dict[str, Any]) -> None:
    assert SamplingParams(1, **values).max_tokens == 1


def test_all_filters_are_off_by_default() -> None:
    params = SamplingParams(4)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.min_tokens) == (1.0, 1.0, 0, 0.0, 0)
    assert not params.record_support


def test_keys_sort_by_split_step_problem_sample_and_attempt() -> None:
    ordered = [
        Key("eval", 2, "a", 0),
        Key("train", 1, "a", 0),
        Key("train", 1, "a", 0, 1),
        Key("train", 1, "a", 1),
        Key("train", 1, "b", 0),
        Key("train", 2, "a", 0),
    ]
    shuffled = [ordered[i] for i in (3, 0, 5, 2, 4, 1)]
    assert sorted(shuffled) == ordered
