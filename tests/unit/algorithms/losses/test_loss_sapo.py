from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.config.losses import SapoLoss
from tests.unit.algorithms.losses.loss_tokens import (
    TOKENS,
    Token,
    finite_differences_agree,
    of_one,
    outcome,
    random_tokens,
    tokens_of,
)


def by_loop(rows: list[Token], positive: float, negative: float) -> list[float]:
    losses = []
    for logprob, anchor, advantage in rows:
        tau = positive if advantage > 0 else negative
        gate = 4 / tau / (1 + exp(-tau * (exp(logprob - anchor) - 1)))
        losses.append(-gate * advantage)
    return losses


@given(TOKENS, st.floats(0.1, 10), st.floats(0.1, 10))
def test_sapo_is_its_formula(rows: list[Token], positive: float, negative: float) -> None:
    loss = outcome(tokens_of(rows), SapoLoss(tau_positive=positive, tau_negative=negative)).loss
    assert loss.tolist() == pytest.approx(by_loop(rows, positive, negative), rel=1e-12, abs=1e-12)


def test_the_gradient_of_sapo_agrees_with_finite_differences() -> None:
    assert finite_differences_agree(tokens_of(random_tokens(0, [40], spread=0.8)[0]), SapoLoss())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 2.0, 6.0])
def test_the_gate_of_sapo_fades_on_both_sides(ratio: float, advantage: float) -> None:
    gate = 1 / (1 + exp(-3.0 * (ratio - 1)))
    config = SapoLoss(tau_positive=3.0, tau_negative=3.0)
    _, gradient, clipped = of_one(config, ratio, advantage)
    assert gradient == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage, abs=1e-12)
    assert abs(gradient) <= ratio
    assert clipped == 0


def test_a_steeper_gate_fades_sooner_and_each_sign_has_its_own() -> None:
    config = SapoLoss(tau_positive=1.0, tau_negative=4.0)
    good, bad = (abs(of_one(config, 2.0, advantage)[1]) for advantage in (1.0, -1.0))
    assert bad < good / 2
