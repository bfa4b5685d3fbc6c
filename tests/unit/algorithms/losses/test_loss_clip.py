from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.config.losses import ClipLoss
from tests.unit.algorithms.losses.loss_tokens import (
    TOKENS,
    Token,
    finite_differences_agree,
    of_one,
    outcome,
    random_tokens,
    tokens_of,
)

CONFIG = ClipLoss(clip_low=0.2, clip_high=0.28)
DUAL = ClipLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def by_loop(rows: list[Token], low: float, high: float, dual: float | None) -> list[float]:
    losses = []
    for logprob, anchor, advantage in rows:
        ratio = exp(logprob - anchor)
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        losses.append(-objective)
    return losses


@given(TOKENS, st.floats(0.01, 0.9), st.floats(0.01, 3), st.none() | st.floats(1.01, 10))
def test_clip_is_its_formula(rows: list[Token], low: float, high: float, dual: float | None) -> None:
    config = ClipLoss(clip_low=low, clip_high=high, dual_clip=dual)
    loss = outcome(tokens_of(rows), config).loss
    assert loss.tolist() == pytest.approx(by_loop(rows, low, high, dual), rel=1e-12, abs=1e-12)


CASES = {  # ratio, advantage, what the gradient is over -ratio * advantage, mark
    "inside": (1.1, 1.0, 1, 0),
    "inside, worse": (0.9, -1.0, 1, 0),
    "above and good": (1.5, 1.0, 0, 1),
    "above and bad": (1.5, -1.0, 1, 0),
    "below and good": (0.5, 1.0, 1, 0),
    "below and bad": (0.5, -1.0, 0, -1),
    "only above the lower of the bounds": (1.25, 1.0, 1, 0),
    "far above and bad": (5.0, -1.0, 1, 0),
    "no advantage": (1.1, 0.0, 1, 0),
    "no advantage, above": (1.5, 0.0, 1, 0),
    "no advantage, below": (0.5, 0.0, 1, 0),
}


@pytest.mark.parametrize(("ratio", "advantage", "flows", "mark"), CASES.values(), ids=CASES.keys())
def test_clip_takes_the_gradient_only_where_the_ratio_went_too_far_the_way_of_the_advantage(
    ratio: float, advantage: float, flows: int, mark: int
) -> None:
    _, gradient, clipped = of_one(CONFIG, ratio, advantage)
    assert gradient == pytest.approx(-ratio * advantage * flows, abs=1e-12)
    assert clipped == mark


DUAL_CASES = {  # ratio, advantage, loss, gradient, mark
    "bad, below the cap": (2.9, -2.0, 5.8, 5.8, 0),
    "bad, above the cap": (3.1, -2.0, 6.0, 0.0, 1),
    "bad, too low": (0.5, -2.0, 1.6, 0.0, -1),
    "good, above the cap": (3.1, 2.0, -2.56, 0.0, 1),
    "no advantage, above the cap": (3.1, 0.0, 0.0, 0.0, 0),
}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "mark"), DUAL_CASES.values(), ids=DUAL_CASES.keys())
def test_dual_clip_caps_what_a_bad_token_weighs(
    ratio: float, advantage: float, loss: float, gradient: float, mark: int
) -> None:
    assert of_one(DUAL, ratio, advantage) == pytest.approx((loss, gradient, mark), abs=1e-12)


@pytest.mark.parametrize("config", [CONFIG, DUAL], ids=["clip", "dual clip"])
def test_the_gradient_of_clip_agrees_with_finite_differences(config: ClipLoss) -> None:
    assert finite_differences_agree(tokens_of(random_tokens(0, [40], spread=0.8)[0]), config)


def test_a_bad_token_beyond_the_limit_of_the_ratio_has_no_gradient_and_is_marked() -> None:
    anchor = -30.0
    below, beyond = (outcome(tokens_of([(anchor + gap, anchor, -1.0)]), CONFIG) for gap in (19.9, 20.1))
    assert (float(below.gradient), int(below.clipped)) == (pytest.approx(exp(19.9)), 0)
    assert (float(beyond.gradient), int(beyond.clipped)) == (0.0, 1)
    assert float(beyond.loss) == pytest.approx(exp(20))
