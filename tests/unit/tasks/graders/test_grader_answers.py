"""Expected answers that cannot be used, what is reported as parsed, and the places where graders differ."""

import pytest

from beamline.tasks.graders import GRADERS, GraderName, unusable_answer


@pytest.mark.parametrize(
    ("grader", "answer"),
    [
        ("integer", "34"),
        ("integer", "-034"),
        ("integer", "1,234"),
        ("integer", "$34$"),
        ("integer", "34.0"),
        ("math", "34"),
        ("math", "\\frac{1}{2}"),
        ("math", "(1, 2]"),
        ("math", "\\text{Evelyn}"),
        ("math", "June 20"),
        ("math", "2^{2021}"),
        ("math", "2021^{2021}"),
        ("math", "2021!"),
        ("math", "\\sum_{k=1}^{n} \\frac{1}{k}"),
        ("dapo_strict", "34"),
        ("exact", "anything at all"),
    ],
)
def test_answers_that_can_be_judged(grader: GraderName, answer: str) -> None:
    assert unusable_answer(grader, answer) is None
    assert GRADERS[grader](f"Answer: {answer}" if grader != "exact" else answer, answer).correct


@pytest.mark.parametrize(
    ("grader", "answer", "reason"),
    [
        ("integer", "1/2", "not an integer: '1/2'"),
        ("integer", "x", "not an integer: 'x'"),
        ("integer", "3, 4", "not an integer"),
        ("integer", "", "the answer is empty"),
        ("math", " ", "the answer is empty"),
        ("math", "\\frac{1}{", "cannot|can be judged"),
        ("math", "\\frac{1}{0}", "division by zero"),
        ("math", "3 4", "left over: '4'"),
        (
            "math",
            "the answer depends on the choice of the basis, see chapter 4",
            "a word: 'the'",
        ),
        ("math", "9" * 2_000, "over 1000 characters"),
        ("math", "9^{9^{9^9}}", "too large"),
        ("dapo_strict", "units", "nothing is left of 'units'"),
        ("exact", "\n", "the answer is empty"),
    ],
)
def test_answers_that_cannot_be_judged_are_named_with_the_reason(grader: str, answer: str, reason: str) -> None:
    found = unusable_answer(grader, answer)
    assert found is not None
    assert any(part in found for part in reason.split("|"))


def test_an_unknown_grader_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no grader is called 'maths'; there are math, integer, dapo_strict, exact"):
        unusable_answer("maths", "34")


@pytest.mark.parametrize(
    ("grader", "responses", "parsed"),
    [
        ("math", ("34", "Answer: 034", "\\boxed{34}", "Answer: $x = 34$ because", "Answer: 34 cm"), "34"),
        ("math", ("1/2", "Answer: 0.50", "\\boxed{\\frac{2}{4}}", "Answer: ½"), "1/2"),
        ("math", ("Answer: 1, 2", "Answer: 2 and 1", "\\boxed{\\{1,2\\}}", "Answer: x=1 or x=2"), "{1, 2}"),
        ("math", ("Answer: (1,2)", "Answer: (1, 4/2)"), "(1, 2)"),
        ("math", ("Answer: [1,2)", "Answer: 1 \\le x < 2"), "[1, 2)"),
        ("math", ("Answer: Yes", "Answer: **yes**."), "yes"),
        ("math", ("Answer: (B)", "\\boxed{\\textbf{(B)}\\ 34}"), "B"),
        ("math", ("Answer: 2x+1", "Answer: $1 + 2x$", "Answer: y = 2x + 1"), "((2*x) + 1)"),
        ("math", ("Answer: 50%", "\\boxed{50\\%}"), "50%"),
        ("math", ("", "Answer: 34 or maybe 35", "There are 34 primes below 140."), None),
        ("integer", ("34", "Answer: 034", "Answer: 34.0"), "34"),
        ("integer", ("", "Answer: 1/2", "Answer: 3, 4", "Answer: maybe 34"), None),
        ("dapo_strict", ("Answer: $34$", "Answer: 34 degrees"), "34"),
        ("dapo_strict", ("34", "\\boxed{34}"), None),
        ("exact", (" 34\n", "34"), "34"),
        ("exact", ("", " \n"), None),
    ],
)  # fmt: skip
def test_equal_answers_are_reported_with_equal_text(
    grader: GraderName, responses: tuple[str, ...], parsed: str | None
) -> None:
    assert {GRADERS[grader](response, "7").parsed for response in responses} == {parsed}


