"""The sampler's own forward pass against the Hugging Face module, at every position, and the worker that drives it."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from beamline.kernels.attention import BLOCK
from beamline.kernels.linear import multiply
from beamline.kernels.vocabulary import soft_cap
from beamline.model.beam import tensors
from beamline.policy import model
from beamline.policy.attention import Packing, packed_attention
from beamline.policy.positions import Floats
from beamline.policy.weights import named_tensors
from beamline.records import Key, Request, SamplingParams
from beamline.rollout.local import worker
from beamline.rollout.local.beam import BeamDecoder, Numerics, forward
from beamline.rollout.local.cache import SlotCache
from beamline.rollout.local.slots import Slots
from beamline.rollout.local.worker import NotFiniteError, Worker
from tests.exact import bits
from tests.tiny_beam import CONTEXT, THETA, VOCAB, WINDOW, beam_shape, evaluate, random_beam, reference

LENGTHS = [1, 2, 7, 8, 9, 24, 40, 15]  # around the window of 8, and several of them
STEPS = 40  # so that every ring of 16 places wraps around
SEQUENCES = [np.random.default_rng(n).integers(0, VOCAB, n + STEPS).astype(np.int32) for n in LENGTHS]

Routes = NDArray[np.unsignedinteger[Any]]


def decoder_of(module: nn.Module, dtype: Any = "float32", **changes: Any) -> BeamDecoder:
    decoder = BeamDecoder(beam_shape(**changes), Numerics(dtype), THETA, CONTEXT)
    for name, tensor in named_tensors(module).items():
        decoder.tensors[name].copy_(tensor)
    decoder.round_weights(decoder.tensors)
    return decoder


# Tokens that are given


class Evaluation:
    """Rows of given tokens through a decoder, with a cache for the sequences and one for their prefixes."""

    def __init__(self, decoder: BeamDecoder) -> None:
        shape = decoder.shape
        self.decoder, self.space = decoder, decoder.new_workspace(CONTEXT, CONTEXT)
        self.cache = decoder.new_cache(len(LENGTHS), CONTEXT)
        self.unrung = SlotCache(1, [CONTEXT] * shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim)

    def rows(self, ids: Any, positions: Any, slots: Any, cache: SlotCache) -> tuple[Floats, Routes]:
        """Capped logits ``[rows, V]`` and routes ``[rows, L, K]``."""
        shape = self.decoder.shape
        routes = np.empty((len(ids), len(shape.moe_layers), shape.num_experts_per_tok), self.decoder.route_dtype)
        hidden = forward(
            self.decoder.weights, self.decoder.traits, self.space, cache.keys, cache.values, cache.at, cache.places,
            np.array(ids, np.int32), np.array(positions), np.array(slots), routes, False,
        )  # fmt: skip
        logits = np.empty((len(ids), shape.vocab_size), np.float32)
        multiply(hidden, self.decoder.weights.head, logits)
        soft_cap(logits.reshape(-1), self.decoder.traits.cap)
        return logits, routes

    def prefill(self, ids: NDArray[np.int32], slot: int) -> tuple[Floats, Routes]:
        """All positions of a prefix at once."""
        evaluated = self.rows(ids, np.arange(len(ids)), np.zeros(len(ids), np.int64), self.unrung)
        self.cache.fill(self.unrung, len(ids), np.array([slot]))
        return evaluated


def forced(decoder: BeamDecoder) -> tuple[list[Floats], list[Routes]]:
    """Prefill each sequence up to its length, then feed it the rest; logits and routes of each, ``[S, ...]``."""
    evaluation, slots = Evaluation(decoder), np.arange(len(LENGTHS))
    parts = [[evaluation.prefill(ids[:n], slot)] for slot, (ids, n) in enumerate(zip(SEQUENCES, LENGTHS, strict=True))]
    for step in range(STEPS):
        at = np.array(LENGTHS) + step
        tokens = [ids[p] for ids, p in zip(SEQUENCES, at, strict=True)]
        logits, routes = evaluation.rows(tokens, at, slots, evaluation.cache)
        for b in range(len(LENGTHS)):
            parts[b].append((logits[b : b + 1], routes[b : b + 1]))
    joined = [[np.concatenate(part) for part in zip(*sequence, strict=True)] for sequence in parts]
    return [logits for logits, _ in joined], [routes for _, routes in joined]


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "other experts": {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "plain gate weights": {"norm_topk_prob": False, "num_key_value_heads": 4},
    "dense": {"mlp_layer_types": ["dense"] * 3, "sliding_window": 1},
}
shapes = pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())


@shapes
def test_logits_and_routes_are_those_of_the_module(changes: dict[str, Any]) -> None:
    module = random_beam(**changes)
    plain = reference(module)
    for ids, logits, routes in zip(SEQUENCES, *forced(decoder_of(module, **changes)), strict=True):
        expected = evaluate(plain, ids)
        np.testing.assert_allclose(logits, expected.logits_SV.numpy(), rtol=1e-5, atol=2e-5)
        np.testing.assert_array_equal(routes, expected.routes_SLK)


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_the_same_all_at_once_and_one_after_the_other(dtype: Any, changes: dict[str, Any]) -> None:
    """So that a response goes on as if it had not been interrupted, and what was sampled can be recomputed."""
    decoder = decoder_of(random_beam(**changes), dtype, **changes)
    evaluation = Evaluation(decoder)
    for ids, logits, routes in zip(SEQUENCES, *forced(decoder), strict=True):
        whole, whole_routes = evaluation.prefill(ids, 0)
        assert np.array_equal(bits(logits), bits(whole))
        assert np.array_equal(routes, whole_routes)


def rounded_once(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """Attention that rounds its result alone; torch's rounds the weights of a softmax too, before it sums."""
    out, _ = packed_attention(module, query.float(), key.float(), value.float(), *rest, **kwargs)
    return out.to(query.dtype), None


