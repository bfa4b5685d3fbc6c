"""Mixtures: shares that are exact, epochs of each part, and a place that needs no place before it."""

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.config import ConfigError, load_config
from beamline.data import DataError, Excluded, Part, ProblemSet, mixture
from beamline.data.order import mixed_indices, turns
from tests.samples import make_problem

WEIGHTS = st.lists(st.fractions(Fraction(1, 50), 50, max_denominator=50), min_size=1, max_size=5)


def taken(seed: int, steps: int, per_step: int, parts: list[Part]) -> list[int]:
    return [int(i) for step in range(steps) for i in mixed_indices(seed, step * per_step, per_step, parts)]


def parts_of(*sizes: int, weights: tuple[int, ...] | None = None) -> list[Part]:
    return [Part(f"p{i}", Fraction((weights or sizes)[i]), size) for i, size in enumerate(sizes)]


@given(weights=WEIGHTS)
def test_shares_are_exact_over_a_period_and_near_at_every_place(weights: list[Fraction]) -> None:
    total, seen = sum(weights), Counter[int]()
    for place, (part, nth) in enumerate(islice(turns(weights, 0), 120), start=1):
        assert nth == seen[part]
        seen[part] += 1
        shares = [place * weight / total for weight in weights]
        near = [Fraction(1, 2) + Fraction(len(weights), 2) * weight / total for weight in weights]
        assert all(abs(seen[i] - share) <= near[i] for i, share in enumerate(shares))
        if all(share.denominator == 1 for share in shares):
            assert [seen[i] for i in range(len(weights))] == shares


@given(weights=WEIGHTS, first=st.integers(0, 150))
def test_turns_can_begin_anywhere(weights: list[Fraction], first: int) -> None:
    assert list(islice(turns(weights, first), 20)) == list(islice(turns(weights, 0), first, first + 20))


def test_turns_can_begin_where_a_part_is_more_than_one_behind_its_share() -> None:
    weights = [Fraction(9745), *[Fraction(51)] * 5]
    assert Counter(part for part, _ in islice(turns(weights, 0), 100))[0] == 96  # and its share is 97.45
    assert list(islice(turns(weights, 100), 20)) == list(islice(turns(weights, 0), 100, 120))


def test_turns_begin_at_once_in_a_run_without_end() -> None:
    weights = [Fraction("0.7"), Fraction("0.2"), Fraction("0.1")]
    late = list(islice(turns(weights, 10**15), 10))
    assert Counter(part for part, _ in late) == {0: 7, 1: 2, 2: 1}
    assert min(nth for part, nth in late if part == 0) == 7 * 10**14


def test_the_parts_take_turns_within_a_step() -> None:
    assert [part for part, _ in islice(turns([Fraction(3), Fraction(1)], 0), 8)] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_each_part_is_passed_through_in_epochs_of_its_own() -> None:
    parts = parts_of(6, 5, weights=(3, 1))
    order = taken(seed=1, steps=25, per_step=8, parts=parts)
    first, second = [i for i in order if i < 6], [i - 6 for i in order if i >= 6]
    assert (len(first), len(second)) == (150, 50)
    assert all(sorted(first[n : n + 6]) == list(range(6)) for n in range(0, 150, 6))
    assert all(sorted(second[n : n + 5]) == list(range(5)) for n in range(0, 50, 5))
    assert len({tuple(first[n : n + 6]) for n in range(0, 150, 6)}) > 10


