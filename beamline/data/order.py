"""Which problems a step trains on: a function of the seed and the step alone, so that a resumed run goes on exactly."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from beamline.records.random import stream

_HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a mixture: its name, its weight, and how many problems it has."""

    name: str
    weight: Fraction
    problems: int


def problem_indices(seed: int, step: int, per_step: int, problems: int) -> NDArray[np.int64]:
    """Indices ``[per_step]`` of the problems of a step (steps count from 1).

    The training set is passed through in a new random order every epoch; a step that crosses the border takes the
    rest of one epoch and the beginning of the next, so nothing is skipped. A problem can appear twice in a step only
    when the step is larger than what is left of an epoch.
    """
    first = (step - 1) * per_step
    return _taken(seed, (), np.arange(first, first + per_step), problems)


def mixed_indices(seed: int, step: int, per_step: int, parts: Sequence[Part]) -> NDArray[np.int64]:
    """Indices ``[per_step]`` of the problems of a step, into the problems of all parts one after the other.

    Every part is passed through as a set of its own is, in an order that depends on its name and no other part;
    :func:`turns` says whose turn it is.
    """
    places: dict[int, list[int]] = defaultdict(list)  # of each part: which of its draws
    order = list(islice(turns([part.weight for part in parts], (step - 1) * per_step), per_step))
    for part, nth in order:
        places[part].append(nth)
    starts = list(accumulate((part.problems for part in parts), initial=0))
    drawn = {
        i: iter(starts[i] + _taken(seed, (parts[i].name,), np.array(nths), parts[i].problems))
        for i, nths in places.items()
    }
    return np.array([next(drawn[part]) for part, _ in order])


def turns(weights: Sequence[Fraction], first: int) -> Iterator[tuple[int, int]]:
    """From place ``first`` (counted from 0) on: which part draws, and how many draws it had before.

    The k-th draw of a part is due at (k + 1/2) / weight; the earliest comes next, of two at once the first named. So a
    part has its share of the first n places, exactly when all shares are whole, and else to within
    1/2 + (its share of 1) x parts / 2. Source: the divisor method of Webster and Sainte-Lague.
    """
    total = sum(weights)
    # A part never lags behind its share by as much as there are parts, so counting can begin there.
    counts = [max(0, int(first * weight / total) - len(weights)) for weight in weights]
    place = sum(counts)
    while True:
        part = min(range(len(weights)), key=lambda i: (counts[i] + _HALF) / weights[i])
        if place >= first:
            yield part, counts[part]
        counts[part] += 1
        place += 1


def _taken(seed: int, part: tuple[str, ...], places: NDArray[np.int64], problems: int) -> NDArray[np.int64]:
    """The problems at some places of endless passes through all of them."""
    orders = {int(epoch): _permutation(seed, part, int(epoch), problems) for epoch in np.unique(places // problems)}
    return np.array([orders[int(place // problems)][place % problems] for place in places])


def _permutation(seed: int, part: tuple[str, ...], epoch: int, problems: int) -> NDArray[np.int64]:
    """A shuffle made of raw 64-bit draws, which numpy keeps the same in every release."""
    return np.argsort(stream(seed, "epoch", *part, epoch).random_raw(problems), kind="stable")