@torch.no_grad()
def float32_head(module: nn.Module) -> Tensor:
    """Logits of all positions, by the module on packed sequences and a head in float32."""
    AttentionInterface.register("rounded_once", rounded_once)
    cast(Any, module).config._attn_implementation = "rounded_once"
    lengths = [len(ids) for ids in SEQUENCES]
    packing = Packing.of([0, *np.cumsum(lengths).tolist()])
    ids, positions = torch.from_numpy(np.concatenate(SEQUENCES)).long(), torch.cat([torch.arange(n) for n in lengths])
    rows = model.hidden_states(module, ids, positions, packing)
    return 30 * torch.tanh(rows.float() @ cast(Any, module).lm_head.weight.float().T / 30)


@pytest.mark.parametrize(("attention", "mlp"), [("full_attention", "dense"), ("sliding_attention", "sparse")])
def test_bfloat16_is_rounded_where_the_module_rounds(attention: str, mlp: str) -> None:
    """Over one layer (more would amplify the last bits) it is far nearer to the module than float32 is."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": [attention], "mlp_layer_types": [mlp]}
    module = random_beam(dtype="bfloat16", **changes)
    ours = torch.from_numpy(np.concatenate(forced(decoder_of(module, "bfloat16", **changes))[0]))
    theirs, exact = float32_head(module), float32_head(module.float())
    assert (ours - theirs).abs().mean() < 0.01 * (exact - theirs).abs().mean()


def test_received_weights_are_rounded_to_their_types() -> None:
    """The router stays float32."""
    module = random_beam()
    decoder = decoder_of(module, "bfloat16")
    given = named_tensors(module)
    for spec in tensors(beam_shape(), "bfloat16"):
        expected = given[spec.name].bfloat16().float() if spec.dtype == "bfloat16" else given[spec.name]
        assert torch.equal(decoder.tensors[spec.name], expected), spec.name
        assert torch.equal(expected, given[spec.name]) == (spec.dtype == "float32"), spec.name


@pytest.mark.parametrize(("experts", "expected"), [(16, np.uint8), (256, np.uint8), (260, np.uint16)])
def test_routes_have_the_smallest_type_that_holds_them(experts: int, expected: Any) -> None:
    assert BeamDecoder(beam_shape(num_experts=experts), Numerics(), THETA, CONTEXT).route_dtype == expected


@pytest.mark.parametrize("name", ["dtype", "head_dtype"])
def test_it_computes_as_two_types(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=float32 or bfloat16, not float16"):
        Numerics(**{name: "float16"})


def test_a_sliding_layer_keeps_no_more_than_its_window_in_whole_blocks() -> None:
    assert CONTEXT % BLOCK == 0
    for window, places in ((1, BLOCK), (WINDOW, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK), (CONTEXT, CONTEXT)):
        cache = BeamDecoder(beam_shape(sliding_window=window), Numerics(), THETA, CONTEXT).new_cache(2, CONTEXT)
        assert cache.places.tolist() == [places, CONTEXT, places]


# The worker


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


def test_one_prefix_fills_several_slots() -> None:
    decoder = decoder_of(random_beam())
    shape, prefixes, groups = decoder.shape, *SHARED
    slots, cache = admitted(decoder, prefixes), decoder.new_cache(5, CONTEXT)
    taken, _, _ = Worker(decoder, CONTEXT).prefill(groups, cache, slots)
    assert taken.tolist() == [0, 2, 4, 1, 3]
    for held in (cache.keys, cache.values):
        for layer, places in enumerate(cache.places):
            size = 5 * shape.num_key_value_heads * places * shape.head_dim
            of_slot = held[cache.at[layer] : cache.at[layer] + size].reshape(5, -1)
            for group in groups:
                for slot in group:
                    assert np.array_equal(of_slot[slot], of_slot[group[0]])
            assert not np.array_equal(of_slot[0], of_slot[1])
    assert np.array_equal(slots.routes[0], slots.routes[4])
    assert slots.routes[0, :24].any()
    assert not slots.routes[0, 24:].any()


def test_slots_of_one_prefix_draw_as_if_each_had_been_evaluated() -> None:
    decoder = decoder_of(random_beam())
    prefixes, groups = SHARED
    shared, apart = (drawn_by(decoder, prefixes, g, steps=15) for g in (groups, [[slot] for slot in range(5)]))
    assert np.array_equal(shared.tokens, apart.tokens)
    assert np.array_equal(bits(shared.logprobs), bits(apart.logprobs))
    assert np.array_equal(shared.routes, apart.routes)
    assert len({row.tobytes() for row in shared.tokens}) == 5


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_how_many_rows_are_evaluated_at_a_time_does_not_matter(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(random_beam())
    at_once = drawn_by(decoder, *SHARED, steps=5)
    monkeypatch.setattr(worker, "ROWS", rows)
    in_blocks = drawn_by(decoder, *SHARED, steps=5)
    assert np.array_equal(at_once.tokens, in_blocks.tokens)
    assert np.array_equal(bits(at_once.logprobs), bits(in_blocks.logprobs))
    assert np.array_equal(at_once.routes, in_blocks.routes)


def test_what_a_worker_draws_has_the_logprobs_of_the_module() -> None:
    """Tokens, routes and log-probabilities stand where they belong: each route with the token that was evaluated."""
    module = random_beam()
    plain, (prefixes, groups) = reference(module), SHARED
    slots = drawn_by(decoder_of(module), prefixes, groups, steps=10)
    for slot, prefix in enumerate(prefixes):
        new = slice(len(prefix), len(prefix) + 11)
        expected = evaluate(plain, slots.tokens[slot, : new.stop - 1])
        logprobs = expected.logprobs()[np.arange(new.start - 1, new.stop - 1), slots.tokens[slot, new]]
        np.testing.assert_allclose(slots.logprobs[slot, new], logprobs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(slots.routes[slot, : new.stop - 1], expected.routes_SLK)


def test_logits_that_are_not_finite_are_an_error() -> None:
    decoder = decoder_of(random_beam())
    decoder.tensors["model.embed_tokens.weight"][SHORT[3]] = torch.nan
    with pytest.raises(NotFiniteError, match="logits are not finite"):
        drawn_by(decoder, [SHORT], [[0]], steps=0)
