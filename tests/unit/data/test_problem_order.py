import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.data import DataError, ProblemSet, problem_indices
from beamline.records import Problem
from tests.samples import make_problem


def taken(seed: int, steps: int, per_step: int, problems: int) -> list[int]:
    firsts = range(0, steps * per_step, per_step)
    return list(chain.from_iterable(problem_indices(seed, first, per_step, problems).tolist() for first in firsts))


@given(seed=st.integers(0, 2**63 - 1), per_step=st.integers(1, 12), problems=st.integers(1, 30))
def test_every_epoch_is_a_permutation(seed: int, per_step: int, problems: int) -> None:
    order = taken(seed, -(-3 * problems // per_step), per_step, problems)
    for epoch in range(3):
        assert sorted(order[epoch * problems : (epoch + 1) * problems]) == list(range(problems))


def test_epochs_differ_and_so_do_seeds() -> None:
    order = taken(seed=1, steps=3, per_step=50, problems=50)
    assert order[:50] != order[50:100] != order[100:]
    assert order[:50] != taken(seed=2, steps=1, per_step=50, problems=50)


def test_what_crosses_the_border_takes_the_rest_and_the_beginning() -> None:
    one_by_one = taken(seed=3, steps=12, per_step=1, problems=6)
    assert problem_indices(3, 4, 4, 6).tolist() == one_by_one[4:8]
    assert sorted(one_by_one[:6]) == sorted(one_by_one[6:]) == list(range(6))


def test_more_than_the_set_goes_through_it_more_than_once() -> None:
    order = problem_indices(0, 0, 10, 4).tolist()
    assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]
    assert len(order) == 10


def test_a_place_needs_no_place_before_it() -> None:
    late = problem_indices(5, 7992, 8, 30)
    problem_indices(5, 0, 8, 30)
    assert np.array_equal(problem_indices(5, 7992, 8, 30), late)


@given(cuts=st.lists(st.integers(0, 9), max_size=12))
def test_the_order_is_one_however_many_are_taken_at_a_time(cuts: list[int]) -> None:
    first, found = 0, []
    for count in cuts:
        found += problem_indices(4, first, count, 7).tolist()
        first += count
    assert found == problem_indices(4, 0, first, 7).tolist()


@pytest.mark.parametrize(("first", "expected"), [(0, [5, 3, 1, 4]), (4, [0, 2, 3, 2]), (8, [0, 5, 1, 4])])
def test_the_order_never_changes_between_releases(first: int, expected: list[int]) -> None:
    assert problem_indices(7, first, 4, 6).tolist() == expected


@given(
    seed=st.integers(0, 2**63 - 1),
    difficulties=st.lists(st.sampled_from([-1.5, 0.0, 2.0, 1e300]), min_size=1, max_size=20),
)
def test_every_epoch_begins_with_the_easy_ones_and_is_random_among_equals(seed: int, difficulties: list[float]) -> None:
    size = len(difficulties)
    for epoch in range(3):
        shuffled = problem_indices(seed, epoch * size, size, size).tolist()
        expected = [i for level in sorted(set(difficulties)) for i in shuffled if difficulties[i] == level]
        assert problem_indices(seed, epoch * size, size, size, difficulties).tolist() == expected


def test_equal_difficulties_are_the_random_order() -> None:
    assert problem_indices(7, 3, 9, 6, [2.0] * 6).tolist() == problem_indices(7, 3, 9, 6).tolist()


def set_of(*difficulties: Any) -> ProblemSet:
    return ProblemSet("own", tuple(make_problem(f"p{i}", difficulty=d) for i, d in enumerate(difficulties)))


def test_a_set_in_the_order_of_difficulty_begins_every_pass_anew() -> None:
    ordered = set_of(3, 1, 2.5, 2).easy_first()
    assert [p.text for p in ordered.take(seed=0, first=0, count=8)] == 2 * ["p1", "p3", "p2", "p0"]
    assert [p.text for p in ordered.take(seed=0, first=3, count=3)] == ["p0", "p1", "p3"]


def test_a_difficulty_is_read_where_files_have_it() -> None:
    column, prepared = make_problem("a", difficulty=2), make_problem("b", extra_info={"difficulty": 1.5, "index": 0})
    cell = make_problem("c", difficulty="-3e-1")  # of a CSV file
    assert ProblemSet("own", (column, prepared, cell)).easy_first().difficulties == (2.0, 1.5, -0.3)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (make_problem("x"), "has no difficulty;"),
        (make_problem("x", difficulty=None), "has no difficulty;"),
        (make_problem("x", extra_info="text"), "has no difficulty;"),
        (make_problem("x", difficulty="hard"), "has the difficulty 'hard', which is not a finite number;"),
        (make_problem("x", difficulty="nan"), "has the difficulty 'nan', which is not a finite number;"),
        (make_problem("x", difficulty=math.inf), "has the difficulty inf, which is not a finite number;"),
        (make_problem("x", difficulty=True), "has the difficulty True, which is not a finite number;"),
        (make_problem("x", difficulty=[1]), r"has the difficulty \[1\], which is not a finite number;"),
        (make_problem("x", difficulty=10**400), "has the difficulty 1000+, which is not a finite number;"),
    ],
    ids=range(9),
)
def test_a_problem_without_a_difficulty_is_named_and_what_to_do(wrong: Problem, shown: str) -> None:
    problems = ProblemSet("own", (*set_of(1, 2).problems, wrong))
    with pytest.raises(DataError, match=f"data set 'own': problem 'id of x' {shown}.*use data.order=random"):
        problems.easy_first()
