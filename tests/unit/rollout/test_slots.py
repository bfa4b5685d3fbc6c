from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from beamline.records import Key, Request, SamplingParams
from beamline.records.random import uniforms
from beamline.rollout.local.slots import Slots

SEED = 11


def slots(count: int = 4, moe_layers: int = 2, dtype: torch.dtype = torch.uint8) -> Slots:
    return Slots(count, positions=20, moe_layers=moe_layers, experts_per_token=2, route_dtype=dtype)


def request(sample: int, prefix: int = 3, max_tokens: int = 5, **params: Any) -> Request:
    ids = np.arange(prefix, dtype=np.int32) + 10 * sample
    return Request(Key("train", 1, "p", sample), ids, SamplingParams(max_tokens, **params))


def append(target: Slots, drawn: dict[int, int], version: int = 7) -> tuple[list[bool], list[bool]]:
    """Draw a token for some slots, with minus the token as its log-probability."""
    tokens = torch.tensor(list(drawn.values()))
    stopped, full = target.append(torch.tensor(list(drawn)), tokens, -tokens.float(), version)
    return stopped.tolist(), full.tolist()


def state(target: Slots, slot: int) -> dict[str, Any]:
    """Everything that is known of the sequence in a slot."""
    tensors = {name: value[slot].tolist() for name, value in vars(target).items() if isinstance(value, Tensor)}
    return tensors | {"key": target.requests[slot].key}


def test_requests_take_the_next_free_slots() -> None:
    target = slots()
    assert target.admit([request(0), request(1, prefix=2)], SEED) == [0, 1]
    assert target.admit([request(2)], SEED) == [2]
    assert [r.key.sample for r in target.requests] == [0, 1, 2]
    assert target.length.tolist() == [3, 2, 3, 0]
    assert target.limit.tolist() == [8, 7, 8, 0]
    assert target.tokens[1, :2].tolist() == [10, 11]


def test_a_number_belongs_to_a_key_and_a_position_of_the_sequence() -> None:
    """So that a partial response, given as a prefix, goes on with the numbers that it would have had."""
    whole, resumed = slots(), slots()
    whole.admit([request(0, prefix=3, max_tokens=6)], SEED)
    resumed.admit([request(5), request(0, prefix=7, max_tokens=2)], SEED)
    assert torch.equal(whole.uniforms[0, 7:9], resumed.uniforms[1, 7:9])
    expected = uniforms(SEED, ("sample", "train", 1, "p", 0, 0), 3, 9)
    assert whole.uniforms[0, 3:9].tolist() == expected.tolist()
    assert not torch.equal(resumed.uniforms[0, 7:8], resumed.uniforms[1, 7:8])


def test_appending_tells_what_stopped_and_what_is_full() -> None:
    target = slots()
    target.admit([request(0, max_tokens=1), request(1, stop_ids=(8, 9)), request(2, max_tokens=1, stop_ids=(9,))], SEED)
    assert append(target, {0: 9, 1: 9, 2: 9}) == ([False, True, True], [True, False, True])
    assert append(target, {1: 5}) == ([False], [False])
    assert target.length.tolist()[:3] == [4, 5, 4]


def test_a_completion_has_what_was_appended() -> None:
    target = slots()
    target.admit([request(0), request(1)], SEED)
    target.routes[1, :4] = torch.arange(16, dtype=torch.uint8).view(4, 2, 2)
    append(target, {0: 1, 1: 4}, version=7)
    append(target, {1: 6}, version=8)
    completion = target.completion(1, "length")
    assert (completion.key, completion.finish) == (request(1).key, "length")
    assert completion.token_ids.tolist() == [4, 6]
    assert completion.logprobs.tolist() == [-4, -6]
    assert completion.versions.tolist() == [7, 8]
    assert completion.routes is not None
    assert completion.routes.tolist() == np.arange(16).reshape(4, 2, 2).tolist()
    assert [a.dtype for a in (completion.token_ids, completion.logprobs, completion.versions, completion.routes)] == [
        np.int32, np.float32, np.int32, np.uint8,
    ]  # fmt: skip


def test_a_completion_is_a_copy() -> None:
    target = slots()
    target.admit([request(0)], SEED)
    append(target, {0: 4})
    completion = target.completion(0, "abort")
    for tensor in (target.tokens, target.logprobs, target.versions, target.routes):
        tensor.fill_(99)
    assert completion.routes is not None
    assert 99 not in [*completion.token_ids, *completion.logprobs, *completion.versions, *completion.routes.flatten()]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.uint8, np.uint8), (torch.int32, np.uint16)])
def test_routes_have_the_smallest_type_that_holds_them(dtype: torch.dtype, expected: Any) -> None:
    target = slots(dtype=dtype)
    target.admit([request(0)], SEED)
    append(target, {0: 4})
    routes = target.completion(0, "stop").routes
    assert routes is not None
    assert routes.dtype == expected


def test_without_experts_there_are_no_routes() -> None:
    target = slots(moe_layers=0)
    target.admit([request(0)], SEED)
    append(target, {0: 4})
    assert target.completion(0, "stop").routes is None


def test_a_released_slot_takes_the_last_sequence_whole() -> None:
    target = slots()
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "min_tokens": 2,
        "stop_ids": (5, 6),
    }
    target.admit([request(0), request(1), request(2, prefix=4, **params)], SEED)
    target.routes[2] = 3
    append(target, {0: 1, 1: 2, 2: 3})
    first, last = state(target, 1), state(target, 2)
    assert target.release(0) == 2
    assert state(target, 0) == last
    assert state(target, 1) == first
    assert len(target.requests) == 2


def test_releasing_the_last_slot_moves_nothing() -> None:
    target = slots()
    target.admit([request(0), request(1)], SEED)
    before = state(target, 0)
    assert target.release(1) == 1
    assert state(target, 0) == before
    assert [r.key.sample for r in target.requests] == [0]


def test_a_slot_forgets_the_stop_tokens_of_the_sequence_before() -> None:
    target = slots()
    target.admit([request(0, stop_ids=(4, 5, 6))], SEED)
    target.release(0)
    target.admit([request(1, stop_ids=(7,)), request(2)], SEED)
    assert append(target, {0: 5, 1: 5}) == ([False, False], [False, False])
    assert append(target, {0: 7, 1: 7}) == ([True, False], [False, False])


def test_more_stop_tokens_than_before_keep_those_of_others() -> None:
    target = slots()
    target.admit([request(0, stop_ids=(4,))], SEED)
    target.admit([request(1, stop_ids=(5, 6, 7))], SEED)
    assert append(target, {0: 4, 1: 7})[0] == [True, True]
    assert append(target, {0: 7, 1: 4})[0] == [False, False]


def test_stop_tokens_wait_for_min_tokens() -> None:
    target = slots()
    target.admit([request(0, prefix=3, min_tokens=2), request(1, prefix=6)], SEED)
    assert target.stop_after.tolist()[:2] == [5, 6]
