"""Running out of memory or stack is no verdict, although math-verify passes over every exception."""

import sys

import math_verify.grader
import pytest

from beamline.tasks.graders import GRADERS

INTEGRAL = r"\int_0^1 x^2 \, dx"


@pytest.mark.parametrize("exhausted", [MemoryError, RecursionError])
def test_what_ran_out_is_raised_again(monkeypatch: pytest.MonkeyPatch, exhausted: type[Exception]) -> None:
    def run_out(*_: object, **__: object) -> bool:
        raise exhausted

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", run_out)
    with pytest.raises(exhausted):
        GRADERS["math"]("Answer: 1/2", INTEGRAL)


def test_other_failures_within_math_verify_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise ValueError

    monkeypatch.setattr(math_verify.grader, "sympy_expr_eq", fail)
    assert not GRADERS["math"]("Answer: 1/2", INTEGRAL).correct


def test_the_trace_function_that_was_set_is_there_again() -> None:
    before = sys.gettrace()
    assert GRADERS["math"]("Answer: 1/3", INTEGRAL).correct
    assert sys.gettrace() is before
