"""Which problems a run draws next: a function of the seed and of how many it drew before, so that resuming is exact."""

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


def problem_indices(
    seed: int, first: int, count: int, problems: int, difficulties: Sequence[float] = ()
) -> NDArray[np.int64]:
    """Indices ``[count]`` of the problems that are drawn after the first ``first``.

    The training set is passed through in a new random order every epoch; what crosses the border takes the rest of one
    epoch and the beginning of the next, so nothing is skipped. A problem can be drawn twice at once only when there is
    more to draw than what is left of an epoch. With ``difficulties`` (one a problem) every epoch begins with the
    smallest, and problems of equal difficulty are in that epoch's random order.
    """
    return _taken(seed, (), np.arange(first, first + count), problems, difficulties)


def mixed_indices(
    seed: int, first: int, count: int, parts: Sequence[Part], difficulties: Sequence[float] = ()
) -> NDArray[np.int64]:
    """Indices ``[count]`` of the problems that are drawn after the first ``first``, into those of all parts in a row.

    Every part is passed through as a set of its own is, in an order that depends on its name and no other part, and
    with ``difficulties`` (one a problem, of all parts in a row) its easy ones first. :func:`turns` says whose turn it
    is.
    """
    places: dict[int, list[int]] = defaultdict(list)  # of each part: which of its draws
    order = list(islice(turns([part.weight for part in parts], first), count))
    for part, nth in order:
        places[part].append(nth)
    starts = list(accumulate((part.problems for part in parts), initial=0))
    drawn = {}
    for i, nths in places.items():
        start, stop = starts[i : i + 2]
        own = _taken(seed, (parts[i].name,), np.array(nths), parts[i].problems, difficulties[start:stop])
        drawn[i] = iter(start + own)
    return np.array([next(drawn[part]) for part, _ in order], dtype=np.int64)


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


def _taken(
    seed: int, part: tuple[str, ...], places: NDArray[np.int64], problems: int, difficulties: Sequence[float]
) -> NDArray[np.int64]:
    """The problems at some places of endless passes through all of them."""
    orders = {
        int(epoch): _pass(seed, part, int(epoch), problems, difficulties) for epoch in np.unique(places // problems)
    }
    return np.array([orders[int(place // problems)][place % problems] for place in places], dtype=np.int64)


def _pass(
    seed: int, part: tuple[str, ...], epoch: int, problems: int, difficulties: Sequence[float]
) -> NDArray[np.int64]:
    """The order of one epoch: a shuffle, then easy ones first where difficulties are given."""
    shuffled = _permutation(seed, part, epoch, problems)
    return shuffled[np.argsort(np.array(difficulties)[shuffled], kind="stable")] if difficulties else shuffled


def _permutation(seed: int, part: tuple[str, ...], epoch: int, problems: int) -> NDArray[np.int64]:
    """A shuffle made of raw 64-bit draws, which numpy keeps the same in every release."""
    return np.argsort(stream(seed, "epoch", *part, epoch).random_raw(problems), kind="stable")
