"""Jobs with a cutoff: which groups are drawn to their end, and that their responses are those of a job without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from beamline.chat import BeamChat
from beamline.config.schema import OverlongConfig, RewardConfig
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Completion, Group, Key, Request, Rollout, SamplingParams, Support
from beamline.rollout.collect import Cutoff, Job, Sampled, joined, sample, sample_until
from beamline.rollout.grading import Grading
from beamline.rollout.local import LocalSampler, Numerics
from beamline.tasks.pool import GradingPool
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors
from tests.exact import bits
from tests.samples import make_problem
from tests.tiny_beam import CONTEXT, THETA, beam_shape, random_beam

LIMIT, SAMPLES, PROBLEMS = 24, 3, 8


@pytest.fixture(scope="module")
def module(chat: BeamChat) -> Any:
    return random_beam(vocab_size=chat.vocab_size)


def sampler_of(module: Any, slots: int = 64) -> LocalSampler:
    channel = LocalChannel()
    shape = beam_shape(vocab_size=module.config.vocab_size)
    sampler = LocalSampler(shape, Numerics(), THETA, slots, CONTEXT, 0, channel)
    moves = plan(module_layout(module), sampler.layout("full"))
    channel.send(moves, Tensors(named_tensors(module)))
    sampler.receive(moves, 7, "keep")
    return sampler


def job_of(cutoff: Cutoff | None = None, **params: Any) -> Job:
    """Responses end at very different lengths: a sixteenth of the vocabulary stops them."""
    problems = [make_problem(f"{n}+{n}") for n in range(PROBLEMS)]
    stops = tuple(range(0, 256, 16))
    return Job("train", 1, problems, SAMPLES, SamplingParams(LIMIT, stop_ids=stops, **params), cutoff=cutoff)


@dataclass
class Observed:
    """What a job was drawn to, and what was told meanwhile."""

    sampled: Sampled = field(default_factory=lambda: Sampled([]))
    kept: list[Completion] = field(default_factory=list)
    ended: list[Completion] = field(default_factory=list)


def drawn(sampler: LocalSampler, job: Job, chat: BeamChat) -> Observed:
    seen = Observed()
    seen.sampled = sample_until(sampler, job, chat, 60.0, seen.kept.append, seen.ended.append)
    return seen


def unfinished(group: Group, tokens: int) -> int:
    """How many of its responses had not ended after so many tokens."""
    return sum(
        r.response_tokens > tokens or (r.response_tokens == tokens < LIMIT and r.finish != "stop")
        for r in group.rollouts
    )


def assert_same(one: Rollout, other: Rollout) -> None:
    """Bit for bit, with everything that a learner takes from them."""
    assert (one.key, one.finish, one.turns) == (other.key, other.finish, other.turns)
    for name in ("token_ids", "policy_mask", "versions", "routes"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(bits(one.logprobs), bits(other.logprobs))


@pytest.mark.parametrize("groups", [1, 5, PROBLEMS])
@pytest.mark.parametrize("cutoff", [1, 9, LIMIT - 1])
def test_responses_are_those_of_a_job_without_a_cutoff(module: Any, chat: BeamChat, cutoff: int, groups: int) -> None:
    whole = {g.problem.id: g for g in sample(sampler_of(module), job_of(), chat, 60.0)}
    made = drawn(sampler_of(module), job_of(Cutoff(cutoff, groups)), chat).sampled.groups
    assert len(made) == groups
    for group in made:
        for one, other in zip(group.rollouts, whole[group.problem.id].rollouts, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("cutoff", [1, 9, LIMIT - 1, LIMIT])
def test_the_groups_with_the_fewest_unfinished_responses_are_kept(
    module: Any, chat: BeamChat, cutoff: int, slots: int
) -> None:
    whole = sample(sampler_of(module), job_of(), chat, 60.0)
    order = sorted(range(PROBLEMS), key=lambda i: (unfinished(whole[i], cutoff), i))
    made = drawn(sampler_of(module, slots), job_of(Cutoff(cutoff, 5)), chat).sampled
    assert [g.problem.id for g in made.groups] == [whole[i].problem.id for i in sorted(order[:5])]
    left_out = [r.response_tokens for i in order[5:] for r in whole[i].rollouts]
    assert made.groups_left_out == PROBLEMS - 5
    assert made.tokens_left_out == sum(min(tokens, cutoff) for tokens in left_out)


def test_the_job_of_these_tests_has_groups_of_every_kind(module: Any, chat: BeamChat) -> None:
    whole = sample(sampler_of(module), job_of(), chat, 60.0)
    assert {unfinished(group, 9) for group in whole} == {0, 1, 2, 3}
    assert {rollout.finish for group in whole for rollout in group.rollouts} == {"stop", "length"}


@pytest.mark.parametrize("cutoff", [1, 9, LIMIT])
def test_every_response_ends_once_and_those_that_are_kept_are_whole(module: Any, chat: BeamChat, cutoff: int) -> None:
    seen = drawn(sampler_of(module), job_of(Cutoff(cutoff, 5)), chat)
    assert len({c.key for c in seen.ended}) == len(seen.ended) == PROBLEMS * SAMPLES
    rollouts = {r.key: r for g in seen.sampled.groups for r in g.rollouts}
    assert sorted(c.key for c in seen.kept) == sorted(rollouts)
    for completion in seen.kept:
        rollout = rollouts[completion.key]
        np.testing.assert_array_equal(completion.token_ids, rollout.token_ids[rollout.policy_mask])
    decoded = sum(r.response_tokens for r in rollouts.values()) + seen.sampled.tokens_left_out
    assert sum(len(c.token_ids) for c in seen.ended) == decoded


def test_a_job_without_a_cutoff_is_drawn_whole_and_observed(module: Any, chat: BeamChat) -> None:
    seen = drawn(sampler_of(module), job_of(), chat)
    for group, other in zip(seen.sampled.groups, sample(sampler_of(module), job_of(), chat, 60.0), strict=True):
        for one, uninterrupted in zip(group.rollouts, other.rollouts, strict=True):
            assert_same(one, uninterrupted)
    assert seen.kept == seen.ended
    assert len(seen.kept) == PROBLEMS * SAMPLES
    assert (seen.sampled.groups_left_out, seen.sampled.tokens_left_out) == (0, 0)


def test_where_enough_groups_are_finished_none_goes_on(
    module: Any, chat: BeamChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, submitted = sampler_of(module), list[int]()
    submit = sampler.submit

    def watched(requests: Sequence[Request]) -> None:
        submitted.append(len(requests))
        submit(requests)

    monkeypatch.setattr(sampler, "submit", watched)
    made = drawn(sampler, job_of(Cutoff(LIMIT, 5)), chat).sampled.groups
    assert [g.problem.text for g in made] == [f"{n}+{n}" for n in range(5)]
    assert submitted == [PROBLEMS * SAMPLES, 0]


@pytest.mark.parametrize("least", [4, 9, 15])
def test_stops_that_are_not_allowed_yet_stay_so_over_the_cutoff(module: Any, chat: BeamChat, least: int) -> None:
    whole = sample(sampler_of(module), job_of(min_tokens=least), chat, 60.0)
    made = drawn(sampler_of(module), job_of(Cutoff(9, PROBLEMS), min_tokens=least), chat).sampled.groups
    for group, other in zip(made, whole, strict=True):
        for one, uninterrupted in zip(group.rollouts, other.rollouts, strict=True):
            assert_same(one, uninterrupted)


def test_the_support_of_a_response_in_two_parts_is_that_of_a_whole_one(module: Any, chat: BeamChat) -> None:
    params = {"top_p": 0.9, "record_support": True}
    whole = sample(sampler_of(module), job_of(**params), chat, 60.0)
    made = drawn(sampler_of(module), job_of(Cutoff(9, PROBLEMS), **params), chat).sampled.groups
    for group, other in zip(made, whole, strict=True):
        for one, uninterrupted in zip(group.rollouts, other.rollouts, strict=True):
            assert_same(one, uninterrupted)
            assert one.support is not None
            assert uninterrupted.support is not None
            np.testing.assert_array_equal(one.support.borders, uninterrupted.support.borders)
            np.testing.assert_array_equal(one.support.ids, uninterrupted.support.ids)


@pytest.fixture(scope="module")
def pool() -> Iterator[GradingPool]:
    with GradingPool(workers=1, deadline_seconds=60, memory_mb=512) as opened:
        yield opened


def test_a_response_in_two_parts_is_graded_as_one(module: Any, chat: BeamChat, pool: GradingPool) -> None:
    config = RewardConfig(grader="exact", overlong=OverlongConfig(buffer_tokens=LIMIT - 1, factor=1.0))
    job = job_of(Cutoff(9, 5))
    grading = Grading(pool, job, chat, config)
    made = sample_until(sampler_of(module), job, chat, 60.0, grading.add, lambda _: None)
    for group in grading.finish(made.groups):
        for rollout in group.rollouts:
            assert rollout.grade is not None
            expected = -max(rollout.response_tokens - 1, 0) / (LIMIT - 1)
            assert rollout.grade.parts["overlong"] == pytest.approx(expected, abs=1e-12)


def part(tokens: range, routes: list[int] | None, **changes: Any) -> Completion:
    ids = np.array(tokens, np.int32)
    made = None if routes is None else np.array(routes, np.uint8)[:, None, None]
    blank = Completion(Key("train", 1, "p", 0), ids, -ids.astype(np.float32), ids // 10, made, "length")
    return replace(blank, **changes)


def test_each_token_keeps_the_experts_that_it_was_drawn_with() -> None:
    """A sampler may evaluate the first part again in another way, as part of a prefix."""
    begin, rest = part(range(10, 12), [1, 2, 3]), part(range(20, 23), [9, 9, 9, 4, 5, 6, 7], finish="stop")
    whole = joined(begin, rest)  # of a prompt of two tokens
    assert whole.routes is not None
    assert whole.routes.ravel().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert whole.token_ids.tolist() == [10, 11, 20, 21, 22]
    assert whole.logprobs.tolist() == [-10, -11, -20, -21, -22]
    assert whole.versions.tolist() == [1, 1, 2, 2, 2]
    assert (whole.key, whole.finish, whole.support) == (begin.key, "stop", None)


def test_a_model_without_experts_has_no_routes_to_join() -> None:
    assert joined(part(range(2), None), part(range(3), None)).routes is None


def test_supports_are_joined_place_by_place() -> None:
    of = [Support.of([np.array(ids, np.int32) for ids in entries]) for entries in ([[1, 2], []], [[3]])]
    whole = joined(part(range(2), None, support=of[0]), part(range(1), None, support=of[1]))
    assert whole.support is not None
    assert [whole.support[t].tolist() for t in range(3)] == [[1, 2], [], [3]]
