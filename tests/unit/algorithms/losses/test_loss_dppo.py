from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beamline.config.losses import DppoLoss
from tests.unit.algorithms.losses.loss_tokens import (
    ADVANTAGES,
    Token,
    finite_differences_agree,
    outcome,
    random_tokens,
    tokens_of,
)

BELOW_CERTAINTY = st.floats(-8, -1e-6)
TOKENS = st.lists(st.tuples(BELOW_CERTAINTY, BELOW_CERTAINTY, ADVANTAGES), max_size=20)


def divergence(pi: float, mu: float, name: str) -> float:
    if name == "tv":
        return abs(mu - pi)
    return mu * log(mu / pi) + (1 - mu) * log((1 - mu) / (1 - pi))


@pytest.mark.parametrize("name", ["tv", "kl"])
@given(rows=TOKENS, threshold=st.floats(1e-3, 0.9))
def test_dppo_is_its_formula_with_the_mask_held_constant(rows: list[Token], threshold: float, name: str) -> None:
    losses, gradients = [], []
    for logprob, anchor, advantage in rows:
        ratio = exp(logprob - anchor)
        far = divergence(exp(logprob), exp(anchor), name) > threshold
        kept = not (far and ((advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)))
        losses.append(-kept * ratio * advantage)
        gradients.append(-kept * ratio * advantage)
    found = outcome(tokens_of(rows), DppoLoss.model_validate({"divergence": name, "threshold": threshold}))
    assert found.loss.tolist() == pytest.approx(losses, rel=1e-12, abs=1e-12)
    assert found.gradient.tolist() == pytest.approx(gradients, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["tv", "kl"])
def test_the_gradient_of_dppo_agrees_with_finite_differences(name: str) -> None:
    config = DppoLoss.model_validate({"divergence": name})
    assert finite_differences_agree(tokens_of(random_tokens(0, [40], spread=0.8)[0]), config)


CASES = {  # mu, pi, advantage, kept under tv 0.2, kept under kl 0.05, mark where not kept
    "a rare token that became far likelier may go on": (1e-4, 1e-2, 1.0, True, True, 1),
    "a likely token that lost much may not": (0.99, 0.7, -1.0, False, False, -1),
    "it may come back": (0.99, 0.7, 1.0, True, True, 0),
    "up and good": (0.2, 0.5, 1.0, False, False, 1),
    "up and bad": (0.2, 0.5, -1.0, True, True, 0),
    "a small move of a likely token costs more in kl": (0.85, 0.99, 1.0, True, False, 1),
    "no advantage": (0.2, 0.9, 0.0, True, True, 0),
}


@pytest.mark.parametrize(("mu", "pi", "advantage", "tv", "kl", "mark"), CASES.values(), ids=CASES.keys())
def test_dppo_takes_the_gradient_where_the_probability_moved_too_far_and_would_go_on(
    mu: float, pi: float, advantage: float, tv: bool, kl: bool, mark: int
) -> None:
    for kept, config in (
        (tv, DppoLoss(divergence="tv", threshold=0.2)),
        (kl, DppoLoss(divergence="kl", threshold=0.05)),
    ):
        found = outcome(tokens_of([(log(pi), log(mu), advantage)]), config)
        assert float(found.gradient) == pytest.approx(-pi / mu * advantage * kept, abs=1e-12)
        assert int(found.clipped) == (0 if kept else mark)


def test_the_divergence_of_dppo_is_from_the_anchor_to_the_policy() -> None:
    mu, pi = 0.5, 0.9
    forward, backward = divergence(pi, mu, "kl"), divergence(mu, pi, "kl")
    assert backward < forward
    between = DppoLoss(divergence="kl", threshold=(forward + backward) / 2)
    assert int(outcome(tokens_of([(log(pi), log(mu), 1.0)]), between).clipped) == 1


CERTAIN = {  # log pi, log mu, advantage, kept
    "certain as before": (0.0, 0.0, 1.0, True),
    "became certain": (0.0, -1.0, 1.0, False),
    "became certain of what is bad": (0.0, -1.0, -1.0, True),
    "was certain": (-1.0, 0.0, -1.0, False),
    "above 0 by a rounding": (1e-7, 0.0, 1.0, True),
    "was above 0 by a rounding": (-1.0, 1e-7, -1.0, False),
    "impossible in float32": (-1.0, -200.0, 1.0, False),
}


@pytest.mark.parametrize(("log_pi", "log_mu", "advantage", "kept"), CERTAIN.values(), ids=CERTAIN.keys())
@pytest.mark.parametrize("name", ["tv", "kl"])
def test_dppo_decides_about_probabilities_of_0_and_1(
    log_pi: float, log_mu: float, advantage: float, kept: bool, name: str
) -> None:
    config = DppoLoss.model_validate({"divergence": name, "threshold": 0.05})
    found = outcome(tokens_of([(log_pi, log_mu, advantage)], dtype=torch.float32), config)
    assert bool(found.gradient != 0) == kept
    assert bool(found.clipped == 0) == kept