def test_a_wrong_answer_is_reported_too() -> None:
    assert GRADERS["math"]("Answer: 35", "34").parsed == "35"
    assert not GRADERS["math"]("Answer: 35", "34").correct


def test_exact_compares_texts() -> None:
    exact = GRADERS["exact"]
    assert exact(" 34\n", "34").correct
    assert not exact("34.", "34").correct
    assert not exact("034", "34").correct
    assert not exact("", "").correct


def test_a_rounding_is_wrong_and_a_decimal_that_is_the_value_is_right() -> None:
    math = GRADERS["math"]
    assert not math("Answer: 0.333333333333333333", "1/3").correct
    assert not math("Answer: 1.4142135623730950488016887242", "\\sqrt{2}").correct
    assert not math("Answer: 3.14159265358979323846264338327950288", "\\pi").correct
    assert math("Answer: 0.125", "1/8").correct


def test_a_difference_far_behind_the_point_is_a_difference() -> None:
    assert not GRADERS["math"]("Answer: \\sqrt{2} + 10^{-60}", "\\sqrt{2}").correct
    assert not GRADERS["math"]("Answer: 2021! + 1", "2021!").correct
    assert GRADERS["math"]("Answer: 2021 \\cdot 2020!", "2021!").correct


def test_expressions_without_a_value_are_wrong_and_no_failure() -> None:
    math = GRADERS["math"]
    for response in (
        "\\infty - \\infty",
        "\\ln 0",
        "\\tan\\frac{\\pi}{2}",
        "0^{x}",
        "\\frac{x}{x-x}",
        "\\binom{x}{-1}",
        "i^i",
    ):
        for truth in ("\\sqrt{2}", "x", "\\infty", "\\ln 2"):
            assert not math(f"Answer: {response}", truth).correct


def test_the_expected_answer_alone_decides_that_a_formula_is_left_to_math_verify() -> None:
    math = GRADERS["math"]
    assert math("Answer: $\\int_0^1 x \\, dx$", "\\int_{0}^{1} x dx").correct
    assert not math("Answer: \\int_0^1 2x \\, dx", "1").correct
    assert not math("Answer: \\sum_{k=1}^{3} k", "\\sqrt{36}").correct


@pytest.mark.parametrize(
    ("response", "readings"),
    [
        ("1/2x", ("\\frac{x}{2}", "\\frac{1}{2x}")),
        ("1/2\\pi", ("\\frac{\\pi}{2}", "\\frac{1}{2\\pi}")),
        ("1\\frac{3}{2}", ("5/2", "3/2")),
        ("2 3/2", ("7/2", "3")),
        ("3 4", ("34", "12", "7")),
        ("30–40", ("-10", "35", "30")),
        ("\\sqrt 34", ("\\sqrt{34}", "4\\sqrt{3}")),
        ("\\frac123", ("\\frac{3}{2}", "\\frac{1}{23}")),
        ("2^3^2", ("512", "64")),
        ("34!!", ("34", "34!")),
        ("\\log 100", ("2", "\\ln 100")),
    ],
)
def test_notation_with_two_readings_is_right_for_neither(response: str, readings: tuple[str, ...]) -> None:
    for truth in readings:
        assert unusable_answer("math", truth) is None
        assert not GRADERS["math"](f"Answer: {response}", truth).correct
