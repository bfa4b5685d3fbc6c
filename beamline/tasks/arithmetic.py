"""Sums of several numbers at graded difficulty, with worked steps for the warm start."""

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from beamline.records import Message, Problem
from beamline.records.random import stream
from beamline.tasks.partition import Pool, take_distinct

_LEVELS = {1: (2, 1), 2: (2, 2), 3: (3, 2), 4: (4, 2), 5: (3, 3)}  # level: (terms, digits of a term)


def text_of(terms: Sequence[int]) -> str:
    """What the user asks: ``47+85+36``."""
    return "+".join(map(str, terms))


def generate(seed: int, pool: Pool, problems: int, levels: Sequence[int]) -> list[Problem]:
    """Distinct problems of a pool; the first n of a larger request are those of a smaller one.

    Raises:
        ValueError: a level that does not exist, or more problems than the pool has.
    """
    unknown = [level for level in levels if level not in _LEVELS]
    if unknown:
        raise ValueError(f"arithmetic: level {unknown[0]} does not exist; levels are {', '.join(map(str, _LEVELS))}")
    candidates = ((candidate, asked(candidate[1])) for candidate in _candidates(seed, pool, levels))
    made = take_distinct(candidates, pool, problems, key=lambda candidate: text_of(candidate[1]))
    if len(made) < problems:
        raise ValueError(
            f"arithmetic: levels {list(levels)} have fewer than {problems} {pool} problems (found {len(made)}); "
            "ask for fewer, or add a higher level"
        )
    return [_problem(terms, level) for level, terms in made]


def asked(terms: Sequence[int]) -> str:
    """What a sum asks: the same text for any order of its terms."""
    return text_of(sorted(terms))


def _candidates(seed: int, pool: Pool, levels: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    rng = np.random.Generator(stream(seed, "arithmetic", pool))
    for index in count():
        level = levels[index % len(levels)]
        terms, digits = _LEVELS[level]
        low = 10 ** (digits - 1) if digits > 1 else 1
        yield level, [int(n) for n in rng.integers(low, 10**digits, size=terms)]


def _problem(terms: Sequence[int], level: int) -> Problem:
    text = text_of(terms)
    return Problem(
        id=f"arithmetic:{text}",
        messages=(Message("user", text),),
        answer=str(sum(terms)),
        source="arithmetic",
        extra={"level": level, "difficulty": level, "terms": list(terms)},
    )


def worked_steps(terms: Sequence[int]) -> str:
    """Column additions, lowest digit first, one addition after the other.

    ``59+64+73`` gives ``9+4=13,5+6+1=12;3+3=06,2+7+0=09,1+0+0=01``. A third addend is the carry. Sums have two digits,
    and an addition has as many columns as its largest possible running total has digits, so that problems of one level
    have worked steps of one length.
    """
    largest = 10 ** len(str(max(terms))) - 1
    total, additions = terms[0], []
    for count_so_far, term in enumerate(terms[1:], start=1):
        additions.append(addition(total, term, width=len(str(count_so_far * largest))))
        total += term
    return ";".join(additions)


def addition(a: int, b: int, width: int = 0) -> str:
    """Column addition of two numbers, lowest digit first, in as many columns as the longer one has, or ``width``."""
    return ",".join(_columns(a, b, max(width, len(str(max(a, b))))))


def _columns(a: int, b: int, width: int) -> Iterator[str]:
    carry: int | None = None
    for _ in range(width):
        addends = [a % 10, b % 10] if carry is None else [a % 10, b % 10, carry]
        yield f"{'+'.join(map(str, addends))}={sum(addends):02d}"
        carry, a, b = sum(addends) // 10, a // 10, b // 10
