"""What every sampler records of routes: the experts of prompt and response but the last token, however it ended."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from beamline.records import Completion, Request
from beamline.rollout.collect import joined
from beamline.rollout.routes import check_routes
from tests.contract.engines import SamplerFactory
from tests.contract.forcing import Routes
from tests.contract.sampling import collect, request, requests, resumed, run, sequence, start
from tests.tiny_beam import beam_shape, evaluate, random_beam, reference

MODULE, OTHER = random_beam(0), random_beam(1)
PLAIN = reference(MODULE)


def recorded(asked: Request, completion: Completion) -> Routes:
    """The routes of a completion, which must be possible, and there for every token but the last."""
    check_routes(asked.key, completion.routes, len(asked.prefix_ids) + len(completion.token_ids), beam_shape())
    assert completion.routes is not None
    return completion.routes


def assert_recorded(asked: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Each token's experts are those that the module chooses, in any order."""
    for wanted, completion in zip(asked, completions, strict=True):
        expected = evaluate(PLAIN, sequence(wanted, completion)[:-1]).routes_SLK
        np.testing.assert_array_equal(np.sort(recorded(wanted, completion)), np.sort(expected))


def test_responses_that_reach_their_limit(sampler_factory: SamplerFactory) -> None:
    asked = [request(length, sample=limit, max_tokens=limit) for length in (1, 8, 20) for limit in (1, 2, 30)]
    assert_recorded(asked, run(sampler_factory(MODULE, slots=16).sampler, asked))


def test_responses_that_stop(sampler_factory: SamplerFactory) -> None:
    """With their first token, or later."""
    free = run(sampler_factory(MODULE, slots=16).sampler, requests())
    stops = [(int(completion.token_ids[i]),) for i, completion in enumerate(free)]
    asked = [replace(r, params=replace(r.params, stop_ids=ids)) for r, ids in zip(requests(), stops, strict=True)]
    completions = run(sampler_factory(MODULE, slots=16).sampler, asked)
    assert {completion.finish for completion in completions} == {"stop"}
    assert len(completions[0].token_ids) == 1
    assert_recorded(asked, completions)


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_responses_to_one_prompt_and_those_that_follow_in_a_slot(sampler_factory: SamplerFactory, slots: int) -> None:
    """The evaluation of a prompt may be shared, and a slot may hold what an earlier, longer sequence left in it."""
    asked = [request(length, sample, max_tokens=12 - 3 * sample) for sample in range(4) for length in (20, 5)]
    assert_recorded(asked, run(sampler_factory(MODULE, slots=slots).sampler, asked))


def test_responses_that_are_aborted_and_go_on(sampler_factory: SamplerFactory) -> None:
    sampler, asked = sampler_factory(MODULE, slots=8).sampler, requests()[:6]
    start(sampler, asked)
    partials = {c.key: c for c in sampler.abort([r.key for r in asked])}
    begun = [partials[r.key] for r in asked]
    assert_recorded(asked, begun)
    going_on = [resumed(r, begin) for r, begin in zip(asked, begun, strict=True)]
    rest = run(sampler, going_on)
    assert_recorded(going_on, rest)
    assert_recorded(asked, [joined(begin, end) for begin, end in zip(begun, rest, strict=True)])


def test_responses_that_new_weights_end(sampler_factory: SamplerFactory) -> None:
    bench, asked = sampler_factory(MODULE, slots=8), requests()[:6]
    start(bench.sampler, asked)
    bench.give(OTHER, 2, "abort")
    partials = collect(bench.sampler, 6)
    assert_recorded(asked, [partials[r.key] for r in asked])


def test_responses_that_go_on_under_new_weights(sampler_factory: SamplerFactory) -> None:
    """Each token has the experts of the weights that evaluated it."""
    bench, asked = sampler_factory(MODULE, slots=8), requests()[:6]
    start(bench.sampler, asked)
    bench.give(OTHER, 2, "keep")
    done = collect(bench.sampler, 6)
    changed = 0
    for wanted in asked:
        completion = done[wanted.key]
        before = len(wanted.prefix_ids) + int((completion.versions == 1).sum()) - 1
        found, under_old = recorded(wanted, completion), evaluate(PLAIN, sequence(wanted, completion)[:-1]).routes_SLK
        same = (np.sort(found) == np.sort(under_old)).all(axis=(1, 2))
        assert same[:before].all()
        changed += int((~same[before:]).sum())
    assert changed > 0
