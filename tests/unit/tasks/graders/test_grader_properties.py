"""Any value, written in any of the supported ways: the right one is accepted, every other one is not."""

from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from beamline.tasks.graders import GRADERS

math, integer = GRADERS["math"], GRADERS["integer"]

WRAPPERS = (
    "{}",
    "${}$",
    "\\({}\\)",
    "$${}$$",
    "\\[{}\\]",
    "**{}**",
    "$\\mathbf{{{}}}$",
    "\\text{{{}}}",
    " {} ",
    "{{{}}}",
)
ANNOUNCED = (
    "{}",
    "Answer: {}",
    "answer : {}",
    "Answer: {}.",
    "**Answer:** {}",
    "Final answer: {}",
    "The final answer is {}.",
    "Answer: x = {}",
    "Answer:\n{}",
    "Some steps.\n\nAnswer: {}",
    "Answer: 17\n\nAnswer: {}",
    "Answer: {}, because of symmetry.",
    "\\boxed{{{}}}",
    "So it is $\\boxed{{{}}}$.",
    "\\boxed{{17}}\n\nBut we have to go on from there to the end.\n\n$$\\boxed{{{}}}$$",
    "Answer: \\boxed{{{}}}",
    "## Answer\n\n{}",
    "Answer: {}</s>",
    "Answer: {}" + " " * 400,
    "We add.\n\n{}",
)
SEPARATORS = ("", ",", "\\,", "{,}", ",\\!")
UNITS = ("", " cm", "\\text{ cm}", " apples", "^\\circ", " degrees")
VALUES = st.integers(-(10**12), 10**12) | st.integers(-1100, 1100)
FRACTIONS = st.builds(Fraction, st.integers(-300, 300), st.integers(1, 60))


@st.composite
def written_integers(draw: st.DrawFn, value: int) -> str:
    separator = draw(st.sampled_from(SEPARATORS))
    digits = f"{abs(value):,}".replace(",", separator) if separator else str(abs(value))
    zeros = "0" * draw(st.integers(0, 2)) if not separator else ""
    sign = draw(st.sampled_from(("-", "−"))) if value < 0 else draw(st.sampled_from(("", "", "+")))
    return sign + zeros + digits


@st.composite
def written_fractions(draw: st.DrawFn, value: Fraction) -> str:
    factor = draw(st.integers(1, 5))
    top, bottom = abs(value.numerator) * factor, value.denominator * factor
    sign = "-" if value < 0 else ""
    ways = [f"{sign}{top}/{bottom}", *(f"{sign}\\{name}{{{top}}}{{{bottom}}}" for name in ("frac", "dfrac", "tfrac"))]
    ways.append(f"\\frac{{{sign}{top}}}{{{bottom}}}")
    if top < 10 and bottom < 10:
        ways.append(f"{sign}\\frac{top}{bottom}")
    whole, rest = divmod(top, bottom)
    if whole and rest:
        ways += [f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}", f"{sign}{whole} {rest}/{bottom}"]
    if value.denominator in (1, 2, 4, 5, 8, 10, 20, 40):
        ways += [str(float(value)), f"{float(value):.5f}", f"{float(value * 100)}\\%"]
    return draw(st.sampled_from(ways))


@st.composite
def responses(draw: st.DrawFn, value: Fraction) -> str:
    if value.denominator == 1:
        text = draw(written_integers(value.numerator)) + draw(st.sampled_from(UNITS))
    else:
        text = draw(written_fractions(value))
    return draw(st.sampled_from(ANNOUNCED)).format(draw(st.sampled_from(WRAPPERS)).format(text))


@settings(max_examples=250)
@given(value=VALUES, data=st.data())
def test_an_integer_is_right_however_it_is_written(value: int, data: st.DataObject) -> None:
    response = data.draw(responses(Fraction(value)))
    assert math(response, str(value)) == integer(response, str(value))
    assert integer(response, str(value)).correct
    assert integer(response, str(value)).parsed == str(value)


