"""What holds for every policy loss."""

from importlib import import_module
from math import exp
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given

from beamline.algorithms import losses
from beamline.algorithms.losses import selects
from beamline.config.losses import GspoLoss, SapoLoss
from tests.unit.algorithms.losses.loss_tokens import (
    CLASSES,
    CONFIGS,
    NAMES,
    TOKENS,
    Token,
    outcome,
    random_tokens,
    tokens_of,
)

every_loss = pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
MODULES = {
    path.stem: import_module(f"{losses.__name__}.{path.stem}")
    for path in Path(str(losses.__file__)).parent.glob("*.py")
    if path.stem != "__init__"
}


def test_each_loss_of_the_configuration_has_a_file_of_its_name_and_each_file_a_loss() -> None:
    configured = [get_args(cls.model_fields["name"].annotation)[0] for cls in CLASSES]
    assert sorted(configured) == sorted(name for name, module in MODULES.items() if hasattr(module, "token_losses"))
    assert [cls().name for cls in CLASSES] == configured


def test_the_losses_with_a_share_are_those_that_select() -> None:
    assert {cls().name for cls in CLASSES if selects(cls())} == {
        cls().name for cls in CLASSES if "share" in cls.model_fields
    }


@every_loss
def test_at_a_ratio_of_1_the_gradient_is_the_policy_gradient(config: Any) -> None:
    # The advantage is that of the sequence, since for GSPO a sequence is one; a power of 2 keeps its thirds exact.
    advantages, sequences = [2.0, 2.0, 2.0, 2.0, -0.5, -0.5, 0.0], [0, 0, 0, 0, 1, 1, 2]
    rows = [(-0.3 * t, -0.3 * t, advantage) for t, advantage in enumerate(advantages)]
    found = outcome(tokens_of(rows, sequences), config)
    assert found.gradient.tolist() == [-advantage for advantage in advantages]
    assert found.clipped.tolist() == [0] * 7


@every_loss
@pytest.mark.parametrize("gap", [-100.0, -1.0, 0.0, 1.0, 100.0])
def test_without_an_advantage_there_is_no_loss_no_gradient_and_no_mark(config: Any, gap: float) -> None:
    rows = [(min(gap, 0.0) - 0.1, min(-gap, 0.0) - 0.1, advantage) for advantage in (0.0, -0.0)]
    found = outcome(tokens_of(rows, dtype=torch.float32), config)
    assert [values.tolist() for values in found] == [[0.0, 0.0]] * 3


@every_loss
@pytest.mark.parametrize("selected", [False, True])
def test_ratios_beyond_float32_give_finite_losses_and_no_gradient_that_explodes(config: Any, selected: bool) -> None:
    rows = [(-0.1 + gap, -0.1, a) for gap in (-100.0, -89.0) for a in (-1.0, 1.0)]
    rows += [(-0.1, -0.1 - gap, a) for gap in (21.0, 89.0, 100.0) for a in (-1.0, 1.0)]
    found = outcome(tokens_of(rows, selected=[selected] * len(rows), dtype=torch.float32), config)
    assert found.loss.dtype == found.gradient.dtype == torch.float32
    assert found.clipped.dtype == torch.int8
    assert torch.isfinite(found.loss).all()
    assert torch.isfinite(found.gradient).all()
    assert float(found.gradient.abs().max()) <= 5.0  # CISPO's largest weight


@every_loss
def test_one_sequence_beyond_float32_does_not_touch_the_others(config: Any) -> None:
    rows, sequences = random_tokens(4, [3, 3])
    clean = outcome(tokens_of(rows, sequences, dtype=torch.float32), config)
    broken = outcome(tokens_of([*rows, (-0.1, -100.0, 1.0)], [*sequences, 2], dtype=torch.float32), config)
    for one, other in zip(clean, broken, strict=True):
        assert torch.equal(one, other[:-1])


