"""The estimates of a divergence: their values with loops, their expectations over a whole small vocabulary."""

from math import exp, expm1, log
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from beamline.algorithms.kl import estimate, kl_losses
from beamline.config.kl import Estimator, KlLoss

ESTIMATORS: tuple[Any, ...] = get_args(Estimator)
V = 5
SEEDS = st.integers(0, 10_000)


def k1(d: float) -> float:
    return d


def k2(d: float) -> float:
    return d * d / 2


def k3(d: float) -> float:
    """The ratio that it is of, q / p, is at most e^20."""
    return expm1(-max(d, -20.0)) + max(d, -20.0)


WRITTEN = {"k1": k1, "k2": k2, "k3": k3}


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(log_ratios=st.lists(st.floats(-30, 30), max_size=20))
def test_values_are_those_of_the_formula(estimator: Estimator, log_ratios: list[float]) -> None:
    expected = [WRITTEN[estimator](d) for d in log_ratios]
    assert estimate(doubles(log_ratios), estimator).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_k3_by_hand() -> None:
    """With p = 1/2 and q = 1/4: q/p - 1 - log(q/p) = log 2 - 1/2."""
    assert estimate(doubles([log(0.5) - log(0.25)]), "k3").item() == pytest.approx(log(2) - 0.5, rel=1e-12)


@given(log_ratios=st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=20))
def test_k3_is_never_negative_but_for_rounding(log_ratios: list[float]) -> None:
    d = torch.tensor(log_ratios, dtype=torch.float32)
    assert (estimate(d, "k3") >= -1e-7 * d.abs()).all()
    assert (estimate(d.double(), "k3") >= -1e-15 * d.abs()).all()


def test_k3_is_zero_for_equal_probabilities() -> None:
    assert estimate(torch.zeros(3), "k3").tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("far", [200.0, -200.0])
def test_values_and_gradients_are_finite_far_away_in_float32(estimator: Estimator, unbiased: bool, far: float) -> None:
    logprobs_T = torch.tensor([far, far, 0.0, 0.0], requires_grad=True)
    old_T, reference_T = torch.tensor([0.0, far, far, 0.0]), torch.tensor([0.0, 0.0, 0.0, far])
    losses_T = kl_losses(logprobs_T, old_T, reference_T, KlLoss(estimator=estimator, unbiased_gradient=unbiased))
    losses_T.sum().backward()
    assert losses_T.isfinite().all()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@given(log_ratio=st.floats(-200, 200))
def test_a_differentiated_estimate_never_leads_away_from_the_reference(estimator: Any, log_ratio: float) -> None:
    d = doubles([log_ratio]).requires_grad_()
    estimate(d, estimator).sum().backward()
    assert d.grad is not None
    assert d.grad.item() * log_ratio >= 0


# Expectations. A policy is a softmax over V tokens, and a mean over all of them with their probabilities is exact.


def random_logits(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(V, generator=generator, dtype=torch.float64) for _ in range(count)]


def logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two distributions given as log-probabilities, from its definition."""
    return sum((p[v].exp() * (p[v] - q[v]) for v in range(V)), torch.zeros((), dtype=torch.float64))


def gradient(value: Tensor, logits: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(value, logits)
    return found.tolist()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@given(seed=SEEDS)
def test_k1_and_k3_are_the_divergence_in_expectation(estimator: Estimator, seed: int) -> None:
    p, q = map(logprobs, random_logits(seed, 2))
    mean = sum(exp(p[v].item()) * estimate(p[v] - q[v], estimator).item() for v in range(V))
    assert mean == pytest.approx(divergence(p, q).item(), abs=1e-12)


def expected_penalty(logits: Tensor, old: Tensor, reference: Tensor, config: KlLoss) -> Tensor:
    """The mean of the penalty over tokens drawn from pi_old."""
    return (old.exp() * kl_losses(logprobs(logits), old, reference, config)).sum()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=SEEDS)
def test_the_unbiased_gradient_is_that_of_the_divergence_whatever_drew_the_tokens(
    estimator: Estimator, seed: int
) -> None:
    logits, old, reference = random_logits(seed, 3)
    logits.requires_grad_()
    penalty = expected_penalty(logits, logprobs(old), logprobs(reference), KlLoss(estimator=estimator))
    expected = gradient(divergence(logprobs(logits), logprobs(reference)), logits)
    assert gradient(penalty, logits) == pytest.approx(expected, abs=1e-12)


@given(seed=SEEDS)
def test_the_unbiased_gradient_is_that_of_rho_k3_token_by_token(seed: int) -> None:
    """DeepSeek-V3.2, arXiv 2512.02556, equation 7."""
    logits, old_logits, reference_logits = random_logits(seed, 3)
    logits.requires_grad_()
    old, reference = logprobs(old_logits), logprobs(reference_logits)
    for v in range(V):
        pi = logprobs(logits)[v].exp()
        ratio = reference[v].exp() / pi
        written = pi / old[v].exp() * (ratio - ratio.log() - 1)
        made = kl_losses(logprobs(logits), old, reference, KlLoss())[v]
        assert gradient(made, logits) == pytest.approx(gradient(written, logits), abs=1e-12)


@given(seed=SEEDS)
def test_on_policy_the_differentiated_k1_has_no_gradient(seed: int) -> None:
    logits, reference = random_logits(seed, 2)
    old = logprobs(logits.clone())
    logits.requires_grad_()
    penalty = expected_penalty(logits, old, logprobs(reference), KlLoss(estimator="k1", unbiased_gradient=False))
    assert gradient(penalty, logits) == pytest.approx([0.0] * V, abs=1e-12)


@given(seed=SEEDS)
def test_on_policy_the_differentiated_k2_has_the_gradient_of_the_divergence(seed: int) -> None:
    logits, reference = random_logits(seed, 2)
    old = logprobs(logits.clone())
    logits.requires_grad_()
    penalty = expected_penalty(logits, old, logprobs(reference), KlLoss(estimator="k2", unbiased_gradient=False))
    expected = gradient(divergence(logprobs(logits), logprobs(reference)), logits)
    assert gradient(penalty, logits) == pytest.approx(expected, abs=1e-12)


@given(seed=SEEDS)
def test_on_policy_the_differentiated_k3_has_the_gradient_of_the_opposite_divergence(seed: int) -> None:
    logits, reference = random_logits(seed, 2)
    old = logprobs(logits.clone())
    logits.requires_grad_()
    penalty = expected_penalty(logits, old, logprobs(reference), KlLoss(estimator="k3", unbiased_gradient=False))
    expected = gradient(divergence(logprobs(reference), logprobs(logits)), logits)
    assert gradient(penalty, logits) == pytest.approx(expected, abs=1e-12)


def test_off_policy_the_differentiated_k1_leads_away_from_what_was_drawn() -> None:
    """Its gradient is then minus that of KL(pi_old || pi), and knows nothing of the reference."""
    logits, old, reference = random_logits(0, 3)
    logits.requires_grad_()
    config = KlLoss(estimator="k1", unbiased_gradient=False)
    penalty = expected_penalty(logits, logprobs(old), logprobs(reference), config)
    expected = gradient(-divergence(logprobs(old), logprobs(logits)), logits)
    assert gradient(penalty, logits) == pytest.approx(expected, abs=1e-12)
    assert max(map(abs, expected)) > 0.01


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=SEEDS)
def test_the_value_is_the_estimate_whichever_gradient_is_followed(estimator: Estimator, seed: int) -> None:
    logits, old, reference = (logprobs(logits) for logits in random_logits(seed, 3))
    values = [
        kl_losses(logits, old, reference, KlLoss(estimator=estimator, unbiased_gradient=unbiased)).tolist()
        for unbiased in (True, False)
    ]
    assert values[0] == values[1] == estimate(logits - reference, estimator).tolist()


def test_tokens_do_not_know_of_each_other() -> None:
    logits, old, reference = (logprobs(logits) for logits in random_logits(1, 3))
    whole = kl_losses(logits, old, reference, KlLoss())
    assert whole[2:4].tolist() == kl_losses(logits[2:4], old[2:4], reference[2:4], KlLoss()).tolist()
