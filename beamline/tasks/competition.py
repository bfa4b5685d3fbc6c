"""Problems worded like those of competitions, at the size that a model of a million parameters can learn.

Each family asks for an integer below 1,000 and has worked steps in columns of digits for the warm start.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from beamline.records.random import stream
from beamline.tasks.arithmetic import addition
from beamline.tasks.partition import Pool, take_distinct


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question, its integer answer, the steps that lead there, and the name of its family."""

    question: str
    answer: int
    steps: str
    family: str


def _value(a: int, b: int, c: int) -> Exercise:
    steps = f"{addition(a, b)};{addition(a + b, c)}"
    return Exercise(f"Find the value of ${a}+{b}+{c}$.", a + b + c, steps, "value")


def _unknown(a: int, b: int, _: int) -> Exercise:
    question = f"Find the number $x$ for which $x+{a}={a + b}$."
    return Exercise(question, b, subtraction(a + b, a), "unknown")


def _perimeter(a: int, b: int, _: int) -> Exercise:
    question = f"A rectangle has sides of length ${a}$ and ${b}$. What is its perimeter?"
    return Exercise(question, 2 * (a + b), f"{addition(a, b)};{addition(a + b, a + b)}", "perimeter")


def _angle(a: int, b: int, _: int) -> Exercise:
    a, b = a % 70 + 10, b % 70 + 10
    question = (
        f"Two angles of a triangle measure ${a}$ and ${b}$ degrees. How many degrees does the third angle measure?"
    )
    return Exercise(question, 180 - a - b, f"{addition(a, b)};{subtraction(180, a + b)}", "angle")


def _sequence(a: int, b: int, _: int) -> Exercise:
    question = f"The first two terms of an arithmetic sequence are ${a}$ and ${a + b}$. What is the third term?"
    return Exercise(question, a + 2 * b, f"{subtraction(a + b, a)};{addition(a + b, b)}", "sequence")


def _integers(a: int, b: int, _: int) -> Exercise:
    question = f"How many integers $n$ satisfy ${a} \\le n \\le {a + b}$?"
    return Exercise(question, b + 1, f"{subtraction(a + b, a)};{addition(b, 1)}", "integers")


def _remainder(a: int, b: int, c: int) -> Exercise:
    divisor = 2 + c % 8
    question = f"What is the remainder when ${a}+{b}$ is divided by ${divisor}$?"
    return Exercise(question, (a + b) % divisor, f"{addition(a, b)};{_division(a + b, divisor)}", "remainder")


_FAMILIES: tuple[Callable[[int, int, int], Exercise], ...] = (
    _value, _unknown, _perimeter, _angle, _sequence, _integers, _remainder,
)  # fmt: skip


def exercises(seed: int, pool: Pool, problems: int) -> list[Exercise]:
    """Distinct exercises of a pool, the families in turn; the first n of a larger request are those of a smaller one.

    Raises:
        ValueError: the pool has fewer exercises.
    """
    candidates = ((exercise, _asked(exercise)) for exercise in _candidates(seed, pool))
    made = take_distinct(candidates, pool, problems, key=lambda exercise: exercise.question)
    if len(made) < problems:
        raise ValueError(f"competition: there are fewer than {problems} {pool} problems (found {len(made)})")
    return made


def _candidates(seed: int, pool: Pool) -> Iterator[Exercise]:
    rng = np.random.Generator(stream(seed, "competition", pool))
    for index in count():
        yield _FAMILIES[index % len(_FAMILIES)](*(int(n) for n in rng.integers(10, 100, size=3)))


def _asked(exercise: Exercise) -> str:
    """The same for the same numbers in another order."""
    return exercise.family + " ".join(sorted(_numbers(exercise.question)))


def _numbers(text: str) -> Sequence[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


def subtraction(a: int, b: int) -> str:
    """Column subtraction of ``b <= a``, lowest digit first: ``132-85`` gives ``2-5=17,3-8-1=14,1-0-1=00``.

    The first digit of a difference is the borrow, which the next column takes off.
    """
    columns, borrow = [], 0
    for place in range(len(str(a))):
        top, bottom = a // 10**place % 10, b // 10**place % 10
        left = f"{top}-{bottom}" + (f"-{borrow}" if place else "")
        difference = top - bottom - borrow
        borrow = int(difference < 0)
        columns.append(f"{left}={borrow}{difference % 10}")
    return ",".join(columns)


def _division(a: int, divisor: int) -> str:
    """The remainders of ``a`` by long division, highest digit first: ``132/7`` gives ``1%7=1,13%7=6,62%7=6``."""
    columns, rest = [], 0
    for digit in map(int, str(a)):
        columns.append(f"{10 * rest + digit}%{divisor}={(10 * rest + digit) % divisor}")
        rest = (10 * rest + digit) % divisor
    return ",".join(columns)