@every_loss
@given(rows=TOKENS)
def test_what_is_not_marked_learns_as_without_bounds(config: Any, rows: list[Token]) -> None:
    if isinstance(config, SapoLoss):  # the gate has no bounds
        assert not outcome(tokens_of(rows), config).clipped.any()
        return
    found = outcome(tokens_of(rows), config)
    for (logprob, anchor, advantage), gradient, mark in zip(rows, found.gradient, found.clipped, strict=True):
        unbounded = -exp(logprob - anchor) * advantage
        if mark == 0:
            assert float(gradient) == pytest.approx(unbounded, rel=1e-12, abs=1e-12)
        elif unbounded != 0:  # what is not 0 may be too small to be held
            assert abs(float(gradient)) < abs(unbounded) or config.name == "cispo"
            assert float(gradient) == 0 or config.name == "cispo"
            assert (logprob > anchor) == (mark == 1)


LENGTHS = [1, 5, 2, 9, 1, 4]


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_sequences_changes_no_bit(config: Any, dtype: torch.dtype) -> None:
    rows, sequences = random_tokens(5, LENGTHS)
    chosen = [t % 3 == 0 for t in range(len(rows))]
    whole = outcome(tokens_of(rows, sequences, chosen, dtype), config)
    order = [t for b in (3, 0, 5, 1, 4, 2) for t in range(len(rows)) if sequences[t] == b]
    numbers = {old: new for new, old in enumerate((3, 0, 5, 1, 4, 2))}
    permuted = outcome(
        tokens_of([rows[t] for t in order], [numbers[sequences[t]] for t in order], [chosen[t] for t in order], dtype),
        config,
    )
    for one, other in zip(whole, permuted, strict=True):
        assert torch.equal(one[order], other)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cutting_between_sequences_changes_no_bit(config: Any, dtype: torch.dtype) -> None:
    rows, sequences = random_tokens(6, LENGTHS)
    chosen = [t % 3 == 0 for t in range(len(rows))]
    whole = outcome(tokens_of(rows, sequences, chosen, dtype), config)
    for cut in np.cumsum(LENGTHS)[:-1].tolist():
        parts = [
            outcome(
                tokens_of(rows[part], [b - sequences[part][0] for b in sequences[part]], chosen[part], dtype), config
            )
            for part in (slice(0, cut), slice(cut, None))
        ]
        for one, *others in zip(whole, *parts, strict=True):
            assert torch.equal(one, torch.cat(others))


@every_loss
def test_a_token_of_another_sequence_as_filling_changes_no_bit(config: Any) -> None:
    rows, sequences = random_tokens(7, LENGTHS)
    weights = torch.tensor([1.0] * len(rows) + [0.0], dtype=torch.float64)
    alone = outcome(tokens_of(rows, sequences), config)
    filled = outcome(tokens_of([*rows, (-1.0, -3.0, 2.0)], [*sequences, len(LENGTHS)]), config, weights)
    for one, other in zip(alone, filled, strict=True):
        assert torch.equal(one, other[:-1])
    assert float(filled.gradient[-1]) == 0.0


@every_loss
def test_losses_carry_a_gradient_and_marks_do_not(config: Any) -> None:
    found = losses.token_losses(tokens_of(random_tokens(8, [6])[0], [0] * 6), config)
    assert found.loss_T.requires_grad
    assert not found.clipped_T.requires_grad


@every_loss
def test_weights_of_tokens_multiply_their_gradients(config: Any) -> None:
    rows = random_tokens(9, [1] * 8)[0]
    weights = torch.linspace(0, 2, 8, dtype=torch.float64)
    plain, weighted = (outcome(tokens_of(rows), config, factor).gradient for factor in (None, weights))
    assert torch.allclose(weighted, weights * plain, rtol=1e-12, atol=0)


@every_loss
def test_no_tokens_have_no_losses(config: Any) -> None:
    found = outcome(tokens_of([]), config)
    assert [len(values) for values in found] == [0, 0, 0]


def test_gspo_and_the_clip_agree_where_each_sequence_has_one_token() -> None:
    tokens = tokens_of(random_tokens(10, [1] * 30)[0])
    gspo, clip = GspoLoss(clip_low=0.2, clip_high=0.28), CLASSES[0](clip_low=0.2, clip_high=0.28)
    for one, other in zip(outcome(tokens, gspo), outcome(tokens, clip), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=0)
