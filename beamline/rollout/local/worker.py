"""One thread's share of the work: rows through the model, and the tokens drawn from them.

A row's result does not depend on which rows are beside it (see :mod:`beamline.kernels`), so how the rows are shared
out is free.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.kernels.linear import multiply
from beamline.kernels.rows import round_rows
from beamline.kernels.vocabulary import forbid, likeliest_first, sample_rows, score_rows, soft_cap
from beamline.policy.positions import Floats
from beamline.records import Support
from beamline.rollout.local.beam import BeamDecoder, forward
from beamline.rollout.local.cache import SlotCache
from beamline.rollout.local.slots import Slots

ROWS = 128  # evaluated at a time: their activations stay in a core's own cache


Routes = NDArray[np.unsignedinteger]
Drawn = tuple[NDArray[np.int64], NDArray[np.int64], Floats]  # slots, their tokens and log-probabilities


class NotFiniteError(FloatingPointError):
    """A logit is infinite or not a number."""


class Worker:
    """Activations and a scratch cache for prefixes; used by one thread at a time."""

    def __init__(self, decoder: BeamDecoder, positions: int) -> None:
        shape = decoder.shape
        self._decoder = decoder
        self._space = decoder.new_workspace(ROWS, positions)
        self._prefix = SlotCache(1, [positions] * shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim)
        self._logits = np.empty((ROWS, shape.vocab_size), np.float32)
        self._probs = np.empty(shape.vocab_size, np.float32)

    def prefill(self, groups: Sequence[Sequence[int]], cache: SlotCache, slots: Slots) -> Drawn:
        """Evaluate the prefix that all slots of a group begin with, once a group; draw a token for each slot."""
        return joined([self._prefill(np.array(group), cache, slots) for group in groups])

    def _prefill(self, group: NDArray[np.int64], cache: SlotCache, slots: Slots) -> Drawn:
        prefix = slots.tokens[group[0], : slots.length[group[0]]]
        routes = np.empty((len(prefix), *slots.routes.shape[2:]), slots.routes.dtype)
        for start in range(0, len(prefix), ROWS):
            rows = np.arange(start, min(start + ROWS, len(prefix)))
            hidden = self._forward(prefix[rows], rows, np.zeros_like(rows), self._prefix, routes[start : start + ROWS])
        cache.fill(self._prefix, len(prefix), group)
        slots.routes[group, : len(prefix)] = routes
        logits = self._score(hidden[-1:])
        return joined([self._draw(logits.repeat(len(block), axis=0), block, slots) for block in _blocks(group)])

    def decode(self, taken: NDArray[np.int64], cache: SlotCache, slots: Slots) -> Drawn:
        """Evaluate the newest token of each slot and draw the next one."""
        return joined([self._decode(block, cache, slots) for block in _blocks(taken)])

    def _decode(self, block: NDArray[np.int64], cache: SlotCache, slots: Slots) -> Drawn:
        at = slots.length[block] - 1
        routes = np.empty((len(block), *slots.routes.shape[2:]), slots.routes.dtype)
        hidden = self._forward(slots.tokens[block, at], at, block, cache, routes)
        slots.routes[block, at] = routes
        return self._draw(self._score(hidden), block, slots)

    def evaluate(
        self, token_ids: NDArray[np.int32], temperature: float, routes: Routes | None, support: Support | None
    ) -> tuple[Floats, Routes]:
        """Log-probabilities ``[S - 1]`` of the tokens of a sequence but the first, as if each had been drawn now.

        Also the experts ``[S - 1, L, K]`` of all tokens but the last: ``routes``, or if it is None those that the
        routers choose. Each token is renormalized over its entry of ``support [S - 1]``.

        Raises:
            NotFiniteError: a logit is not finite.
        """
        shape, rows = self._decoder.shape, len(token_ids) - 1
        inputs, targets = token_ids[:-1], token_ids[1:].astype(np.int64)
        taken = np.empty((rows, len(shape.moe_layers), shape.num_experts_per_tok), self._decoder.route_dtype)
        if routes is not None:
            taken[:] = routes
        if support is None:
            support = Support.unrestricted(rows)
        temperature_N, logprobs, entropies = np.full(rows, temperature, np.float32), *np.empty((2, rows), np.float32)
        for start in range(0, rows, ROWS):
            at = np.arange(start, min(start + ROWS, rows))
            part, slots = slice(start, start + ROWS), np.zeros_like(at)
            hidden = self._forward(inputs[part], at, slots, self._prefix, taken[part], routes is not None)
            score_rows(
                self._score(hidden), targets[part], temperature_N[part], support.ids,
                support.borders[start : start + ROWS + 1], self._probs, logprobs[part], entropies[part],
            )  # fmt: skip
        return logprobs, taken

    def _forward(
        self, token_ids: NDArray[np.int32], positions: NDArray[np.int64], taken: NDArray[np.int64], cache: SlotCache,
        routes: Routes, replayed: bool = False,
    ) -> Floats:  # fmt: skip
        hidden: Floats = forward(
            self._decoder.weights, self._decoder.traits, self._space, cache.keys, cache.values, cache.at, cache.places,
            token_ids, positions, taken, routes, replayed,
        )  # fmt: skip
        return hidden

    def _score(self, hidden: Floats) -> Floats:
        """Soft-capped logits of each row, in a buffer of this worker."""
        logits = self._logits[: len(hidden)]
        multiply(hidden, self._decoder.weights.head, logits)
        round_rows(logits, self._decoder.numerics.head_dtype == "bfloat16")
        if not np.isfinite(logits).all():
            raise NotFiniteError("logits are not finite")
        soft_cap(logits.reshape(-1), self._decoder.traits.cap)
        return logits

    def _draw(self, logits: Floats, taken: NDArray[np.int64], slots: Slots) -> Drawn:
        """A token for each slot from its row of logits, which are overwritten."""
        tokens, logprobs = np.empty(len(taken), np.int64), np.empty(len(taken), np.float32)
        length, stop_ids, temperature = slots.length[taken], slots.stop_ids[taken], slots.temperature[taken]
        early = length < slots.stop_after[taken]
        forbid(logits, stop_ids, early)
        top_p, top_k, min_p = slots.top_p[taken], slots.top_k[taken], slots.min_p[taken]
        filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
        recorded = slots.recorded[taken]
        if recorded.any():  # where nothing restricts the draw, there is nothing to record
            recorded &= filtered | (temperature == 0) | (early & (stop_ids >= 0).any(1))
        ids, borders = np.empty(recorded.sum() * logits.shape[1], np.int32), np.zeros(len(taken) + 1, np.int64)
        sample_rows(
            logits, likeliest_first(logits if filtered.any() else logits[:0]), slots.uniforms[taken, length],
            temperature, top_p, top_k, min_p, self._probs, tokens, logprobs, recorded, ids, borders,
        )  # fmt: skip
        for i in recorded.nonzero()[0]:
            slots.allowed[taken[i]][length[i]] = ids[borders[i] : borders[i + 1]].copy()
        return taken, tokens, logprobs


def _blocks(slots: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [slots[start : start + ROWS] for start in range(0, len(slots), ROWS)]


def joined(drawn: Sequence[Drawn]) -> Drawn:
    """What several shares have drawn, as one."""
    slots, tokens, logprobs = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    return slots, tokens, logprobs
