"""What every sampler draws: the module's distribution, filtered as asked, from the stream of the request's key."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from beamline.model.beam import tensors
from beamline.records import Key, Request, SamplingParams
from tests.contract.engines import SamplerFactory
from tests.contract.sampling import PREFIX_LENGTHS, AssertSame, prefix, request, requests, run, sequence
from tests.filters import sampled_from
from tests.tiny_beam import VOCAB, beam_shape, evaluate, random_beam, reference, teacher_forced

MODULE = random_beam()
PLAIN = reference(MODULE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_module(sampler_factory: SamplerFactory, temperature: float) -> None:
    asked = requests(temperature=temperature)
    for wanted, completion in zip(asked, run(sampler_factory(MODULE, slots=3).sampler, asked), strict=True):
        expected = teacher_forced(PLAIN, sequence(wanted, completion), temperature)
        new = expected[len(wanted.prefix_ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, new, rtol=1e-5, atol=1e-5)


def test_routes_are_the_choices_of_the_module(sampler_factory: SamplerFactory) -> None:
    asked = requests()
    for wanted, completion in zip(asked, run(sampler_factory(MODULE, slots=3).sampler, asked), strict=True):
        expected = evaluate(PLAIN, sequence(wanted, completion)[:-1]).routes_SLK
        assert completion.routes is not None
        np.testing.assert_array_equal(np.sort(completion.routes), np.sort(expected))


def test_a_response_ends_at_its_limit(sampler_factory: SamplerFactory) -> None:
    asked = [request(5, sample=limit, max_tokens=limit) for limit in (1, 2, 9)]
    for wanted, completion in zip(asked, run(sampler_factory(MODULE).sampler, asked), strict=True):
        assert (len(completion.token_ids), completion.finish) == (wanted.params.max_tokens, "length")


def test_a_response_ends_with_its_first_stop_token(sampler_factory: SamplerFactory) -> None:
    """Requests in flight together have different stop tokens; tokens before the stop are those without any."""
    sampler = sampler_factory(MODULE).sampler
    free = run(sampler, requests())
    stops = [
        tuple(sorted({int(c.token_ids[i]), int(c.token_ids[i - 5])})) for c, i in zip(free, range(5, 30), strict=False)
    ]
    asked = [replace(r, params=replace(r.params, stop_ids=ids)) for r, ids in zip(requests(), stops, strict=True)]
    for whole, ids, completion in zip(free, stops, run(sampler, asked), strict=True):
        end = int(np.isin(whole.token_ids, ids).argmax()) + 1
        assert completion.finish == "stop"
        np.testing.assert_array_equal(completion.token_ids, whole.token_ids[:end])


def test_a_stop_token_at_the_limit_is_a_stop(sampler_factory: SamplerFactory) -> None:
    sampler = sampler_factory(MODULE).sampler
    (one,) = run(sampler, [request(5, max_tokens=1)])
    (again,) = run(sampler, [request(5, max_tokens=1, stop_ids=(int(one.token_ids[0]),))])
    assert (again.finish, len(again.token_ids)) == ("stop", 1)


def test_no_stop_token_is_drawn_before_min_tokens_others(sampler_factory: SamplerFactory) -> None:
    stops = tuple(range(0, VOCAB, 2))
    asked = [request(n, sample, stop_ids=stops, min_tokens=6) for n in (4, 12) for sample in range(8)]
    completions = run(sampler_factory(MODULE).sampler, asked)
    lengths = [len(completion.token_ids) for completion in completions]
    assert min(lengths) == 7
    for wanted, completion in zip(asked, completions, strict=True):
        assert not np.isin(completion.token_ids[:6], stops).any()
        P = len(wanted.prefix_ids)
        logits = evaluate(PLAIN, sequence(wanted, completion)[:-1]).logits_SV[P - 1 :].clone()
        logits[:6, list(stops)] = -np.inf
        expected = logits.log_softmax(-1).numpy()[np.arange(len(logits)), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_temperature_0_takes_the_most_likely_token(sampler_factory: SamplerFactory) -> None:
    asked = requests(temperature=0.0)
    for wanted, completion in zip(asked, run(sampler_factory(MODULE).sampler, asked), strict=True):
        logits = evaluate(PLAIN, sequence(wanted, completion)[:-1]).logits_SV[len(wanted.prefix_ids) - 1 :]
        np.testing.assert_array_equal(completion.token_ids, logits.argmax(-1).numpy())
        assert not completion.logprobs.any()


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"top_k": 6, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 8, "top_p": 0.7, "min_p": 0.05},
]


def test_filters_leave_a_renormalized_distribution(sampler_factory: SamplerFactory) -> None:
    """Requests with different filters are in flight together."""
    asked = [request(n, sample, **filters) for n in (5, 12) for sample, filters in enumerate(FILTERS)]
    for wanted, completion in zip(asked, run(sampler_factory(MODULE).sampler, asked), strict=True):
        p = wanted.params
        logits = evaluate(PLAIN, sequence(wanted, completion)[:-1]).logits_SV.numpy()[len(wanted.prefix_ids) - 1 :]
        probs = [sampled_from(row, p.temperature, p.top_p, p.top_k, p.min_p) for row in logits]
        chosen = np.array([row[token] for row, token in zip(probs, completion.token_ids, strict=True)])
        assert chosen.min() > 0, f"a forbidden token was drawn with {p}"
        np.testing.assert_allclose(completion.logprobs, np.log(chosen), rtol=1e-5, atol=1e-5)


def test_tokens_do_not_depend_on_what_else_is_in_flight(
    sampler_factory: SamplerFactory, assert_same: AssertSame
) -> None:
    asked = requests()
    completions = run(sampler_factory(MODULE, slots=4).sampler, asked)
    others = [request(length, sample=1, max_tokens=17) for length in PREFIX_LENGTHS]
    mixed = [r for pair in zip(others, reversed(asked), strict=True) for r in pair]
    again = {c.key: c for c in run(sampler_factory(MODULE, slots=7).sampler, mixed)}
    assert_same(completions, [again[r.key] for r in asked])


def test_samples_of_one_prompt_are_in_flight_together(sampler_factory: SamplerFactory, assert_same: AssertSame) -> None:
    """They may share the evaluation of the prompt; each has its own stream."""
    asked = [request(12, sample) for sample in range(6)]
    together = run(sampler_factory(MODULE, slots=6).sampler, asked)
    assert len({completion.token_ids.tobytes() for completion in together}) == 6
    alone = sampler_factory(MODULE, slots=1).sampler
    assert_same(together, [run(alone, [wanted])[0] for wanted in asked])


KEY = Key("train", 3, "problem", 0)


@pytest.mark.parametrize("change", [{"split": "eval"}, {"step": 4}, {"problem": "q"}, {"sample": 1}, {"attempt": 1}])
def test_every_part_of_the_key_gives_another_stream(sampler_factory: SamplerFactory, change: dict[str, Any]) -> None:
    keys = [KEY, replace(KEY, **change)]
    one, other = run(sampler_factory(MODULE).sampler, [Request(k, prefix(5), SamplingParams(30)) for k in keys])
    assert one.token_ids.tolist() != other.token_ids.tolist()


def test_another_seed_gives_another_stream(sampler_factory: SamplerFactory) -> None:
    (one,), (other,) = (run(sampler_factory(MODULE, seed=seed).sampler, [request(5)]) for seed in (0, 1))
    assert one.token_ids.tolist() != other.token_ids.tolist()


@pytest.mark.parametrize("params", [{}, {"temperature": 2.0}, {"top_p": 0.8, "min_p": 0.02}])
def test_tokens_are_as_frequent_as_they_are_likely(sampler_factory: SamplerFactory, params: dict[str, Any]) -> None:
    """Chi-square over the first tokens; with the true distribution it exceeds the bound once in a million seeds."""
    n = 3000
    asked = [request(12, sample, max_tokens=1, **params) for sample in range(n)]
    drawn = np.array([c.token_ids[0] for c in run(sampler_factory(MODULE, slots=1024).sampler, asked)])
    p = asked[0].params
    probs = sampled_from(evaluate(PLAIN, prefix(12)).logits_SV[-1].numpy(), p.temperature, p.top_p, p.top_k, p.min_p)
    observed, expected = np.bincount(drawn, minlength=VOCAB), n * probs
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert (observed[expected == 0] == 0).all()
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom >= 3
    z = 4.75  # Wilson and Hilferty: the cube root of chi-square over its freedom is normal
    assert statistic < freedom * (1 - 2 / (9 * freedom) + z * np.sqrt(2 / (9 * freedom))) ** 3


def test_the_layout_covers_every_tensor(sampler_factory: SamplerFactory) -> None:
    held = {(s.name, s.shape) for rank in sampler_factory(None).sampler.layout("full").ranks for s in rank}
    assert held == {(spec.name, spec.shape) for spec in tensors(beam_shape())}
