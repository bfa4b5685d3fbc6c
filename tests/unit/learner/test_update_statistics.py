import numpy as np
import pytest

from beamline.algorithms.diagnostics import Compared, Learned
from beamline.learner.learner import StepStats, update_statistics

LIMIT = 8


def learned(entropy: float, tokens: int) -> Learned:
    zeros = np.zeros(tokens, np.float32)
    return Learned(zeros, zeros, np.full(tokens, entropy, np.float32), np.zeros(tokens, np.int8), zeros)


def compared(difference: float, tokens: int) -> Compared:
    sampler = np.full(tokens, -1.0, np.float32)
    return Compared(sampler, sampler + np.float32(difference), np.array([tokens]))


def update(tokens: int, loss: float = 0.0, norm: float = 1.0, lr: float = 1e-3, entropy: float = 0.0) -> StepStats:
    return StepStats(loss, norm, lr, tokens + 5, tokens + 2, compared(0.5, tokens), learned(entropy, tokens))


SKIPPED = StepStats(0.0, None, 9.0, 7, 0, None, None)


def test_tokens_of_all_updates_weigh_the_same() -> None:
    metrics = update_statistics([update(30, entropy=1.0), update(10, entropy=2.0)], LIMIT)
    assert metrics["policy/entropy"] == pytest.approx((30 * 1.0 + 10 * 2.0) / 40)


def test_loss_and_gradient_norm_are_means_over_updates() -> None:
    metrics = update_statistics([update(30, loss=1.0, norm=4.0), update(10, loss=2.0, norm=2.0)], LIMIT)
    assert (metrics["policy/loss"], metrics["policy/grad_norm"]) == (1.5, 3.0)


def test_the_rate_is_that_of_the_last_update_that_was_made() -> None:
    assert update_statistics([update(1, lr=1.0), update(1, lr=2.0), SKIPPED], LIMIT)["policy/lr"] == 2.0


def test_both_denominators_are_sums_over_all_updates() -> None:
    metrics = update_statistics([update(30), SKIPPED, update(10)], LIMIT)
    assert (metrics["policy/counted_tokens"], metrics["policy/kept_tokens"]) == (30 + 5 + 7 + 10 + 5, 30 + 2 + 10 + 2)


def test_skipped_updates_take_no_part_in_means() -> None:
    made = [update(30, loss=1.0, entropy=1.0), update(10, loss=2.0, entropy=2.0)]
    alone, beside = update_statistics(made, LIMIT), update_statistics([SKIPPED, made[0], SKIPPED, made[1]], LIMIT)
    counts = {"policy/counted_tokens", "policy/kept_tokens"}
    assert {n: v for n, v in alone.items() if n not in counts} == {n: v for n, v in beside.items() if n not in counts}


def test_an_update_that_was_compared_and_skipped_shows_the_mismatch() -> None:
    masked = StepStats(0.0, None, 1.0, 4, 0, compared(0.25, 4), None)
    metrics = update_statistics([masked], LIMIT)
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.25)
    assert not any(name in metrics for name in ("policy/entropy", "policy/loss", "policy/lr", "policy/grad_norm"))


def test_an_update_that_was_not_compared_takes_no_part_in_the_mismatch() -> None:
    later = StepStats(0.0, 1.0, 1.0, 4, 4, None, learned(1.0, 4))
    metrics = update_statistics([update(4), later], LIMIT)
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.5)


def test_a_step_without_updates_has_no_figures() -> None:
    assert update_statistics([], LIMIT) == {}
