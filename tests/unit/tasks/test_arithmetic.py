from collections.abc import Iterable
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.records import Message
from beamline.tasks.arithmetic import asked, generate, text_of, worked_steps
from beamline.tasks.partition import Pool, pool_of

POOLS: tuple[Pool, ...] = ("train", "eval", "warmup")
LEVELS = {1: (2, 1), 2: (2, 2), 3: (3, 2), 4: (4, 2), 5: (3, 3)}


def test_a_problem_asks_for_a_sum_and_knows_its_answer() -> None:
    for problem in generate(0, "train", 20, [3]):
        terms = problem.extra["terms"]
        assert problem.messages == (Message("user", "+".join(map(str, terms))),)
        assert problem.answer == str(sum(terms))
        assert problem.id == f"arithmetic:{problem.text}"
        assert problem.source == "arithmetic"


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_says_how_many_terms_of_how_many_digits(level: int) -> None:
    count, digits = LEVELS[level]
    for problem in generate(0, "train", 15, [level]):
        assert problem.extra["level"] == level
        assert [len(str(term)) for term in problem.extra["terms"]] == [digits] * count


def test_levels_are_drawn_evenly() -> None:
    levels = [problem.extra["level"] for problem in generate(0, "train", 300, [2, 3, 4])]
    assert all(75 < levels.count(level) < 125 for level in (2, 3, 4))


def test_problems_are_distinct_and_equal_seeds_give_equal_problems() -> None:
    problems = generate(3, "train", 100, [2])
    assert len({problem.id for problem in problems}) == 100
    assert generate(3, "train", 100, [2]) == problems
    assert generate(4, "train", 100, [2]) != problems


@pytest.mark.parametrize("pool", POOLS)
def test_a_smaller_request_is_the_beginning_of_a_larger_one(pool: Pool) -> None:
    many = generate(1, pool, 40, [2, 3])
    assert all(generate(1, pool, few, [2, 3]) == many[:few] for few in range(1, 40))


def test_pools_are_disjoint_in_any_order_of_terms_and_for_any_seeds() -> None:
    sums = {
        pool: {tuple(sorted(p.extra["terms"])) for seed in (0, 9) for p in generate(seed, pool, 150, [2])}
        for pool in POOLS
    }
    assert not sums["train"] & sums["eval"]
    assert not sums["train"] & sums["warmup"]
    assert not sums["eval"] & sums["warmup"]


@given(st.lists(st.integers(1, 999), min_size=2, max_size=4))
def test_the_pool_does_not_depend_on_the_order_of_terms(terms: list[int]) -> None:
    assert {pool_of(asked(order)) for order in permutations(terms)} == {pool_of(asked(terms))}


def test_pools_have_the_shares_they_claim() -> None:
    pools = [pool_of(asked((a, b))) for a in range(10, 100) for b in range(a, 100)]
    shares: dict[Pool, float] = {"eval": 1 / 8, "train": 1 / 2, "warmup": 3 / 8}
    assert all(abs(pools.count(pool) / len(pools) - share) < 0.03 for pool, share in shares.items())


def test_pools_never_change_between_releases() -> None:
    expected = {(1, 2): "train", (12, 34): "warmup", (11, 19): "eval", (47, 85, 36): "train"}
    assert {terms: pool_of(asked(terms)) for terms in expected} == expected


def test_more_problems_than_a_pool_has_is_an_error_with_the_number_found() -> None:
    exist = sum(pool_of(asked((a, b))) == "eval" for a in range(1, 10) for b in range(1, 10))
    assert len(generate(0, "eval", exist, [1])) == exist
    with pytest.raises(ValueError, match=rf"levels \[1\] have fewer than {exist + 1} eval problems \(found {exist}\)"):
        generate(0, "eval", exist + 1, [1])


def test_an_unknown_level_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"level 6 does not exist; levels are 1, 2, 3, 4, 5"):
        generate(0, "train", 1, [1, 6])


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=5))
def test_worked_steps_add_up_column_by_column(terms: list[int]) -> None:
    total = terms[0]
    for term, addition in zip(terms[1:], worked_steps(terms).split(";"), strict=True):
        columns = [column.split("=") for column in addition.split(",")]
        addends = [[int(n) for n in left.split("+")] for left, _ in columns]
        sums = [int(right) for _, right in columns]
        assert [sum(a) for a in addends] == sums
        assert number(a[0] for a in addends) == total
        assert number(a[1] for a in addends) == term
        assert [a[2] for a in addends[1:]] == [s // 10 for s in sums[:-1]]
        total += term
        assert number(s % 10 for s in sums) + sums[-1] // 10 * 10 ** len(sums) == total
    assert total == sum(terms)


def number(digits: Iterable[int]) -> int:
    """The number whose digits these are, lowest first."""
    return sum(digit * 10**place for place, digit in enumerate(digits))


@pytest.mark.parametrize("level", LEVELS)
def test_worked_steps_of_a_level_have_one_length(level: int) -> None:
    assert len({len(worked_steps(p.extra["terms"])) for p in generate(0, "train", 20, [level])}) == 1


def test_worked_steps_are_written_as_documented() -> None:
    assert worked_steps([59, 64, 73]) == "9+4=13,5+6+1=12;3+3=06,2+7+0=09,1+0+0=01"


@given(st.lists(st.integers(1, 999), min_size=2, max_size=4))
def test_the_text_is_the_sum_as_python_reads_it(terms: list[int]) -> None:
    assert sum(map(int, text_of(terms).split("+"))) == sum(terms)
