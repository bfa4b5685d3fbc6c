"""A decoder and what it makes of given and of drawn tokens, for the tests of its forward pass and of the worker."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn

from beamline.kernels.linear import multiply
from beamline.kernels.vocabulary import soft_cap
from beamline.policy.lora import Adapters
from beamline.policy.positions import Floats
from beamline.policy.weights import named_tensors
from beamline.records import Key, Request, SamplingParams
from beamline.rollout.local.beam import BeamDecoder, Numerics, forward
from beamline.rollout.local.cache import SlotCache
from beamline.rollout.local.slots import Slots
from beamline.rollout.local.worker import Worker
from tests.adapters import Routes, random_adapters
from tests.tiny_beam import CONTEXT, THETA, VOCAB, beam_shape

LENGTHS = [1, 2, 7, 8, 9, 24, 40, 15]  # around the window of 8, and several of them
STEPS = 40  # so that every ring of 16 places wraps around
SEQUENCES = [np.random.default_rng(n).integers(0, VOCAB, n + STEPS).astype(np.int32) for n in LENGTHS]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "other experts": {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "plain gate weights": {"norm_topk_prob": False, "num_key_value_heads": 4},
    "dense": {"mlp_layer_types": ["dense"] * 3, "sliding_window": 1},
}
shapes = pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())


def adapters_for(changes: dict[str, Any]) -> Adapters:
    """Adapters that change a model about as much as its weights do, on every linear layer."""
    return random_adapters(beam_shape(**changes), b=0.4)


def decoder_of(
    module: nn.Module, dtype: Any = "float32", kv_dtype: Any = "same", head_dtype: Any = "float32",
    adapters: Adapters | None = None, **changes: Any,
) -> BeamDecoder:  # fmt: skip
    lora = None if adapters is None else adapters.lora
    decoder = BeamDecoder(beam_shape(**changes), Numerics(dtype, kv_dtype, head_dtype), THETA, CONTEXT, lora)
    held = decoder.tensors | decoder.adapters
    for weights in (module,) if adapters is None else (module, adapters):
        for name, tensor in named_tensors(weights).items():
            held[name].copy_(tensor)
    decoder.round_weights(held)
    return decoder


class Evaluation:
    """Rows of given tokens through a decoder, with a cache for the sequences and one for their prefixes."""

    def __init__(self, decoder: BeamDecoder) -> None:
        shape = decoder.shape
        self.decoder, self.space = decoder, decoder.new_workspace(CONTEXT, CONTEXT)
        self.cache = decoder.new_cache(len(LENGTHS), CONTEXT)
        self.unrung = SlotCache(1, [CONTEXT] * shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim)

    def logits(
        self, ids: Any, positions: Any, slots: Any, cache: SlotCache, replayed: Routes | None = None
    ) -> tuple[Floats, Routes]:
        """Logits ``[rows, V]`` as the head gives them, and routes ``[rows, L, K]``."""
        shape = self.decoder.shape
        size = len(ids), len(shape.moe_layers), shape.num_experts_per_tok
        routes = np.empty(size, self.decoder.route_dtype) if replayed is None else replayed
        hidden = forward(
            self.decoder.weights, self.decoder.traits, self.space, cache.keys, cache.values, cache.at, cache.places,
            np.array(ids, np.int32), np.array(positions), np.array(slots), routes, replayed is not None,
        )  # fmt: skip
        logits = np.empty((len(ids), shape.vocab_size), np.float32)
        multiply(hidden, self.decoder.weights.head, logits)
        return logits, routes

    def rows(
        self, ids: Any, positions: Any, slots: Any, cache: SlotCache, replayed: Routes | None = None
    ) -> tuple[Floats, Routes]:
        """Capped logits and routes."""
        logits, routes = self.logits(ids, positions, slots, cache, replayed)
        soft_cap(logits.reshape(-1), self.decoder.traits.cap)
        return logits, routes

    def prefill(self, ids: NDArray[np.int32], slot: int, replayed: Routes | None = None) -> tuple[Floats, Routes]:
        """All positions of a prefix at once."""
        evaluated = self.rows(ids, np.arange(len(ids)), np.zeros(len(ids), np.int64), self.unrung, replayed)
        self.cache.fill(self.unrung, len(ids), np.array([slot]))
        return evaluated


def forced(decoder: BeamDecoder, replayed: list[Routes] | None = None) -> tuple[list[Floats], list[Routes]]:
    """Prefill each sequence up to its length, then feed it the rest; logits and routes of each, ``[S, ...]``.

    The experts may be given, too.
    """
    evaluation, slots = Evaluation(decoder), np.arange(len(LENGTHS))
    parts = [
        [evaluation.prefill(ids[:n], slot, None if replayed is None else replayed[slot][:n])]
        for slot, (ids, n) in enumerate(zip(SEQUENCES, LENGTHS, strict=True))
    ]
    for step in range(STEPS):
        at = np.array(LENGTHS) + step
        tokens = [ids[p] for ids, p in zip(SEQUENCES, at, strict=True)]
        given = None if replayed is None else np.stack([routes[p] for routes, p in zip(replayed, at, strict=True)])
        logits, routes = evaluation.rows(tokens, at, slots, evaluation.cache, given)
        for b in range(len(LENGTHS)):
            parts[b].append((logits[b : b + 1], routes[b : b + 1]))
    joined = [[np.concatenate(part) for part in zip(*sequence, strict=True)] for sequence in parts]
    return [logits for logits, _ in joined], [routes for _, routes in joined]


def admitted(decoder: BeamDecoder, prefixes: list[NDArray[np.int32]], max_tokens: int = 20) -> Slots:
    """Slots with a request for each prefix, which may end in any number of tokens."""
    shape = decoder.shape
    slots = Slots(len(prefixes), CONTEXT, len(shape.moe_layers), shape.num_experts_per_tok, decoder.route_dtype)
    params = SamplingParams(max_tokens)
    slots.admit([Request(Key("train", 1, "p", i), ids, params) for i, ids in enumerate(prefixes)], seed=0)
    return slots


def drawn_by(decoder: BeamDecoder, prefixes: list[NDArray[np.int32]], groups: list[list[int]], steps: int) -> Slots:
    """Prefill groups of slots, then decode for some steps."""
    slots, cache, a_worker = (
        admitted(decoder, prefixes),
        decoder.new_cache(len(prefixes), CONTEXT),
        Worker(decoder, CONTEXT),
    )
    slots.append(*a_worker.prefill(groups, cache, slots), version=1)
    for _ in range(steps):
        slots.append(*a_worker.decode(slots.active, cache, slots), version=1)
    return slots


LONG, SHORT = SEQUENCES[5][:24], SEQUENCES[2][:7]
SHARED = [LONG, SHORT, LONG, SHORT, LONG], [[0, 2, 4], [1, 3]]
