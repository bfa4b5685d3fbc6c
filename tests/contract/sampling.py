"""Asking a sampler, for the tests of its contract."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.sampler import Sampler
from tests.exact import bits
from tests.tiny_beam import VOCAB, WINDOW

PREFIX_LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 5, 12, 20)
"""Around the window, across several of them, and more than the slots of a sampler."""


def prefix(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng((length, seed)).integers(0, VOCAB, length).astype(np.int32)


def request(length: int, sample: int = 0, max_tokens: int = 30, **params: Any) -> Request:
    key = Key("train", 3, f"problem-{length}", sample)
    return Request(key, prefix(length), SamplingParams(max_tokens=max_tokens, **params))


def requests(max_tokens: int = 30, **params: Any) -> list[Request]:
    """One request for each of PREFIX_LENGTHS."""
    return [request(length, max_tokens=max_tokens, **params) for length in PREFIX_LENGTHS]


def collect(sampler: Sampler, count: int) -> dict[Key, Completion]:
    """Poll until so many completions are there."""
    done: dict[Key, Completion] = {}
    while len(done) < count:
        completions = sampler.poll(300.0)
        assert completions, f"{len(done)} of {count} completions, and nothing more within a minute"
        for completion in completions:
            assert completion.key not in done
            done[completion.key] = completion
    return done


def run(sampler: Sampler, asked: Sequence[Request]) -> list[Completion]:
    """Submit, wait for all, and give the completions in the order of the requests."""
    sampler.submit(asked)
    done = collect(sampler, len(asked))
    return [done[request.key] for request in asked]


def start(sampler: Sampler, asked: Sequence[Request]) -> None:
    """Submit requests and return when they have been decoded for a few tokens: when one that is shorter is done."""
    marker = request(1, sample=999, max_tokens=5)
    sampler.submit([marker, *asked])
    assert [completion.key for completion in sampler.poll(300.0)] == [marker.key]


def resumed(asked: Request, partial: Completion) -> Request:
    """Go on from a partial response with what is left of its budget."""
    params = replace(asked.params, max_tokens=asked.params.max_tokens - len(partial.token_ids))
    return Request(asked.key, np.concatenate([asked.prefix_ids, partial.token_ids]), params)


def sequence(asked: Request, completion: Completion) -> NDArray[np.int32]:
    return np.concatenate([asked.prefix_ids, completion.token_ids])


AssertSame = Callable[[Sequence[Completion], Sequence[Completion]], None]


def assert_same_bits(completions: Sequence[Completion], others: Sequence[Completion]) -> None:
    """The same tokens and routes, and log-probabilities with the same bits."""
    for one, other in zip(completions, others, strict=True):
        assert (one.key, one.finish) == (other.key, other.finish)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(bits(one.logprobs), bits(other.logprobs))
        np.testing.assert_array_equal(one.routes, other.routes)


def assert_same_tokens(completions: Sequence[Completion], others: Sequence[Completion]) -> None:
    """The same tokens; log-probabilities may differ by rounding."""
    for one, other in zip(completions, others, strict=True):
        assert (one.key, one.finish) == (other.key, other.finish)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
