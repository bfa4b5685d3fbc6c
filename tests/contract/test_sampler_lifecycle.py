"""What every sampler does around drawing: abort and go on, new weights, sleep and wake, refuse what it cannot do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from beamline.records import Request, SamplingParams
from beamline.rollout.sampler import Sampler
from tests.contract.engines import SamplerBench, SamplerFactory, Unfinished
from tests.contract.sampling import AssertSame, collect, prefix, request, requests, resumed, run, sequence, start
from tests.tiny_beam import CONTEXT, VOCAB, random_beam, reference, teacher_forced

MODULE, OTHER = random_beam(0), random_beam(1)
PLAIN_OTHER = reference(OTHER)

# Abort


def test_an_aborted_response_goes_on_as_if_it_had_not_been(
    sampler_factory: SamplerFactory, assert_same: AssertSame
) -> None:
    asked = requests()[:4]
    whole = run(sampler_factory(MODULE, slots=8).sampler, asked)
    sampler = sampler_factory(MODULE, slots=8).sampler
    start(sampler, asked)
    partials = {c.key: c for c in sampler.abort([r.key for r in asked])}
    rest = run(sampler, [resumed(r, partials[r.key]) for r in asked])
    for wanted, uninterrupted, end in zip(asked, whole, rest, strict=True):
        begin = partials[wanted.key]
        assert begin.finish == "abort"
        assert 0 < len(begin.token_ids) < wanted.params.max_tokens
        tokens, logprobs = (
            np.concatenate([getattr(c, name) for c in (begin, end)]) for name in ("token_ids", "logprobs")
        )
        assert_same([replace(end, token_ids=tokens, logprobs=logprobs)], [uninterrupted])
        assert uninterrupted.routes is not None
        np.testing.assert_array_equal(end.routes, uninterrupted.routes)
        np.testing.assert_array_equal(begin.routes, uninterrupted.routes[: len(sequence(wanted, begin)) - 1])


def test_aborting_some_leaves_the_others_alone(sampler_factory: SamplerFactory, assert_same: AssertSame) -> None:
    asked = requests()[:6]
    whole = run(sampler_factory(MODULE, slots=8).sampler, asked)
    sampler = sampler_factory(MODULE, slots=8).sampler
    start(sampler, asked)
    sampler.abort([asked[0].key, asked[3].key])
    done = collect(sampler, 4)
    kept = [1, 2, 4, 5]
    assert_same([whole[i] for i in kept], [done[asked[i].key] for i in kept])


def test_aborting_works_with_several_stop_tokens(sampler_factory: SamplerFactory) -> None:
    asked = [replace(r, params=replace(r.params, stop_ids=(VOCAB - 1, VOCAB - 2))) for r in requests()[:4]]
    sampler = sampler_factory(MODULE, slots=8).sampler
    sampler.submit(asked)
    early = {c.key for c in sampler.poll(0.0)}
    going = [r.key for r in asked if r.key not in early]
    (partial,) = sampler.abort(going[:1])
    assert partial.finish == "abort"
    assert set(collect(sampler, len(going) - 1)) == set(going[1:])


def test_a_waiting_request_is_aborted_with_nothing(sampler_factory: SamplerFactory, assert_same: AssertSame) -> None:
    sampler = sampler_factory(MODULE, slots=1).sampler
    first, second = request(5, 0), request(5, 1)
    sampler.submit([first, second])
    (partial,) = sampler.abort([second.key])
    assert (partial.key, partial.finish, len(partial.token_ids), partial.routes) == (second.key, "abort", 0, None)
    assert (len(partial.logprobs), len(partial.versions)) == (0, 0)
    assert list(collect(sampler, 1)) == [first.key]
    assert_same(run(sampler, [second]), run(sampler_factory(MODULE).sampler, [second]))


def test_aborting_what_is_not_in_flight_is_an_error_and_stops_nothing(sampler_factory: SamplerFactory) -> None:
    sampler = sampler_factory(MODULE).sampler
    known, unknown = request(5, 0), request(5, 1)
    sampler.submit([known])
    with pytest.raises(KeyError, match="not in flight"):
        sampler.abort([known.key, unknown.key])
    (completion,) = collect(sampler, 1).values()
    assert completion.finish == "length"


# Weights


def test_tokens_are_stamped_with_the_version(sampler_factory: SamplerFactory) -> None:
    bench = sampler_factory(MODULE)
    (before,) = run(bench.sampler, [request(5)])
    bench.give(MODULE, 7, "keep")
    (after,) = run(bench.sampler, [request(5)])
    assert set(before.versions.tolist()) == {1}
    assert set(after.versions.tolist()) == {7}


def test_the_same_weights_again_change_nothing(sampler_factory: SamplerFactory) -> None:
    bench = sampler_factory(MODULE)
    before = run(bench.sampler, requests())
    bench.give(MODULE, 2, "keep")
    for one, other in zip(before, run(bench.sampler, requests()), strict=True):
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_new_weights_sample_like_their_module(sampler_factory: SamplerFactory) -> None:
    bench = sampler_factory(MODULE)
    run(bench.sampler, requests())
    bench.give(OTHER, 2, "keep")
    asked = requests()
    for wanted, completion in zip(asked, run(bench.sampler, asked), strict=True):
        expected = teacher_forced(PLAIN_OTHER, sequence(wanted, completion))[len(wanted.prefix_ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_unfinished_requests_go_on_with_new_weights(sampler_factory: SamplerFactory) -> None:
    asked = requests()[:3]
    whole = run(sampler_factory(MODULE).sampler, asked)
    bench = sampler_factory(MODULE)
    start(bench.sampler, asked)
    bench.give(OTHER, 2, "keep")
    done = collect(bench.sampler, 3)
    for wanted, uninterrupted in zip(asked, whole, strict=True):
        completion = done[wanted.key]
        old = int((completion.versions == 1).sum())
        assert completion.versions.tolist() == [1] * old + [2] * (30 - old)
        assert 0 < old < 30
        np.testing.assert_array_equal(completion.token_ids[:old], uninterrupted.token_ids[:old])
        assert completion.token_ids[old:].tolist() != uninterrupted.token_ids[old:].tolist()


def test_unfinished_requests_keep_their_cache(sampler_factory: SamplerFactory, assert_same: AssertSame) -> None:
    asked = requests()[:3]
    whole = run(sampler_factory(MODULE).sampler, asked)
    bench = sampler_factory(MODULE)
    start(bench.sampler, asked)
    bench.give(MODULE, 2, "keep")
    done = collect(bench.sampler, 3)
    assert_same(whole, [done[r.key] for r in asked])


def test_unfinished_requests_end_with_an_abort(sampler_factory: SamplerFactory) -> None:
    """Those in a slot and those waiting, each once, also when weights come twice before the poll."""
    bench = sampler_factory(MODULE, slots=4)
    asked = requests()[:8]
    start(bench.sampler, asked)
    bench.give(OTHER, 2, "abort")
    bench.give(OTHER, 3, "abort")
    partials = collect(bench.sampler, 8)
    assert bench.sampler.poll(0.0) == []
    assert {c.finish for c in partials.values()} == {"abort"}
    assert {version for c in partials.values() for version in c.versions.tolist()} == {1}
    again = [resumed(r, partials[r.key]) for r in asked]
    for wanted, completion in zip(again, run(bench.sampler, again), strict=True):
        assert set(completion.versions.tolist()) == {3}
        expected = teacher_forced(PLAIN_OTHER, sequence(wanted, completion))[len(wanted.prefix_ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)


# Sleep


def test_the_weights_survive_a_sleep_without_the_cache(
    sampler_factory: SamplerFactory, assert_same: AssertSame
) -> None:
    sampler = sampler_factory(MODULE).sampler
    before = run(sampler, requests())
    sampler.sleep(1)
    sampler.wake(["cache"])
    assert_same(before, run(sampler, requests()))


def _after_an_abort(sampler: Sampler, asked: list[Request]) -> None:
    start(sampler, asked)
    sampler.abort([wanted.key for wanted in asked])


def _after_a_stop(sampler: Sampler, asked: list[Request]) -> None:
    stops = tuple(range(0, VOCAB, 2))
    ended = run(sampler, [replace(each, params=replace(each.params, stop_ids=stops)) for each in asked])
    assert {completion.finish for completion in ended} == {"stop"}


@pytest.mark.parametrize("before", [_after_an_abort, _after_a_stop])
def test_a_sampler_sleeps_at_once_when_nothing_is_in_flight(
    sampler_factory: SamplerFactory, before: Callable[[Sampler, list[Request]], None], assert_same: AssertSame
) -> None:
    """Also where it had begun with tokens that nobody waits for any more."""
    sampler, asked = sampler_factory(MODULE, slots=8).sampler, requests()[:4]
    whole = run(sampler, asked)
    before(sampler, asked)
    sampler.sleep(1)
    sampler.wake(["cache"])
    assert_same(whole, run(sampler, asked))


@pytest.mark.parametrize("levels", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_what_sleeps_may_be_put_to_sleep_again(
    sampler_factory: SamplerFactory, levels: tuple[int, int], assert_same: AssertSame
) -> None:
    bench = sampler_factory(MODULE)
    before = run(bench.sampler, requests())
    for level in levels:
        bench.sampler.sleep(level)
    bench.sampler.wake(["weights", "cache"])
    bench.give(MODULE, 1, "keep")
    assert_same(before, run(bench.sampler, requests()))


@pytest.mark.parametrize("unfinished", ["keep", "abort"])
def test_weights_arrive_before_the_cache_is_taken(
    sampler_factory: SamplerFactory, unfinished: Unfinished, assert_same: AssertSame
) -> None:
    bench = sampler_factory(MODULE)
    run(bench.sampler, requests())
    bench.sampler.sleep(2)
    bench.sampler.wake(["weights"])
    bench.give(OTHER, 2, unfinished)
    bench.sampler.wake(["cache"])
    assert_same(run(sampler_factory(OTHER).sampler, requests()), run(bench.sampler, requests()))


def test_waking_what_is_awake_changes_nothing(sampler_factory: SamplerFactory, assert_same: AssertSame) -> None:
    sampler = sampler_factory(MODULE).sampler
    before = run(sampler, requests())
    sampler.wake(["weights", "cache"])
    assert_same(before, run(sampler, requests()))


def _asleep(bench: SamplerBench) -> None:
    bench.sampler.sleep(1)


def _asleep_without_weights(bench: SamplerBench) -> None:
    bench.sampler.sleep(2)


def _half_awake(bench: SamplerBench) -> None:
    bench.sampler.sleep(2)
    bench.sampler.wake(["weights"])
    bench.give(MODULE, 2, "keep")


def _awake_without_weights(bench: SamplerBench) -> None:
    bench.sampler.sleep(2)
    bench.sampler.wake(["weights", "cache"])


@pytest.mark.parametrize("state", [_asleep, _asleep_without_weights, _half_awake, _awake_without_weights])
def test_nothing_can_be_submitted_until_all_is_there(
    sampler_factory: SamplerFactory, state: Callable[[SamplerBench], None]
) -> None:
    bench = sampler_factory(MODULE)
    state(bench)
    with pytest.raises(RuntimeError, match=r"wake|weights"):
        bench.sampler.submit([request(5)])


def test_nothing_can_be_submitted_before_the_first_weights(sampler_factory: SamplerFactory) -> None:
    with pytest.raises(RuntimeError, match="weights"):
        sampler_factory(None).sampler.submit([request(5)])


def test_weights_cannot_arrive_where_they_have_no_place(sampler_factory: SamplerFactory) -> None:
    bench = sampler_factory(MODULE)
    bench.sampler.sleep(2)
    with pytest.raises(RuntimeError, match="wake"):
        bench.give(MODULE, 2, "keep")


@pytest.mark.parametrize("level", [1, 2])
def test_there_is_no_sleep_with_requests_in_flight(
    sampler_factory: SamplerFactory, level: int, assert_same: AssertSame
) -> None:
    sampler = sampler_factory(MODULE).sampler
    sampler.submit([request(5)])
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
        sampler.sleep(level)
    assert_same(run(sampler_factory(MODULE).sampler, [request(5)]), list(collect(sampler, 1).values()))


# Requests that cannot be


def test_a_key_is_in_flight_once(sampler_factory: SamplerFactory) -> None:
    sampler = sampler_factory(MODULE).sampler
    sampler.submit([request(5)])
    with pytest.raises(ValueError, match="in flight already"):
        sampler.submit([request(5)])
    collect(sampler, 1)
    sampler.submit([request(5)])


def test_a_key_occurs_once_in_a_submission(sampler_factory: SamplerFactory) -> None:
    with pytest.raises(ValueError, match="in flight already"):
        sampler_factory(MODULE).sampler.submit([request(5), request(5)])


def _request(ids: list[int], **params: Any) -> Request:
    params = {"max_tokens": 8} | params
    return Request(request(9).key, np.array(ids, dtype=np.int32), SamplingParams(**params))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_request([]), "empty prefix"),
        (_request([1] * (CONTEXT - 7)), f"{CONTEXT + 1} tokens"),
        (_request([1], max_tokens=CONTEXT), f"{CONTEXT + 1} tokens"),
        (_request([1, -1, 2]), "token -1"),
        (_request([1, VOCAB]), f"token {VOCAB}"),
        (_request([1], stop_ids=(2, VOCAB)), f"token {VOCAB}"),
    ],
)
def test_an_impossible_request_is_refused_with_all_that_came_with_it(
    sampler_factory: SamplerFactory, bad: Request, message: str, assert_same: AssertSame
) -> None:
    sampler = sampler_factory(MODULE).sampler
    with pytest.raises(ValueError, match=message) as error:
        sampler.submit([request(5), bad])
    assert str(bad.key) in str(error.value)
    assert sampler.poll(0.0) == []
    assert_same(run(sampler_factory(MODULE).sampler, [request(5)]), run(sampler, [request(5)]))


def test_a_request_may_fill_the_sampler_to_the_last_token(sampler_factory: SamplerFactory) -> None:
    sampler: Sampler = sampler_factory(MODULE).sampler
    full = Request(request(9).key, prefix(CONTEXT - 3), SamplingParams(3))
    (completion,) = run(sampler, [full])
    assert len(completion.token_ids) == 3
