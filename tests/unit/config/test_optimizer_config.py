"""The learning rate of each update."""

from math import cos, pi

import pytest

from beamline.config import ConfigError, load_config
from beamline.config.schema import OptimizerConfig


def rates(updates: int, **settings: float) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 8.0, **settings})
    return [config.lr_after(made) for made in range(updates)]


def test_without_warm_up_and_decay_the_rate_is_constant() -> None:
    assert rates(3) == [8.0] * 3


def test_the_rate_rises_in_equal_steps_to_its_height() -> None:
    assert rates(6, warmup_updates=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_then_it_falls_along_half_a_cosine_and_stays() -> None:
    found = rates(8, warmup_updates=2, decay_updates=4, final_lr=2.0)
    written = [2 + 6 * (1 + cos(pi * share)) / 2 for share in (1 / 4, 2 / 4, 3 / 4, 1)]
    assert found == pytest.approx([4.0, 8.0, *written, 2.0, 2.0], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["final_lr=1e-7"], "final_lr=1e-07 needs learner.optimizer.decay_updates"),
        (["final_lr=1", "decay_updates=5"], "final_lr=1 is above learner.optimizer.lr"),
    ],
)
def test_an_end_that_is_none_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"learner.optimizer.{each}" for each in settings])
