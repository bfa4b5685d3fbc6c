"""Any text in, a verdict out; hostile ones cost nothing."""

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.tasks.graders import GRADERS, GraderName, Verdict, unusable_answer

CHEAP: tuple[GraderName, ...] = ("math", "integer", "dapo_strict", "exact")
PIECES = st.sampled_from(
    (
        *"0123456789xyei+-*/^_=<>()[]{}|!,.;:?'\"%&$~#@ \n\t\\",
        "Answer: ", "**Answer:** ", "The answer is ", "\\boxed{", "\\fbox{", "\\frac", "\\frac{1}{2}", "\\sqrt",
        "\\text{", "\\left(", "\\right)", "\\{", "\\}", "\\(", "\\)", "\\[", "\\]", "$$", "**", "\\cup", "\\in",
        "\\le", "\\pm", "\\pi", "\\infty", "\\sin", "\\log_", "\\binom", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\",
        "\\%", "^\\circ", "\\cdot", "\\approx", " or ", " and ", "maybe", " cm", " degrees", "34", "1,234", "0.5",
        "½", "√", "π", "−", "×", "∞", "°", "²", "₂", "\u202f", "…", "İ", "ſ", "٣", "\x00", "\ud800", "(A)", "yes",
        "because", "wait", "Therefore", "x=", "e9", "million",
    )
)  # fmt: skip
TRUTHS = ("34", "-\\frac{1}{2}", "\\{1, 2\\}", "(0, 1]", "\\text{yes}", "B", "50\\%", "x > 3", "", "\\frac{", "12 cm")


@settings(max_examples=600)
@given(pieces=st.lists(PIECES, max_size=25), truth=st.sampled_from(TRUTHS), grader=st.sampled_from(CHEAP))
def test_no_mixture_of_notation_raises(pieces: list[str], truth: str, grader: GraderName) -> None:
    verdict = GRADERS[grader]("".join(pieces), truth)
    assert isinstance(verdict, Verdict)
    assert verdict.parsed is not None or not verdict.correct


@settings(max_examples=200)
@given(response=st.text(max_size=80), truth=st.text(max_size=20), grader=st.sampled_from(CHEAP))
def test_no_text_raises(response: str, truth: str, grader: GraderName) -> None:
    assert isinstance(GRADERS[grader](response, truth), Verdict)
    assert isinstance(GRADERS[grader]("Answer: " + response, truth), Verdict)


@settings(max_examples=150)
@given(pieces=st.lists(PIECES, max_size=8), grader=st.sampled_from(CHEAP))
def test_any_text_can_be_asked_for_as_an_answer(pieces: list[str], grader: GraderName) -> None:
    reason = unusable_answer(grader, "".join(pieces))
    assert reason is None or reason


HOSTILE = {
    "digits": "Answer: " + "9" * 1_000_000,
    "boxed digits": "\\boxed{" + "9" * 1_000_000 + "}",
    "open braces": "\\boxed{" * 20_000,
    "nested boxes": "\\boxed{" * 3_000 + "34" + "}" * 3_000,
    "nested brackets": "Answer: " + "(" * 450 + "34" + ")" * 450,
    "nested fractions": "Answer: " + "\\frac{1}{1+" * 70 + "1" + "}" * 70,
    "nested tuples": "Answer: " + "(1," * 200 + ")" * 200,
    "roots": "Answer: " + "\\sqrt{" * 150 + "3" + "}" * 150,
    "powers": "Answer: 9^{9^{9^{9}}}",
    "exponent": "Answer: 10^{99999999999}",
    "scientific": "Answer: 1e999999999",
    "factorial": "Answer: 99999999!",
    "factorials": "Answer: 3" + "!" * 900,
    "binomial": "Answer: \\binom{999999999}{500000}",
    "boxes": "\\boxed{3} " * 10_000,
    "marks": "the answer is " * 8_000,
    "words": "answer " * 20_000,
    "blanks": "answer" + " " * 100_000 + "34",
    "dollars": "$" * 100_000 + "\\boxed{34}",
    "stars": "*" * 100_000 + "34",
    "lines": "34\n" * 30_000,
    "doubts": "or " * 30_000,
    "sum": "Answer: " + "+".join(["x"] * 480),
    "list": "Answer: " + ",".join(["x"] * 480),
    "chain": "Answer: " + "=".join(["3"] * 480),
    "signs": "Answer: " + "\\pm" * 300 + "34",
    "letters": "a" * 100_000,
    "cuts": "Answer: " + "34 (" * 240,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("grader", CHEAP)
def test_hostile_texts_are_wrong_and_cheap(grader: GraderName, name: str) -> None:
    started = time.perf_counter()
    for truth in ("34", "\\{1, 2\\}"):
        assert not GRADERS[grader](HOSTILE[name], truth).correct or name in (
            "nested boxes",
            "lines",
            "blanks",
            "dollars",
        )
    assert time.perf_counter() - started < 2.0  # a hundredth of it where nothing else runs


def test_importing_the_graders_and_judging_integers_needs_no_algebra() -> None:
    program = """
import sys
from beamline.tasks.graders import GRADERS, unusable_answer
for grader in GRADERS.values():
    grader("**Answer:** $34$", "34")
    grader("Answer: \\\\frac{1}{2} or 0.5", "35")
    grader("Answer: 2\\\\sqrt{3}", "35")
unusable_answer("math", "\\\\frac{1}{2}")
print(sorted({"sympy", "mpmath", "math_verify", "torch", "numpy"} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def test_integers_are_judged_by_the_thousand() -> None:
    started = time.perf_counter()
    for number in range(2_000):
        assert GRADERS["math"](f"Answer: {number}", "34").correct == (number == 34)
    assert time.perf_counter() - started < 4.0  # 0.1 seconds where nothing else runs
