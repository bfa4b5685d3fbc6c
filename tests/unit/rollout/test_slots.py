from typing import Any

import numpy as np

from beamline.records import Key, Request, SamplingParams
from beamline.records.random import uniforms
from beamline.rollout.local.slots import Slots

SEED = 11


def slots(count: int = 4, moe_layers: int = 2, dtype: Any = np.uint8) -> Slots:
    return Slots(count, positions=20, moe_layers=moe_layers, experts_per_token=2, route_dtype=np.dtype(dtype))


def request(sample: int, prefix: int = 3, max_tokens: int = 5, **params: Any) -> Request:
    ids = np.arange(prefix, dtype=np.int32) + 10 * sample
    return Request(Key("train", 1, "p", sample), ids, SamplingParams(max_tokens, **params))


def append(target: Slots, drawn: dict[int, int], version: int = 7) -> tuple[list[bool], list[bool]]:
    """Draw a token for some slots, with minus the token as its log-probability."""
    tokens = np.array(list(drawn.values()))
    stopped, full = target.append(np.array(list(drawn)), tokens, -tokens.astype(np.float32), version)
    return stopped.tolist(), full.tolist()


def state(target: Slots, slot: int) -> dict[str, Any]:
    """Everything that is known of the sequence in a slot."""
    arrays = {name: value[slot].tolist() for name, value in vars(target).items() if isinstance(value, np.ndarray)}
    return arrays | {"key": target.requests[slot].key}


def test_requests_take_free_slots() -> None:
    target = slots()
    assert target.admit([request(0), request(1, prefix=2)], SEED) == [0, 1]
    assert target.admit([request(2)], SEED) == [2]
    assert {slot: r.key.sample for slot, r in target.requests.items()} == {0: 0, 1: 1, 2: 2}
    assert target.active.tolist() == [0, 1, 2]
    assert target.length.tolist() == [3, 2, 3, 0]
    assert target.limit.tolist() == [8, 7, 8, 0]
    assert target.tokens[1, :2].tolist() == [10, 11]


def test_a_number_belongs_to_a_key_and_a_position_of_the_sequence() -> None:
    """So that a partial response, given as a prefix, goes on with the numbers that it would have had."""
    whole, resumed = slots(), slots()
    whole.admit([request(0, prefix=3, max_tokens=6)], SEED)
    resumed.admit([request(5), request(0, prefix=7, max_tokens=2)], SEED)
    assert whole.uniforms[0, 7:9].tolist() == resumed.uniforms[1, 7:9].tolist()
    expected = uniforms(SEED, ("sample", "train", 1, "p", 0, 0), 3, 9)
    assert whole.uniforms[0, 3:9].tolist() == expected.tolist()
    assert resumed.uniforms[0, 7] != resumed.uniforms[1, 7]


def test_appending_tells_what_stopped_and_what_is_full() -> None:
    target = slots()
    target.admit([request(0, max_tokens=1), request(1, stop_ids=(8, 9)), request(2, max_tokens=1, stop_ids=(9,))], SEED)
    assert append(target, {0: 9, 1: 9, 2: 9}) == ([False, True, True], [True, False, True])
    assert append(target, {1: 5}) == ([False], [False])
    assert target.length.tolist()[:3] == [4, 5, 4]


def test_a_completion_has_what_was_appended() -> None:
    target = slots()
    target.admit([request(0), request(1)], SEED)
    target.routes[1, :4] = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
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
    for array in (target.tokens, target.logprobs, target.versions, target.routes):
        array[:] = 99
    assert completion.routes is not None
    assert 99 not in [*completion.token_ids, *completion.logprobs, *completion.versions, *completion.routes.flatten()]


def test_routes_keep_the_type_that_they_are_held_in() -> None:
    target = slots(dtype=np.uint16)
    target.admit([request(0)], SEED)
    append(target, {0: 4})
    routes = target.completion(0, "stop").routes
    assert routes is not None
    assert routes.dtype == np.uint16


def test_a_completion_has_the_support_of_each_of_its_tokens_if_asked_for() -> None:
    """Empty where nothing was noted; what was noted again, or of a token that was never drawn, does not count."""
    target = slots()
    target.admit([request(0), request(1, prefix=4, record_support=True)], SEED)
    for tokens in ({0: 1, 1: 2}, {0: 1, 1: 3}, {0: 1, 1: 4}):
        append(target, tokens)
    target.allowed[1] |= {4: np.array([9, 9], np.int32), 6: np.array([8], np.int32), 7: np.array([7], np.int32)}
    target.allowed[1][4] = np.array([2, 5], np.int32)
    assert target.completion(0, "stop").support is None
    support = target.completion(1, "stop").support
    assert support is not None
    assert (support.ids.tolist(), support.borders.tolist()) == ([2, 5, 8], [0, 2, 2, 3])


def test_a_slot_forgets_the_support_of_the_sequence_before() -> None:
    target = slots()
    target.admit([request(0, record_support=True)], SEED)
    target.allowed[0][3] = np.array([1, 2], np.int32)
    target.release([0])
    target.admit([request(1, record_support=True)], SEED)
    append(target, {0: 4})
    support = target.completion(0, "stop").support
    assert support is not None
    assert support.sizes.tolist() == [0]
    target.release([0])
    target.admit([request(2)], SEED)
    assert target.completion(0, "stop").support is None


def test_without_experts_there_are_no_routes() -> None:
    target = slots(moe_layers=0)
    target.admit([request(0)], SEED)
    append(target, {0: 4})
    assert target.completion(0, "stop").routes is None


def test_releasing_a_slot_leaves_the_others_where_they_are() -> None:
    target = slots()
    target.admit([request(0), request(1), request(2, prefix=4)], SEED)
    append(target, {0: 1, 1: 2, 2: 3})
    first, last = state(target, 0), state(target, 2)
    target.release([1])
    assert (state(target, 0), state(target, 2)) == (first, last)
    assert target.active.tolist() == [0, 2]


def test_a_sequence_is_set_up_alike_wherever_another_one_was() -> None:
    used, fresh = slots(), slots()
    params: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "min_tokens": 2}
    used.admit([request(i, prefix=8, max_tokens=9, **params) for i in range(3)], SEED)
    append(used, {0: 1, 1: 2, 2: 3})
    used.release([0, 2])
    assert used.admit([request(3), request(4), request(5)], SEED) == [0, 2, 3]
    fresh.admit([request(3), request(1), request(4), request(5)], SEED)
    for slot in (0, 2, 3):
        for name in ("length", "prefix", "limit", "stop_after", "temperature", "top_p", "top_k", "min_p"):
            assert getattr(used, name)[slot] == getattr(fresh, name)[slot], name
        assert used.tokens[slot, :3].tolist() == fresh.tokens[slot, :3].tolist()
        assert used.uniforms[slot, 3:8].tolist() == fresh.uniforms[slot, 3:8].tolist()


def test_a_slot_forgets_the_stop_tokens_of_the_sequence_before() -> None:
    target = slots()
    target.admit([request(0, stop_ids=(4, 5, 6))], SEED)
    target.release([0])
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