@settings(max_examples=250)
@given(value=FRACTIONS, data=st.data())
def test_a_fraction_is_right_however_it_is_written(value: Fraction, data: st.DataObject) -> None:
    assume(value.denominator > 1)
    assert math(data.draw(responses(value)), data.draw(written_fractions(value))).correct


@settings(max_examples=250)
@given(truth=FRACTIONS, said=FRACTIONS, data=st.data())
def test_another_value_is_wrong_however_it_is_written(truth: Fraction, said: Fraction, data: st.DataObject) -> None:
    assume(truth not in (said, said * 100, said / 100))
    expected = data.draw(written_integers(truth.numerator) if truth.denominator == 1 else written_fractions(truth))
    response = data.draw(responses(said))
    assert not math(response, expected).correct
    if truth.denominator == 1:
        assert not integer(response, expected).correct


@settings(max_examples=150)
@given(truth=VALUES, near=st.sampled_from((-10, -1, 1, 10)), data=st.data())
def test_a_neighbour_is_wrong(truth: int, near: int, data: st.DataObject) -> None:
    assert not math(data.draw(responses(Fraction(truth + near))), str(truth)).correct


@settings(max_examples=150)
@given(value=st.integers(0, 999), other=st.integers(0, 999), data=st.data())
def test_two_different_answers_side_by_side_are_no_answer(value: int, other: int, data: st.DataObject) -> None:
    assume(value != other)
    joint = data.draw(st.sampled_from((" or ", ", ", " and ", "; ", " or maybe ", " (or ", ", or perhaps ")))
    both = f"{value}{joint}{other}" + (")" if "(" in joint else "")
    response = data.draw(st.sampled_from(("Answer: {}", "\\boxed{{{}}}", "The answer is {}.", "{}"))).format(both)
    for truth in (value, other):
        assert not math(response, str(truth)).correct
        assert not integer(response, str(truth)).correct


def joined(items: list[Fraction], data: st.DataObject) -> str:
    return ", ".join(data.draw(written_fractions(item)) for item in items)


SEVERAL = st.lists(FRACTIONS, min_size=2, max_size=4, unique=True)


@settings(max_examples=80)
@given(items=SEVERAL, data=st.data())
def test_sets_are_equal_in_any_order_and_tuples_in_one(items: list[Fraction], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(items))
    expected, response = joined(items, data), joined(shuffled, data)
    assert math(f"Answer: \\{{{response}\\}}", f"\\{{{expected}\\}}").correct
    assert math(f"Answer: ${response}$", f"\\{{{expected}\\}}").correct
    same_percent = any(a == 100 * b for a in items for b in items)  # 50% is 50 as well as 1/2
    if not same_percent:
        assert math(f"Answer: ({response})", f"({expected})").correct == (shuffled == items)
        assert not math(f"Answer: \\{{{joined(shuffled[1:], data)}\\}}", f"\\{{{expected}\\}}").correct


BRACKETS = st.sampled_from(("()", "[]", "(]", "[)"))


@settings(max_examples=100)
@given(ends=st.tuples(VALUES, VALUES).map(sorted), kind=BRACKETS, other=BRACKETS, data=st.data())
def test_intervals_are_equal_with_their_ends_and_brackets(
    ends: list[int], kind: str, other: str, data: st.DataObject
) -> None:
    assume(ends[0] < ends[1])
    low, high = ends
    truth = f"{kind[0]}{low}, {high}{kind[1]}"
    signs = {"(": "<", ")": "<", "[": "\\le", "]": "\\le"}
    written = (
        f"{other[0]}{low},{high}{other[1]}",
        f"\\left{other[0]}{low}, {high}\\right{other[1]}",
        f"{low} {signs[other[0]]} x {signs[other[1]]} {high}",
        f"x \\in {other[0]}{low}, {high}{other[1]}",
    )
    assert math(f"Answer: ${data.draw(st.sampled_from(written))}$", truth).correct == (kind == other)
    assert not math(f"Answer: {kind[0]}{low}, {high + 1}{kind[1]}", truth).correct
