from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.losses import select
from beamline.config.losses import KlCovLoss
from tests.unit.algorithms.losses.loss_tokens import (
    ADVANTAGES,
    LOGPROBS,
    TOKENS,
    Token,
    batch_of,
    finite_differences_agree,
    of_one,
    outcome,
    random_tokens,
    tokens_of,
)

# With few values many tokens are equals.
FEW = st.tuples(st.sampled_from([-2.0, -1.0, 0.0]), st.sampled_from([-1.0, 0.0, 1.0]))
BATCHES = st.lists(st.one_of(FEW, st.tuples(LOGPROBS, ADVANTAGES)), max_size=30)


def by_loop(rows: list[tuple[float, float]], uniforms: list[float], share: float) -> set[int]:
    count = len(rows)
    logprob_mean, advantage_mean = sum(sorted(r[0] for r in rows)) / count, sum(sorted(r[1] for r in rows)) / count
    covariance = [(logprob - logprob_mean) * (advantage - advantage_mean) for logprob, advantage in rows]
    ranked = sorted(range(count), key=lambda t: (-covariance[t], uniforms[t]))
    return set(ranked[: max(1, int(share * count))])


@given(BATCHES, st.floats(0.01, 1), st.randoms(use_true_random=False))
def test_kl_cov_takes_the_highest_covariances_and_among_equals_the_smallest_uniforms(
    rows: list[tuple[float, float]], share: float, random: object
) -> None:
    uniforms = [random.random() for _ in rows]  # type: ignore[attr-defined]
    batch = batch_of([row[0] for row in rows], [row[1] for row in rows], uniforms)
    expected = by_loop(rows, uniforms, share) if rows else set()
    assert set(np.flatnonzero(select(batch, KlCovLoss(share=share)))) == expected


@pytest.mark.parametrize(("share", "count"), [(1e-6, 1), (0.25, 1), (0.5, 2), (0.74, 2), (1.0, 4)])
def test_kl_cov_takes_the_share_rounded_down_but_one_at_least(share: float, count: int) -> None:
    batch = batch_of([-1.0, -2.0, -4.0, -5.0], [2.0, 2.0, -2.0, -2.0], [0.4, 0.1, 0.3, 0.2])
    assert select(batch, KlCovLoss(share=share)).sum() == count


def test_what_kl_cov_selects_does_not_depend_on_the_order_of_the_tokens() -> None:
    random = np.random.default_rng(0)
    logprobs, uniforms = np.minimum(0.0, random.normal(size=500)), random.random(500)  # half of them certain
    advantages = np.repeat(random.normal(size=10), 50)
    first = select(batch_of(logprobs.tolist(), advantages.tolist(), uniforms.tolist()), KlCovLoss(share=0.02))
    order = random.permutation(500)
    batch = batch_of(logprobs[order].tolist(), advantages[order].tolist(), uniforms[order].tolist())
    assert np.array_equal(select(batch, KlCovLoss(share=0.02)), first[order])
    assert first.sum() == 10


@given(TOKENS, st.floats(0.01, 10), st.randoms(use_true_random=False))
def test_kl_cov_is_its_formula_for_what_was_selected(rows: list[Token], coefficient: float, random: object) -> None:
    selected = [random.random() < 0.5 for _ in rows]  # type: ignore[attr-defined]
    losses, gradients = [], []
    for (logprob, anchor, advantage), chosen in zip(rows, selected, strict=True):
        change = logprob - anchor
        losses.append(-exp(change) * advantage + (coefficient * abs(change) if chosen else 0.0))
        sign = (change > 0) - (change < 0)
        gradients.append(-exp(change) * advantage + (coefficient * sign if chosen else 0.0))
    found = outcome(tokens_of(rows, selected=selected), KlCovLoss(coefficient=coefficient))
    assert found.loss.tolist() == pytest.approx(losses, rel=1e-12, abs=1e-12)
    assert found.gradient.tolist() == pytest.approx(gradients, rel=1e-12, abs=1e-12)


def test_the_gradient_of_kl_cov_agrees_with_finite_differences() -> None:
    tokens = tokens_of(random_tokens(0, [20])[0], selected=[True, False] * 10)
    assert finite_differences_agree(tokens, KlCovLoss())


CASES = {  # ratio, advantage, selected, gradient
    "selected, above": (2.0, 1.0, True, -1.5),
    "selected, below": (0.5, 1.0, True, -1.0),
    "selected, at the anchor": (1.0, 1.0, True, -1.0),
    "not selected, above": (2.0, 1.0, False, -2.0),
    "no advantage, selected": (2.0, 0.0, True, 0.5),
    "no advantage, not selected": (2.0, 0.0, False, 0.0),
}


@pytest.mark.parametrize(("ratio", "advantage", "selected", "gradient"), CASES.values(), ids=CASES.keys())
def test_the_penalty_of_kl_cov_pulls_with_constant_force_towards_the_anchor(
    ratio: float, advantage: float, selected: bool, gradient: float
) -> None:
    found = of_one(KlCovLoss(coefficient=0.5), ratio, advantage, selected)
    assert found[1:] == pytest.approx((gradient, 0), abs=1e-12)