def test_every_step_has_the_shares_when_they_are_whole() -> None:
    parts = parts_of(40, 40, 40, weights=(5, 2, 1))
    for step in range(29):
        counts = Counter(int(i) // 40 for i in mixed_indices(3, 16 * step, 16, parts))
        assert counts == {0: 10, 1: 4, 2: 2}


@given(seed=st.integers(0, 2**63 - 1), first=st.integers(0, 300), count=st.integers(0, 9))
def test_a_place_needs_no_place_before_it(seed: int, first: int, count: int) -> None:
    parts = parts_of(7, 3, 5, weights=(4, 1, 2))
    assert mixed_indices(seed, first, count, parts).tolist() == taken(seed, 1, first + count, parts)[first:]


def test_the_order_is_one_however_many_are_taken_at_a_time() -> None:
    parts = parts_of(7, 3, weights=(2, 1))
    assert taken(4, 30, 1, parts) == taken(4, 6, 5, parts) == taken(4, 1, 30, parts)


def test_the_order_of_a_part_depends_on_no_other_part() -> None:
    alone, together = parts_of(9), parts_of(9, 4, weights=(2, 3))
    assert [i for i in taken(5, 10, 9, together) if i < 9] == taken(5, 4, 9, alone)


def test_the_order_never_changes_between_releases() -> None:
    parts = [Part("a", Fraction("0.7"), 4), Part("b", Fraction("0.3"), 3)]
    taken_from = {first: mixed_indices(7, first, 5, parts).tolist() for first in (0, 5, 4995)}
    assert taken_from == {0: [0, 6, 1, 2, 3], 5: [5, 3, 1, 4, 2], 4995: [6, 1, 3, 5, 0]}


def test_easy_ones_come_first_within_each_part() -> None:
    parts, difficulties = parts_of(5, 4, weights=(1, 1)), [3.0, 1.0, 3.0, 2.0, 1.0, 30.0, 10.0, 20.0, 40.0]
    order = mixed_indices(2, 0, 40, parts, difficulties).tolist()
    first, second = [i for i in order if i < 5], [i for i in order if i >= 5]
    assert second == 5 * [6, 7, 5, 8]
    assert [difficulties[i] for i in first] == 4 * [1.0, 1.0, 2.0, 3.0, 3.0]
    assert {tuple(first[n : n + 2]) for n in range(0, 20, 5)} == {(1, 4), (4, 1)}


def set_of(name: str, *questions: str) -> ProblemSet:
    return ProblemSet(name, tuple(make_problem(question) for question in questions))


def test_a_mixture_has_the_problems_of_its_parts_under_their_names() -> None:
    mixed = mixture("train", [(set_of("a", "1", "2"), 0.7), (set_of("b", "3"), 0.3)])
    assert [p.id for p in mixed.problems] == ["a/id of 1", "a/id of 2", "b/id of 3"]
    assert mixed.parts == (Part("a", Fraction(7, 10), 2), Part("b", Fraction(3, 10), 1))
    assert Counter(p.id[0] for p in mixed.take(seed=0, first=20, count=10)) == {"a": 7, "b": 3}


def test_a_problem_of_two_parts_stays_in_the_first_and_is_counted() -> None:
    first, second = set_of("a", "1 + 1", "2"), set_of("b", "3", "1+1", "4")
    second = ProblemSet("b", second.problems, (Excluded("line 9", "not JSON"),))
    mixed = mixture("train", [(first, 1.0), (second, 1.0)])
    assert [part.problems for part in mixed.parts] == [2, 2]
    assert [p.text for p in mixed.problems] == ["1 + 1", "2", "3", "4"]
    assert mixed.excluded == (
        Excluded("b, line 9", "not JSON"),
        Excluded("b, id of 1+1", "the same question as 'a/id of 1 + 1'"),
    )


def test_a_mixture_is_ordered_within_its_parts_by_difficulty() -> None:
    sets = [ProblemSet(name, tuple(make_problem(f"{name}{d}", difficulty=d) for d in (2, 3, 1))) for name in "ab"]
    mixed = mixture("train", [(sets[0], 1.0), (sets[1], 1.0)]).easy_first()
    assert [p.text for p in mixed.take(seed=0, first=0, count=6)] == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_a_part_without_a_problem_of_its_own_is_an_error() -> None:
    with pytest.raises(DataError, match="part 'b' has no problem that is not in an earlier part too"):
        mixture("train", [(set_of("a", "1", "2"), 1.0), (set_of("b", "2"), 1.0)])


def test_a_single_set_has_the_order_that_it_always_had() -> None:
    single = set_of("train", *"abcdef")
    assert [p.text for p in single.take(seed=7, first=0, count=4)] == ["f", "d", "b", "e"]


RECIPE = """
data:
  train:
    source: mixture
    parts:
      dapo: {weight: 0.7, data: {source: file, path: dapo.parquet}}
      sums: {weight: 0.3, data: {source: arithmetic}}
"""


def config_errors(folder: Path, text: str, *overrides: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "recipe.yaml", overrides)
    return str(caught.value)


def test_a_mixture_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    config = load_config(tmp_path / "recipe.yaml", ["data.train.parts.sums.weight=2.5"])
    dumped = config.model_dump(mode="json")["data"]["train"]["parts"]
    assert {name: part["weight"] for name, part in dumped.items()} == {"dapo": 0.7, "sums": 2.5}
    assert dumped["dapo"]["data"] == {"source": "file", "path": "dapo.parquet"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.parts.sums.weight=0", "data.train.parts.sums.weight=0: expected number > 0"),
        ("data.train.parts.sums.weight=-1", "data.train.parts.sums.weight=-1: expected number > 0"),
        ("data.train.parts.sums.weight=.inf", "expected a finite number"),
        ("data.train.parts.sums.data.source=mixture", 'data.train.parts.sums.data.source="mixture": expected'),
        ("data.train.parts={}", "a mixture has at least two parts, and this one has 0"),
        ("data.train.parts={a: {data: {source: arithmetic}}}", "a mixture has at least two parts, and this one has 1"),
        ("data.train.parts.a={weight: 1}", "data.train.parts.a.data: is required"),
    ],
)
def test_a_wrong_mixture_is_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in config_errors(tmp_path, RECIPE, override)


def test_a_name_of_a_part_is_one_that_a_file_could_have(tmp_path: Path) -> None:
    assert "data.train.parts" in config_errors(tmp_path, RECIPE.replace("sums:", "'a/b':"))
