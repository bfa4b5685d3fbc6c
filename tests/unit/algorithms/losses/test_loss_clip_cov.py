from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.losses import select
from beamline.config.losses import ClipCovLoss
from tests.unit.algorithms.losses.loss_tokens import ADVANTAGES, LOGPROBS, TOKENS, Token, batch_of, outcome, tokens_of

BATCHES = st.lists(st.tuples(LOGPROBS, ADVANTAGES), max_size=30)
# Whole numbers: their sums are exact, so that a covariance on a bound is on it in the loop as well.
INTEGERS = st.lists(st.tuples(st.integers(-8, 0), st.sampled_from([-2, 0, 2])), min_size=4, max_size=4)


def covariances(logprobs: list[float], advantages: list[float]) -> list[float]:
    count = len(logprobs)
    logprob_mean, advantage_mean = sum(logprobs) / count, sum(advantages) / count
    return [
        (logprob - logprob_mean) * (advantage - advantage_mean)
        for logprob, advantage in zip(logprobs, advantages, strict=True)
    ]


def by_loop(logprobs: list[float], advantages: list[float], uniforms: list[float], config: ClipCovLoss) -> set[int]:
    within = [
        t
        for t, covariance in enumerate(covariances(logprobs, advantages))
        if config.covariance_low <= covariance <= config.covariance_high
    ]
    count = max(1, int(config.share * len(logprobs)))
    return set(sorted(within, key=lambda t: uniforms[t])[:count])


@given(st.one_of(BATCHES, INTEGERS), st.floats(0.01, 1), st.randoms(use_true_random=False))
def test_clip_cov_draws_among_the_tokens_within_its_bounds(
    rows: list[tuple[float, float]], share: float, random: object
) -> None:
    logprobs, advantages = [row[0] for row in rows], [row[1] for row in rows]
    uniforms = [random.random() for _ in rows]  # type: ignore[attr-defined]
    config = ClipCovLoss(share=share, covariance_low=0.5, covariance_high=4.0)
    expected = by_loop(logprobs, advantages, uniforms, config) if rows else set()
    assert set(np.flatnonzero(select(batch_of(logprobs, advantages, uniforms), config))) == expected


# Covariances 4, 2, 2, 4 with means -3 and 0.
FOUR = ([-1.0, -2.0, -4.0, -5.0], [2.0, 2.0, -2.0, -2.0])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(2.0, 4.0, [1, 1, 1, 1]), (2.5, 4.0, [1, 0, 0, 1]), (2.0, 3.5, [0, 1, 1, 0]), (5.0, 6.0, [0, 0, 0, 0])],
)
def test_the_bounds_of_clip_cov_belong_to_the_range(low: float, high: float, expected: list[int]) -> None:
    config = ClipCovLoss(share=1.0, covariance_low=low, covariance_high=high)
    assert select(batch_of(*FOUR, [0.1, 0.2, 0.3, 0.4]), config).tolist() == expected


@pytest.mark.parametrize(("share", "count"), [(1e-6, 1), (0.25, 1), (0.49, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_clip_cov_draws_the_share_rounded_down_but_one_at_least(share: float, count: int) -> None:
    config = ClipCovLoss(share=share, covariance_low=0.0, covariance_high=9.0)
    assert select(batch_of(*FOUR, [0.4, 0.1, 0.3, 0.2]), config).sum() == count


def test_clip_cov_draws_the_smallest_uniforms() -> None:
    config = ClipCovLoss(share=0.5, covariance_low=0.0, covariance_high=9.0)
    assert select(batch_of(*FOUR, [0.4, 0.1, 0.3, 0.2]), config).tolist() == [False, True, False, True]


def test_a_token_on_a_bound_stays_selected_however_the_tokens_are_ordered() -> None:
    random = np.random.default_rng(0)
    logprobs, advantages, uniforms = -random.exponential(size=999), random.normal(size=999), random.random(999)
    covariance = (logprobs - np.sort(logprobs).sum() / 999) * (advantages - np.sort(advantages).sum() / 999)
    border = int(np.argsort(covariance)[-100])
    config = ClipCovLoss(share=1.0, covariance_low=float(covariance[border]), covariance_high=1e3)
    for seed in range(50):
        order = np.random.default_rng(seed).permutation(999)
        batch = batch_of(logprobs[order].tolist(), advantages[order].tolist(), uniforms[order].tolist())
        selected = select(batch, config)
        assert set(order[selected]) == set(np.argsort(covariance)[-100:])


@given(TOKENS, st.randoms(use_true_random=False))
def test_clip_cov_is_its_formula_for_what_was_selected(rows: list[Token], random: object) -> None:
    selected = [random.random() < 0.5 for _ in rows]  # type: ignore[attr-defined]
    losses, gradients, marks = [], [], []
    for (logprob, anchor, advantage), chosen in zip(rows, selected, strict=True):
        ratio = exp(logprob - anchor)
        low, high = advantage < 0 and ratio < 0.8, advantage > 0 and ratio > 1.2
        objective = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        losses.append(0.0 if chosen else -objective)
        gradients.append(0.0 if chosen or low or high else -ratio * advantage)
        marks.append(0 if chosen else high - low)
    found = outcome(tokens_of(rows, selected=selected), ClipCovLoss(clip_low=0.2, clip_high=0.2))
    assert found.loss.tolist() == pytest.approx(losses, rel=1e-12, abs=1e-12)
    assert found.gradient.tolist() == pytest.approx(gradients, rel=1e-12, abs=1e-12)
    assert found.clipped.tolist() == marks
