"""From logits to log-probabilities and drawn tokens."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.kernels.arithmetic import dot, exp, tanh, total
from beamline.kernels.compiled import kernel

_LOWEST = np.float32(-np.inf)
# The logit of a token that is not allowed: at every temperature its exponential is exactly 0, as that of minus infinity
# would be, but 0 times it, or times its square, is 0 too.
_BARRED = np.float32(-1e15)


@kernel
def soft_cap(logits: Any, cap: float) -> None:
    """``cap * tanh(logits / cap)`` in place, on a flat run."""
    limit = np.float32(cap)
    for j in range(len(logits)):
        logits[j] = tanh(logits[j] / limit) * limit


@kernel
def temper(row: Any, temperature: Any, probs: Any) -> tuple[Any, Any, Any]:
    """Divide logits by the temperature, in place, and set ``probs = exp(logit - largest)``.

    Returns the largest logit, the sum of ``probs`` and its logarithm.
    """
    largest = _LOWEST
    for v in range(len(row)):
        row[v] = row[v] / temperature
        largest = max(largest, row[v])
    for v in range(len(row)):
        probs[v] = exp(row[v] - largest)
    mass = total(probs, 0, len(row))
    return largest, mass, np.float32(math.log(np.float64(mass)))


@kernel
def restrict(row: Any, allowed: Any, scratch: Any) -> None:
    """Leave only the tokens ``allowed`` a chance, or all if there are none; ``scratch [V]`` is overwritten."""
    if len(allowed) > 0:
        for i in range(len(allowed)):
            scratch[i] = row[allowed[i]]
        row[:] = _BARRED
        for i in range(len(allowed)):
            row[allowed[i]] = scratch[i]


@kernel
def score_rows(
    logits: Any, targets: Any, temperature: Any, ids: Any, borders: Any, probs: Any, logprobs: Any, entropies: Any
) -> None:
    """Log-probability of each row's target, and entropy of its distribution; capped logits are overwritten.

    Row i is renormalized over the tokens ``ids[borders[i]:borders[i + 1]]``, or over all if there are none.
    ``H = log(sum) - sum(p (l - largest)) / sum`` for ``p = exp(l - largest)``.
    """
    for i in range(len(logits)):
        row = logits[i]
        restrict(row, ids[borders[i] : borders[i + 1]], probs)
        largest, mass, log_total = temper(row, temperature[i], probs)
        logprobs[i] = logprob(row, targets[i], largest, log_total)
        for v in range(len(row)):
            row[v] = row[v] - largest
        entropies[i] = log_total - dot(probs, 0, row, 0, len(row)) / mass


@kernel
def logprob(row: Any, token: int, largest: Any, log_total: Any) -> Any:
    """Log-probability of a token of a tempered row."""
    return row[token] - largest - log_total


@kernel
def draw(row: Any, probs: Any, uniform: Any) -> Any:
    """The token at which the cumulated probabilities, in double precision, pass ``uniform`` of their sum."""
    mass = 0.0
    for v in range(len(row)):
        mass += np.float64(probs[v])
    target, reached, last = uniform * mass, 0.0, 0
    for v in range(len(row)):
        if probs[v] > 0:
            reached += np.float64(probs[v])
            last = v
            if reached > target:
                return v
    return last


def likeliest_first(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The tokens of each row, that with the largest logit first; of equal ones the first."""
    return np.argsort(-logits, axis=1, kind="stable")


@kernel
def sample(row: Any, order: Any, probs: Any, uniform: Any, temperature: Any, top_p: Any, top_k: int, min_p: Any) -> Any:
    """A token of one row of logits (which is overwritten), and its log-probability under what it was drawn from.

    A temperature of 0 takes the most likely token, with log-probability 0. Filters apply to the tempered distribution
    in the order min-p, top-k, top-p (vLLM's), each to the renormalized result of the one before it. For them ``order``
    has the tokens with the largest logit first. ``probs`` are above 0 for the tokens that could be drawn.
    """
    if temperature == 0:
        token = np.argmax(row)
        probs[:] = 0
        probs[token] = 1
        return token, np.float32(0)
    largest, _, log_total = temper(row, temperature, probs)
    if top_k > 0 or top_p < 1 or min_p > 0:
        _filter(probs, order, top_p, top_k, min_p)
        log_total = np.float32(math.log(np.float64(total(probs, 0, len(row)))))
    token = draw(row, probs, uniform)
    return token, logprob(row, token, largest, log_total)


@kernel
def sample_rows(
    logits: Any, orders: Any, uniforms: Any, temperature: Any, top_p: Any, top_k: Any, min_p: Any,
    probs: Any, tokens: Any, logprobs: Any, recorded: Any, ids: Any, borders: Any,
) -> None:  # fmt: skip
    """:func:`sample` for each row. ``orders`` has a row for each or, where no row is filtered, none.

    The tokens that could be drawn in a ``recorded`` row i are written to ``ids[borders[i]:borders[i + 1]]``, by rising
    id; ``ids`` has room for V tokens of each such row, and ``borders [rows + 1]`` begins with 0.
    """
    for i in range(len(logits)):
        order = orders[i] if len(orders) else orders.reshape(-1)
        tokens[i], logprobs[i] = sample(
            logits[i], order, probs, uniforms[i], temperature[i], top_p[i], top_k[i], min_p[i]
        )
        borders[i + 1] = _record(probs, ids, borders[i]) if recorded[i] else borders[i]


@kernel
def _record(probs: Any, ids: Any, at: int) -> int:
    """Write the tokens whose probability is above 0 from ``at`` on; returns where they end."""
    for v in range(len(probs)):
        if probs[v] > 0:
            ids[at] = v
            at += 1
    return at


@kernel
def forbid(logits: Any, stop_ids: Any, early: Any) -> None:
    """Where a row is ``early``, give its ``stop_ids`` (-1 = none) no chance."""
    for i in range(len(logits)):
        if early[i]:
            for stop in stop_ids[i]:
                if stop >= 0:
                    logits[i, stop] = _LOWEST


@kernel
def _filter(probs: Any, order: Any, top_p: Any, top_k: int, min_p: Any) -> None:
    """Set the probabilities of tokens that the filters forbid to 0; the most likely token always stays."""
    V = len(probs)
    kept = min(top_k, V) if top_k > 0 else V
    floor = np.float64(min_p) * np.float64(probs[order[0]])
    while kept > 1 and np.float64(probs[order[kept - 1]]) < floor:
        kept -= 1
    mass = 0.0
    for i in range(kept):
        mass += np.float64(probs[order[i]])
    before = 0.0
    for i in range(V):
        allowed = i < kept and (i == 0 or top_p >= 1 or before / mass < top_p)
        before += np.float64(probs[order[i]])
        if not allowed:
            probs[order[i]] = 0
