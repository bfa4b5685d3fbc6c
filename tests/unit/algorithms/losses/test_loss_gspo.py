from dataclasses import replace
from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beamline.config.losses import GspoLoss
from tests.unit.algorithms.losses.loss_tokens import (
    TOKENS,
    Token,
    finite_differences_agree,
    outcome,
    random_tokens,
    tokens_of,
)

WIDE = GspoLoss(clip_low=0.5, clip_high=1.0)


def by_loop(rows: list[Token], sequences: list[int], low: float, high: float) -> list[float]:
    losses = []
    for (_, _, advantage), sequence in zip(rows, sequences, strict=True):
        own = [row for row, other in zip(rows, sequences, strict=True) if other == sequence]
        total = 0.0
        for logprob, anchor, _ in own:
            total += logprob - anchor
        ratio = exp(total / len(own))
        losses.append(-min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage))
    return losses


@given(TOKENS, st.data(), st.floats(1e-4, 0.9), st.floats(1e-4, 3))
def test_gspo_is_its_formula(rows: list[Token], data: st.DataObject, low: float, high: float) -> None:
    sequences = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    loss = outcome(tokens_of(rows, sequences), GspoLoss(clip_low=low, clip_high=high)).loss
    assert loss.tolist() == pytest.approx(by_loop(rows, sequences, low, high), rel=1e-12, abs=1e-12)


def test_the_gradient_of_gspo_agrees_with_finite_differences() -> None:
    assert finite_differences_agree(tokens_of(*random_tokens(0, [1, 7, 2, 30])), WIDE)


def test_a_loss_of_gspo_gives_its_gradient_to_all_tokens_of_its_sequence_alike() -> None:
    rows = [(-1.0, -1.3, 2.0), (-0.4, -0.3, -1.0), (-2.0, -2.1, 0.5), (-1.0, -1.0, 1.0)]
    tokens, first = tokens_of(rows, [0, 0, 0, 1]), torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    share = -exp((0.3 - 0.1 + 0.1) / 3) * 2.0 / 3
    assert outcome(tokens, WIDE, first).gradient.tolist() == pytest.approx([share, share, share, 0.0], abs=1e-12)


def test_each_token_of_a_sequence_of_gspo_receives_the_ratio_times_the_advantage_of_the_sequence() -> None:
    rows = [(-1.0, -1.3, 2.0), (-0.4, -0.3, 2.0), (-2.0, -2.1, 2.0)]
    gradient = outcome(tokens_of(rows, [0, 0, 0]), WIDE).gradient
    assert gradient.tolist() == pytest.approx([-exp(0.1) * 2.0] * 3, abs=1e-12)


CASES = {  # mean of log rho, advantage, whether the gradient is there, mark
    "inside": (1e-4, 1.0, True, 0),
    "above and good": (5e-4, 1.0, False, 1),
    "above and bad": (5e-4, -1.0, True, 0),
    "below and good": (-4e-4, 1.0, True, 0),
    "below and bad": (-4e-4, -1.0, False, -1),
    "between the bounds of the other side": (3.5e-4, 1.0, True, 0),
    "no advantage": (5e-4, 0.0, True, 0),
}


@pytest.mark.parametrize(("mean", "advantage", "flows", "mark"), CASES.values(), ids=CASES.keys())
def test_gspo_clips_a_sequence_as_a_whole(mean: float, advantage: float, flows: bool, mark: int) -> None:
    # Both tokens are far outside of the bounds; only their mean counts.
    rows = [(-1.0 + mean + 0.5, -1.0, advantage), (-2.0 + mean - 0.5, -2.0, advantage)]
    found = outcome(tokens_of(rows, [0, 0]), GspoLoss())
    assert found.gradient.tolist() == pytest.approx([-exp(mean) * advantage * flows] * 2, abs=1e-12)
    assert found.clipped.tolist() == [mark, mark]


def test_numbers_of_sequences_without_a_token_change_nothing() -> None:
    rows, sequences = random_tokens(1, [3, 4])
    dense, sparse = tokens_of(rows, sequences), tokens_of(rows, [9 * b + 2 for b in sequences])
    for one, other in zip(outcome(dense, WIDE), outcome(sparse, WIDE), strict=True):
        assert torch.equal(one, other)


def test_gspo_has_the_same_bits_every_time_under_deterministic_algorithms() -> None:
    rows, sequences = random_tokens(2, [5000] * 4)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (outcome(tokens_of(rows, sequences, dtype=torch.float32), WIDE) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_the_ratio_of_a_long_sequence_is_exact_in_float32_far_below_the_bounds() -> None:
    rows, sequences = random_tokens(3, [100_000], spread=0.1)
    exact = tokens_of([(logprob, anchor, 1.0) for logprob, anchor, _ in rows], sequences)
    rounded = replace(
        exact,
        logprobs_T=exact.logprobs_T.detach().float().requires_grad_(),
        anchor_logprobs_T=exact.anchor_logprobs_T.float(),
        advantages_T=exact.advantages_T.float(),
    )
    # Against a clip of 3e-4; 1e-7 is the rounding of a number near 1.
    assert float(outcome(rounded, WIDE).loss[0]) == pytest.approx(float(outcome(exact, WIDE).loss[0]), abs=5e-7)
