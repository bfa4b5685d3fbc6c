from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.loss import LossConfig, LossTerms, clipped_loss

LOW, HIGH = 0.2, 0.28
CONFIG = LossConfig(LOW, HIGH, mask_truncated=False, renormalize_after_mask=False, on_policy=False)
Token = tuple[float, float, float]  # log pi, log pi_old, advantage
TOKENS = st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)), max_size=20)


def loss_of(tokens: list[Token], config: LossConfig = CONFIG) -> LossTerms:
    logprobs, old, advantages = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3).T
    return clipped_loss(logprobs, old, advantages, config)


def by_loop(tokens: list[Token], low: float = LOW, high: float = HIGH) -> dict[str, float]:
    """The formulas, one token after the other."""
    sums = {"loss": 0.0, "clipped_low": 0, "clipped_high": 0, "kl": 0.0}
    for logprob, old, advantage in tokens:
        ratio = exp(logprob - old)
        sums["loss"] -= min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        sums["clipped_low"] += advantage < 0 and ratio < 1 - low
        sums["clipped_high"] += advantage > 0 and ratio > 1 + high
        sums["kl"] += old - logprob
    return sums


@given(TOKENS)
def test_sums_are_those_of_the_loop(tokens: list[Token]) -> None:
    terms = loss_of(tokens)
    found = {name: float(getattr(terms, name)) for name in ("loss", "clipped_low", "clipped_high", "kl")}
    assert found == pytest.approx(by_loop(tokens), rel=1e-12, abs=1e-12)


@given(TOKENS, st.floats(0.01, 0.9), st.floats(0.01, 3))
def test_the_bounds_are_those_of_the_configuration(tokens: list[Token], low: float, high: float) -> None:
    config = LossConfig(low, high, mask_truncated=False, renormalize_after_mask=False, on_policy=False)
    expected = by_loop(tokens, low, high)["loss"]
    assert float(loss_of(tokens, config).loss) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_sums_of_parts_are_the_sum_of_the_whole() -> None:
    tokens = [(-0.1 * i, -0.5, (-1.0) ** i) for i in range(12)]
    one, other, both = loss_of(tokens[:5]), loss_of(tokens[5:]), loss_of(tokens)
    for name in ("loss", "clipped_low", "clipped_high", "kl"):
        assert float(getattr(one, name) + getattr(other, name)) == pytest.approx(float(getattr(both, name)), abs=1e-12)


CASES = {  # ratio, advantage: is the gradient there?
    "inside": (1.1, 1.0, True),
    "inside, worse": (0.9, -1.0, True),
    "above and good": (1.5, 1.0, False),
    "above and bad": (1.5, -1.0, True),
    "below and good": (0.5, 1.0, True),
    "below and bad": (0.5, -1.0, False),
    "only above the lower of the bounds": (1.25, 1.0, True),
    "no advantage": (1.1, 0.0, False),
}


@pytest.mark.parametrize(("ratio", "advantage", "flows"), CASES.values(), ids=CASES.keys())
def test_the_gradient_is_minus_ratio_times_advantage_where_nothing_is_clipped(
    ratio: float, advantage: float, flows: bool
) -> None:
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprob = (old + torch.tensor([ratio], dtype=torch.float64).log()).requires_grad_()
    terms = clipped_loss(logprob, old, torch.tensor([advantage], dtype=torch.float64), CONFIG)
    terms.loss.backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(-ratio * advantage if flows else 0.0, abs=1e-12)
    clipped = int(terms.clipped_low) + int(terms.clipped_high)
    assert clipped == (not flows and advantage != 0)


def test_the_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(40, generator=generator, dtype=torch.float64)
    logprobs = (old + 0.3 * torch.randn(40, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: clipped_loss(x, old, advantages, CONFIG).loss, logprobs)


def test_on_the_sampling_weights_the_gradient_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.7, -1.3], dtype=torch.float64)
    terms = clipped_loss(logprobs, logprobs.detach(), advantages, CONFIG)
    terms.loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -advantages)
    assert float(terms.kl) == 0.0


def test_neither_old_probabilities_nor_counts_carry_gradient() -> None:
    logprobs = torch.tensor([-0.5], requires_grad=True)
    terms = clipped_loss(logprobs, torch.tensor([-1.0]), torch.tensor([1.0]), CONFIG)
    assert terms.loss.requires_grad
    assert not any(t.requires_grad for t in (terms.clipped_low, terms.clipped_high, terms.kl))


def test_no_tokens_sum_to_nothing() -> None:
    terms = loss_of([])
    assert [float(t) for t in (terms.loss, terms.clipped_low, terms.clipped_high, terms.kl)] == [0.0] * 4
