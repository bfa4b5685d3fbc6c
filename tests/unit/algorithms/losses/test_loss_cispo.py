from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.config.losses import CispoLoss
from tests.unit.algorithms.losses.loss_tokens import TOKENS, Token, of_one, outcome, tokens_of


def weight(row: Token, low: float, high: float) -> float:
    logprob, anchor, _ = row
    return min(max(exp(logprob - anchor), 1 - low), 1 + high)


@given(TOKENS, st.floats(0.01, 1), st.floats(0.01, 5))
def test_cispo_is_its_formula_with_the_weight_held_constant(rows: list[Token], low: float, high: float) -> None:
    found = outcome(tokens_of(rows), CispoLoss(clip_low=low, clip_high=high))
    losses = [-(weight(row, low, high) * row[2] * row[0]) for row in rows]
    gradients = [-weight(row, low, high) * row[2] for row in rows]
    assert found.loss.tolist() == pytest.approx(losses, rel=1e-12, abs=1e-12)
    assert found.gradient.tolist() == pytest.approx(gradients, rel=1e-12, abs=1e-12)


CASES = {  # ratio, advantage, gradient, mark
    "inside": (1.5, 2.0, -3.0, 0),
    "above and good": (8.0, 2.0, -6.0, 1),
    "above and bad": (8.0, -2.0, 6.0, 1),
    "below and good": (0.1, 2.0, -1.0, -1),
    "below and bad": (0.1, -2.0, 1.0, -1),
    "no advantage": (8.0, 0.0, 0.0, 0),
    "no advantage, below": (0.1, 0.0, 0.0, 0),
}


@pytest.mark.parametrize(("ratio", "advantage", "gradient", "mark"), CASES.values(), ids=CASES.keys())
def test_every_token_keeps_a_gradient_in_cispo_and_the_bounded_ones_are_marked(
    ratio: float, advantage: float, gradient: float, mark: int
) -> None:
    assert of_one(CispoLoss(clip_low=0.5, clip_high=2.0), ratio, advantage)[1:] == pytest.approx((gradient, mark))


def test_by_default_no_ratio_is_too_low_for_cispo() -> None:
    assert of_one(CispoLoss(), 1e-9, 1.0)[1:] == (pytest.approx(-1e-9), 0)
