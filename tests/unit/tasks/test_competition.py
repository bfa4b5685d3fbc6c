import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.tasks.arithmetic import addition
from beamline.tasks.competition import Exercise, exercises, subtraction
from beamline.tasks.partition import Pool

POOLS: tuple[Pool, ...] = ("train", "eval", "warmup")


def numbers(exercise: Exercise) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", exercise.question)]


def solved(exercise: Exercise) -> int:
    """The answer, from the text alone and by other means."""
    given_numbers = numbers(exercise)
    match exercise.family:
        case "value":
            return sum(given_numbers)
        case "unknown":
            return next(x for x in range(1000) if x + given_numbers[0] == given_numbers[1])
        case "perimeter":
            return given_numbers[0] * 2 + given_numbers[1] * 2
        case "angle":
            return next(c for c in range(1, 180) if sum(given_numbers) + c == 180)
        case "sequence":
            return range(given_numbers[0], 10_000, given_numbers[1] - given_numbers[0])[2]
        case "integers":
            return len(range(given_numbers[0], given_numbers[1] + 1))
        case "remainder":
            return (given_numbers[0] + given_numbers[1]) % given_numbers[2]
    raise AssertionError(exercise.family)


@pytest.mark.parametrize("pool", POOLS)
def test_answers_are_right(pool: Pool) -> None:
    for exercise in exercises(0, pool, 300):
        assert exercise.answer == solved(exercise), exercise


def test_the_last_step_ends_in_the_answer() -> None:
    for exercise in exercises(0, "train", 200):
        if exercise.family == "remainder":
            digits = exercise.steps[-1]
        else:
            columns = exercise.steps.rsplit(";", 1)[-1].split(",")
            digits = columns[-1][-2:] + "".join(column[-1] for column in reversed(columns[:-1]))
        assert int(digits) == exercise.answer, exercise


def test_families_come_in_turn() -> None:
    families = Counter(exercise.family for exercise in exercises(0, "train", 700))
    assert len(families) == 7
    assert all(70 < count < 130 for count in families.values())


def test_exercises_are_distinct_and_equal_seeds_give_equal_ones() -> None:
    made = exercises(3, "train", 200)
    assert len({exercise.question for exercise in made}) == 200
    assert exercises(3, "train", 200) == made
    assert exercises(4, "train", 200) != made


@pytest.mark.parametrize("pool", POOLS)
def test_fewer_are_the_beginning_of_more(pool: Pool) -> None:
    many = exercises(1, pool, 40)
    assert all(exercises(1, pool, few) == many[:few] for few in range(1, 40))


def test_pools_share_no_exercise_whatever_the_order_of_its_numbers() -> None:
    asked = {
        pool: {(e.family, *sorted(numbers(e))) for seed in (0, 9) for e in exercises(seed, pool, 400)} for pool in POOLS
    }
    assert not asked["train"] & asked["eval"]
    assert not asked["train"] & asked["warmup"]
    assert not asked["eval"] & asked["warmup"]


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_columns_of_a_subtraction_hold_the_difference(a: int, b: int) -> None:
    high, low = max(a, b), min(a, b)
    columns = subtraction(high, low).split(",")
    assert int("".join(column[-1] for column in reversed(columns))) == high - low
    assert columns[-1][-2] == "0"  # nothing is borrowed from beyond the first digit
    for place, column in enumerate(columns):
        left, right = column.split("=")
        top, *taken = map(int, left.split("-"))
        assert (top, taken[0]) == (high // 10**place % 10, low // 10**place % 10)
        assert top - sum(taken) == int(right[1]) - 10 * int(right[0])


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_columns_of_an_addition_hold_the_sum(a: int, b: int) -> None:
    columns = addition(a, b).split(",")
    assert int(columns[-1][-2:] + "".join(column[-1] for column in reversed(columns[:-1]))) == a + b
