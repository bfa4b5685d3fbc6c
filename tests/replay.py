"""The batches of a run, written down on their way to its learner, and what another learner makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from beamline.algorithms.loss import LossConfig
from beamline.config import load_config
from beamline.learner.learner import Learner
from beamline.learner.torch import TorchLearner
from beamline.records import Experience
from beamline.runtime import engines
from beamline.train import train


@dataclass(frozen=True)
class Mini:
    """A mini-batch, with the loss and the gradient norm that the run's learner found."""

    batch: Sequence[Experience]
    loss: LossConfig
    found: tuple[float, float]


def recorded(output: Path, *settings: str) -> list[Mini]:
    """The mini-batches of a run of the quickstart on the CPU."""
    made: list[Mini] = []
    given: list[tuple[Sequence[Experience], LossConfig]] = []

    class Recording(TorchLearner):
        def prepare(self, batch: Sequence[Experience], loss: LossConfig) -> Any:
            given.append((list(batch), loss))
            return super().prepare(batch, loss)

        def step(self, prepared: Any) -> Any:
            stats = super().step(prepared)
            assert stats.grad_norm is not None
            made.append(Mini(*given[-1], (stats.loss, stats.grad_norm)))
            return stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "TorchLearner", Recording)
        train(load_config(Path("recipes/quickstart.yaml"), [f"output={output}", "evaluation.every=0", *settings]))
    return made


def replayed(learner: Learner[Any], minis: Sequence[Mini]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each, where the learner goes on from one to the next."""
    found = []
    for mini in minis:
        stats = learner.step(learner.prepare(mini.batch, mini.loss))
        assert stats.grad_norm is not None
        found.append((stats.loss, stats.grad_norm))
    return found
