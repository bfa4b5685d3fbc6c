"""Log-probabilities of sampled tokens have the same bits in sampler and learner, where the pair promises it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from beamline.policy import functions
from beamline.records import Completion, Experience, Request
from beamline.rollout.collect import to_rollout
from tests.contract.engines import PairBench, PairFactory, torch_learner, torch_local
from tests.contract.learning import loss_of, metrics
from tests.contract.sampling import requests, run
from tests.tiny_beam import random_beam


def sampled(pair: PairBench, temperature: float = 1.0) -> tuple[list[Request], list[Completion]]:
    pair.sync(1)
    asked = requests(temperature=temperature)
    return asked, run(pair.sampler, asked)


def experiences(asked: Sequence[Request], completions: Sequence[Completion]) -> list[Experience]:
    pairs = zip(asked, completions, strict=True)
    return [Experience(to_rollout(wanted, got), 1.0 - 2.0 * (i % 2)) for i, (wanted, got) in enumerate(pairs)]


def assert_same_bits(learned: Sequence[np.ndarray], asked: Sequence[Request], drawn: Sequence[Completion]) -> None:
    for values, wanted, completion in zip(learned, asked, drawn, strict=True):
        np.testing.assert_array_equal(values[len(wanted.prefix_ids) - 1 :], completion.logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_learner_finds_the_bits_of_the_sampler(pair_factory: PairFactory, temperature: float) -> None:
    pair = pair_factory(random_beam())
    asked, drawn = sampled(pair, temperature)
    learned = pair.learner.forward(experiences(asked, drawn), ["logprobs"]).logprobs
    assert learned is not None
    assert_same_bits(learned, asked, drawn)


def local_pair(module: torch.nn.Module) -> PairBench:
    pair = torch_local(module)
    pair.sync(1)
    return pair


@pytest.mark.parametrize("micro_batch_tokens", [1, 60])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_the_cuts_nor_the_threads_matter(
    micro_batch_tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "ROWS", 25)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    asked, drawn = sampled(local_pair(random_beam()))
    learner = torch_learner(random_beam(), micro_batch_tokens)
    learned = learner.forward(experiences(asked, drawn), ["logprobs"]).logprobs
    assert learned is not None
    assert_same_bits(learned, asked, drawn)


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_mismatch_of_the_first_update_is_exactly_0(pair_factory: PairFactory, on_policy: bool) -> None:
    pair = pair_factory(random_beam(), lr=1e-2)
    batch = experiences(*sampled(pair))
    loss = loss_of(on_policy)
    for version in (2, 3):
        found = metrics(pair.learner.step(pair.learner.prepare(batch, loss)))
        assert found["mismatch/logprob_abs_diff_max"] == 0
        assert found["mismatch/ratio_mean"] == 1
        pair.sync(version)
        asked = requests()
        batch = experiences(asked, run(pair.sampler, asked))
