import pytest

from beamline.learner.learner import StepStats, update_statistics

SKIPPED = StepStats(skipped=True, tokens=0, loss=0.0, grad_norm=None, lr=9.0, metrics={})


def update(tokens: int, loss: float = 0.0, norm: float = 1.0, lr: float = 1e-3, **metrics: float) -> StepStats:
    return StepStats(False, tokens, loss, norm, lr, {f"policy/{name}": value for name, value in metrics.items()})


def test_means_weigh_updates_by_their_tokens() -> None:
    metrics = update_statistics([update(30, entropy=1.0), update(10, entropy=2.0)])
    assert metrics["policy/entropy"] == pytest.approx((30 * 1.0 + 10 * 2.0) / 40)


def test_maxima_stay_maxima() -> None:
    assert update_statistics([update(1, diff_max=3.0), update(99, diff_max=0.5)])["policy/diff_max"] == 3.0


def test_loss_and_gradient_norm_are_means_over_updates() -> None:
    metrics = update_statistics([update(30, loss=1.0, norm=4.0), update(10, loss=2.0, norm=2.0)])
    assert (metrics["policy/loss"], metrics["policy/grad_norm"]) == (1.5, 3.0)


def test_the_rate_is_that_of_the_last_update_that_was_made() -> None:
    assert update_statistics([update(1, lr=1.0), update(1, lr=2.0), SKIPPED])["policy/lr"] == 2.0


def test_skipped_updates_take_no_part() -> None:
    made = [update(30, loss=1.0, entropy=1.0), update(10, loss=2.0, entropy=2.0)]
    assert update_statistics([SKIPPED, made[0], SKIPPED, made[1]]) == update_statistics(made)


@pytest.mark.parametrize("updates", [[], [SKIPPED], [SKIPPED, SKIPPED]])
def test_a_step_that_made_no_update_has_no_figures(updates: list[StepStats]) -> None:
    assert update_statistics(updates) == {}


def test_names_are_passed_on_and_nothing_else_is_added() -> None:
    names = set(update_statistics([update(1, entropy=1.0, kl_old=0.0)]))
    assert names == {"policy/entropy", "policy/kl_old", "policy/lr", "policy/grad_norm", "policy/loss"}
