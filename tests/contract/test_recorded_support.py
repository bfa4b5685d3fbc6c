"""What could be drawn is recorded on request, and over it a learner finds the log-probabilities of the sampler."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamline.policy import head, parity
from beamline.policy.attention import Packing
from beamline.records import Completion, Experience, Request, Support, pack
from beamline.rollout.collect import to_rollout
from tests.contract.engines import SamplerFactory, local_sampler
from tests.contract.sampling import PREFIX_LENGTHS, AssertSame, request, requests, resumed, run, sequence, start
from tests.exact import bits
from tests.filters import sampled_from
from tests.tiny_beam import VOCAB, evaluate, random_beam, reference

MODULE = random_beam()
PLAIN = reference(MODULE)
STOPS = tuple(range(0, VOCAB, 3))
RESTRICTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 5},
    {"min_p": 0.1},
    {"stop_ids": STOPS, "min_tokens": 8},
    {"temperature": 1.7, "top_k": 8, "top_p": 0.7, "min_p": 0.05, "stop_ids": STOPS[:4], "min_tokens": 6},
]


def recording(**params: Any) -> list[Request]:
    return requests(record_support=True, **params)


def recorded(completion: Completion) -> Support:
    """Its support, which has an entry for each token."""
    assert completion.support is not None
    assert len(completion.support) == len(completion.token_ids)
    return completion.support


def written(wanted: Request, completion: Completion) -> list[NDArray[np.float64]]:
    """The distribution that each token was drawn from, from the logits of the module."""
    p = wanted.params
    logits = evaluate(PLAIN, sequence(wanted, completion)[:-1]).logits_SV.numpy()[len(wanted.prefix_ids) - 1 :].copy()
    logits[: p.min_tokens, list(p.stop_ids)] = -np.inf
    return [sampled_from(row, p.temperature, p.top_p, p.top_k, p.min_p) for row in logits]


def assert_same_support(completions: Sequence[Completion], others: Sequence[Completion]) -> None:
    for one, other in zip(completions, others, strict=True):
        np.testing.assert_array_equal(recorded(one).ids, recorded(other).ids)
        np.testing.assert_array_equal(recorded(one).borders, recorded(other).borders)


def test_the_recorded_tokens_are_those_that_the_written_filters_allow(sampler_factory: SamplerFactory) -> None:
    """Requests with all kinds of restrictions are in flight together; the log-probability is the renormalized one."""
    asked = [
        request(n, i, record_support=True, **restriction) for n in (5, 12) for i, restriction in enumerate(RESTRICTIONS)
    ]
    for wanted, completion in zip(asked, run(sampler_factory(MODULE).sampler, asked), strict=True):
        p, support = wanted.params, recorded(completion)
        filtered = p.top_p < 1 or p.top_k > 0 or p.min_p > 0
        for at, (probs, token) in enumerate(zip(written(wanted, completion), completion.token_ids, strict=True)):
            restricted = filtered or at < p.min_tokens
            allowed = np.flatnonzero(probs).tolist() if restricted else []
            assert sorted(support[at].tolist()) == allowed, f"token {at} with {p}"
            assert not restricted or token in allowed
            assert completion.logprobs[at] == pytest.approx(np.log(probs[token]), rel=1e-5, abs=1e-5)


def test_where_nothing_restricts_the_draw_every_token_could_be_drawn(sampler_factory: SamplerFactory) -> None:
    for params in ({}, {"min_tokens": 9}, {"stop_ids": (VOCAB - 1,)}):
        for completion in run(sampler_factory(MODULE).sampler, recording(**params)):
            assert not recorded(completion).sizes.any()


def test_temperature_0_allows_only_the_token_that_it_takes(sampler_factory: SamplerFactory) -> None:
    for completion in run(sampler_factory(MODULE).sampler, recording(temperature=0.0)):
        assert recorded(completion).sizes.tolist() == [1] * len(completion.token_ids)
        np.testing.assert_array_equal(recorded(completion).ids, completion.token_ids)


def test_recording_is_asked_for_and_changes_nothing_else(
    sampler_factory: SamplerFactory, assert_same: AssertSame
) -> None:
    plain, with_support = (
        run(sampler_factory(MODULE).sampler, asked) for asked in (requests(top_p=0.8), recording(top_p=0.8))
    )
    assert [completion.support for completion in plain] == [None] * len(plain)
    assert_same(plain, with_support)


@pytest.mark.parametrize(("slots", "threads"), [(1, 1), (7, 1), (64, 3)])
def test_the_support_does_not_depend_on_what_else_is_in_flight(
    sampler_factory: SamplerFactory, slots: int, threads: int
) -> None:
    asked = [
        replace(wanted, params=replace(wanted.params, **RESTRICTIONS[i % len(RESTRICTIONS)]))
        for i, wanted in enumerate(recording())
    ]
    completions = run(sampler_factory(MODULE, slots=4).sampler, asked)
    assert sum(len(recorded(completion).ids) for completion in completions) > 500
    others = [request(n, sample=1, max_tokens=17, record_support=n % 2 == 0, top_k=3) for n in PREFIX_LENGTHS]
    mixed = [r for pair in zip(others, reversed(asked), strict=True) for r in pair]
    again = {c.key: c for c in run(sampler_factory(MODULE, slots=slots, threads=threads).sampler, mixed)}
    assert_same_support(completions, [again[wanted.key] for wanted in asked])


def test_the_support_of_an_aborted_response_and_its_rest_is_that_of_the_whole(sampler_factory: SamplerFactory) -> None:
    asked = recording(top_p=0.9)[:4]
    whole = run(sampler_factory(MODULE, slots=8).sampler, asked)
    sampler = sampler_factory(MODULE, slots=8).sampler
    start(sampler, asked)
    partials = {completion.key: completion for completion in sampler.abort([wanted.key for wanted in asked])}
    ends = run(sampler, [resumed(wanted, partials[wanted.key]) for wanted in asked])
    joined = []
    for wanted, end in zip(asked, ends, strict=True):
        begin = partials[wanted.key]
        assert len(begin.token_ids)
        both = [begin, end]
        tokens, logprobs = (np.concatenate([getattr(c, name) for c in both]) for name in ("token_ids", "logprobs"))
        support = Support.joined([recorded(c) for c in both])
        joined.append(replace(end, token_ids=tokens, logprobs=logprobs, support=support))
    assert_same_support(joined, whole)


def test_a_request_that_never_began_has_a_support_of_no_tokens(sampler_factory: SamplerFactory) -> None:
    sampler = sampler_factory(MODULE, slots=1).sampler
    first, second, third = request(5, 0), request(5, 1, record_support=True), request(5, 2)
    sampler.submit([first, second, third])
    recorded_nothing, plain = sorted(sampler.abort([second.key, third.key]), key=lambda completion: completion.key)
    assert len(recorded(recorded_nothing)) == 0
    assert plain.support is None


# What a learner makes of it


def learned(asked: Sequence[Request], completions: Sequence[Completion], score: Any) -> list[NDArray[np.float32]]:
    """Log-probabilities of the sampled tokens of each sequence, of all of them packed together."""
    pairs = zip(asked, completions, strict=True)
    batch = pack([Experience(to_rollout(wanted, completion), 1.0) for wanted, completion in pairs])
    rows = batch.loss_mask_N.nonzero()[0]
    ids, positions = torch.from_numpy(batch.input_ids_N), torch.from_numpy(batch.position_ids_N)
    temperature_N = np.repeat(batch.temperature_B, np.diff(batch.cu_seqlens_B1))
    with torch.no_grad():
        hidden_ND = parity.hidden_states(MODULE, ids, positions, Packing.of(batch.cu_seqlens_B1.tolist()))
        logprobs, _ = score(
            hidden_ND[rows], cast(Any, MODULE).lm_head.weight, torch.from_numpy(batch.target_ids_N[rows]),
            torch.from_numpy(temperature_N[rows]), 30.0, 50, batch.support_of(rows),
        )  # fmt: skip
    return np.split(logprobs.numpy(), np.cumsum([len(c.token_ids) for c in completions])[:-1])


@pytest.mark.parametrize("restriction", RESTRICTIONS, ids=str)
def test_the_ratio_on_policy_is_exactly_1_on_the_kernels_of_the_sampler(restriction: dict[str, Any]) -> None:
    """The same bits; the second half of the batch is unrestricted and has recorded nothing."""
    asked = [*recording(**restriction), *(replace(r, key=replace(r.key, sample=1)) for r in requests(temperature=0.9))]
    completions = run(local_sampler(MODULE).sampler, asked)
    for ours, completion in zip(learned(asked, completions, parity.head_logprobs), completions, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(completion.logprobs))


@pytest.mark.parametrize("restriction", RESTRICTIONS, ids=str)
def test_the_ratio_on_policy_is_1_but_for_rounding_on_the_head_of_torch(restriction: dict[str, Any]) -> None:
    """Tempered logits reach 28 here, where one unit in the last place is 1.9e-6; the two heads may differ by two."""
    asked = recording(**restriction)
    completions = run(local_sampler(MODULE).sampler, asked)
    for ours, completion in zip(learned(asked, completions, head.head_logprobs), completions, strict=True):
        np.testing.assert_allclose(
            np.exp(ours.astype(np.float64) - completion.logprobs), 1.0, rtol=0, atol=2 * 2.0**-19
        )


def test_without_its_support_the_ratio_of_a_filtered_draw_is_not_1() -> None:
    asked = requests(temperature=0.7, top_p=0.9)
    completions = run(local_sampler(MODULE).sampler, asked)
    delta = np.concatenate(learned(asked, completions, parity.head_logprobs)) - np.concatenate(
        [completion.logprobs for completion in completions]
    )
    assert delta.max() < 0
