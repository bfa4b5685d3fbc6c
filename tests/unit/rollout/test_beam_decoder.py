"""The sampler's own forward pass against the Hugging Face module, at every position, and the worker that drives it."""

from typing import Any

import numpy as np
import pytest
import torch

from beamline.kernels.attention import BLOCK
from beamline.rollout.local import worker
from beamline.rollout.local.beam import BeamDecoder, Numerics
from beamline.rollout.local.worker import NotFiniteError, Worker
from tests.exact import bits
from tests.tiny_beam import CONTEXT, THETA, WINDOW, beam_shape, evaluate, random_beam, reference
from tests.unit.rollout.decoding import (
    SEQUENCES,
    SHARED,
    SHORT,
    Evaluation,
    adapters_for,
    admitted,
    decoder_of,
    drawn_by,
    forced,
    shapes,
)


@shapes
def test_logits_and_routes_are_those_of_the_module(changes: dict[str, Any]) -> None:
    module = random_beam(**changes)
    plain = reference(module)
    for ids, logits, routes in zip(SEQUENCES, *forced(decoder_of(module, **changes)), strict=True):
        expected = evaluate(plain, ids)
        np.testing.assert_allclose(logits, expected.logits_SV.numpy(), rtol=1e-5, atol=2e-5)
        np.testing.assert_array_equal(routes, expected.routes_SLK)


@shapes
@pytest.mark.parametrize("kv_dtype", ["same", "float8_e4m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapted", [False, True])
def test_bits_are_the_same_all_at_once_and_one_after_the_other(
    dtype: str, kv_dtype: str, adapted: bool, changes: dict[str, Any]
) -> None:
    """So that a response goes on as if it had not been interrupted, and what was sampled can be recomputed."""
    adapters = adapters_for(changes) if adapted else None
    decoder = decoder_of(random_beam(**changes), dtype, kv_dtype, adapters=adapters, **changes)
    evaluation = Evaluation(decoder)
    for ids, logits, routes in zip(SEQUENCES, *forced(decoder), strict=True):
        whole, whole_routes = evaluation.prefill(ids, 0)
        assert np.array_equal(bits(logits), bits(whole))
        assert np.array_equal(routes, whole_routes)


@pytest.mark.parametrize(("experts", "expected"), [(16, np.uint8), (256, np.uint8), (260, np.uint16)])
def test_routes_have_the_smallest_type_that_holds_them(experts: int, expected: Any) -> None:
    assert BeamDecoder(beam_shape(num_experts=experts), Numerics(), THETA, CONTEXT).route_dtype == expected


def test_a_sliding_layer_keeps_no_more_than_its_window_in_whole_blocks() -> None:
    assert CONTEXT % BLOCK == 0
    for window, places in ((1, BLOCK), (WINDOW, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK), (CONTEXT, CONTEXT)):
        cache = BeamDecoder(beam_shape(sliding_window=window), Numerics(), THETA, CONTEXT).new_cache(2, CONTEXT)
        assert cache.places.tolist() == [places, CONTEXT, places]


# The worker


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
