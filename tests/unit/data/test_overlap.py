"""When two problems are the same, and what happens when evaluation asks what is trained on."""

import pytest

from beamline.data import DataError, ProblemSet, check_disjoint
from beamline.data.overlap import comparable
from beamline.data.wording import dapo
from beamline.records import Message, Problem
from tests.samples import make_problem


def problem(*messages: tuple[str, str]) -> Problem:
    return Problem("id", tuple(Message(role, text) for role, text in messages), "1", "test")  # type: ignore[arg-type]


def same(a: str, b: str) -> bool:
    return comparable(make_problem(a)) == comparable(make_problem(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Find  $x$ .", "find $ x $."),
        (r"\dfrac{1}{2}+\tfrac13", r"\frac{1}{2} + \frac13"),
        (r"\left( x \right)", "(x)"),
        (r"\left\{x\right\}", r"\{ x \}"),
        (r"$x\,y\;z\!$", r"\(x\quad y~z\)"),
        (r"\[x=1\]", "$$x = 1$$"),
        ("How many?", dapo("how  many ?")),
    ],
)
def test_looks_case_spacing_and_wording_make_no_other_problem(a: str, b: str) -> None:
    assert same(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("12 3", "1 23"),
        ("x y", "xy"),
        ("1-2", "1+2"),
        (r"\leftarrow", r"\rightarrow"),
        (r"\frac12", r"\frac21"),
        ("{x}", "(x)"),
        ("x²", "x2"),
        (dapo("How many?"), dapo("How much?")),
    ],
)
def test_what_says_something_else_is_another_problem(a: str, b: str) -> None:
    assert not same(a, b)


def test_a_system_message_makes_no_other_problem_and_a_turn_does() -> None:
    plain, asked = problem(("user", "1+1")), problem(("system", "be brief"), ("user", "1+1"))
    longer = problem(("user", "1+1"), ("assistant", "2"), ("user", "and 1?"))
    assert comparable(plain) == comparable(asked) != comparable(longer)


TRAIN = ProblemSet("train", tuple(make_problem(text) for text in ("1+1", "2+2", "3+3")))
WORDED = ProblemSet("aime", (make_problem(dapo("2 + 2")), make_problem(dapo("4+4")), make_problem("3+3")))
OTHER = ProblemSet("other", (make_problem("5+5"),))


def test_overlap_is_an_error_that_says_how_much_and_what_to_do() -> None:
    with pytest.raises(DataError) as caught:
        check_disjoint(TRAIN, OTHER, WORDED)
    message = str(caught.value)
    assert message.startswith("2 of 3 problems of evaluation set 'aime' are also trained on, first 'id of Solve")
    assert "(training problem 'id of 2+2'): '2 + 2'; remove them" in message
    assert message.endswith("data.allow_overlap=true")


def test_overlap_that_is_allowed_is_counted() -> None:
    assert check_disjoint(TRAIN, OTHER, WORDED, allow=True) == {"other": 0, "aime": 2}
    assert check_disjoint(TRAIN) == {}
