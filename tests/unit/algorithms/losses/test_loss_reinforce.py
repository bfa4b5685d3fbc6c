from math import exp

import pytest
import torch
from hypothesis import given

from beamline.config.losses import ReinforceLoss
from tests.unit.algorithms.losses.loss_tokens import (
    TOKENS,
    Token,
    finite_differences_agree,
    outcome,
    random_tokens,
    tokens_of,
)


@given(TOKENS)
def test_reinforce_is_its_formula_and_so_is_its_gradient(rows: list[Token]) -> None:
    found = outcome(tokens_of(rows), ReinforceLoss())
    expected = [-exp(logprob - anchor) * advantage for logprob, anchor, advantage in rows]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found.gradient.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_gradient_of_reinforce_is_that_of_the_weighted_log_probability() -> None:
    tokens = tokens_of(random_tokens(0, [20])[0])
    ratio = (tokens.logprobs_T - tokens.anchor_logprobs_T).detach().exp()
    score = -(ratio * tokens.advantages_T * tokens.logprobs_T).sum()
    (expected,) = torch.autograd.grad(score, tokens.logprobs_T)
    assert torch.allclose(outcome(tokens, ReinforceLoss()).gradient, expected, rtol=1e-12, atol=0)


def test_the_gradient_of_reinforce_agrees_with_finite_differences() -> None:
    assert finite_differences_agree(tokens_of(random_tokens(1, [20])[0]), ReinforceLoss())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_beyond_the_limit_of_the_ratio_teaches_nothing_and_is_marked(advantage: float) -> None:
    below, beyond = (outcome(tokens_of([(gap - 30, -30.0, advantage)]), ReinforceLoss()) for gap in (19.9, 20.1))
    assert (float(below.gradient), int(below.clipped)) == (pytest.approx(-exp(19.9) * advantage), 0)
    assert (float(beyond.gradient), int(beyond.clipped)) == (0.0, 1)
