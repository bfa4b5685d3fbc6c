"""What a learner is: sequences in, one optimizer update out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.loss import LossConfig
from beamline.checkpoint.shards import ShardReader, ShardWriter
from beamline.model.layout import Layout, WeightKind
from beamline.records import Experience
from beamline.transfer.plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Outputs:
    """Per-sequence results of a forward pass; entry b has one value for each row of sequence b, ``[S_b - 1]``."""

    logprobs: list[NDArray[np.float32]] | None = None
    entropy: list[NDArray[np.float32]] | None = None
    values: list[NDArray[np.float32]] | None = None


class PreparedBatch(Protocol):
    """A mini-batch ready for its update: cut into micro-batches, with old log-probabilities, masks, denominators."""

    @property
    def loss_tokens(self) -> int:
        """Tokens that the update learns from, over all ranks; 0 means that the update will be skipped."""


Prepared = TypeVar("Prepared", bound=PreparedBatch)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What an update did.

    ``metrics`` are means over ``tokens`` (maxima when the name ends in ``_max``), named as in ``docs/metrics.md``; a
    skipped update has no gradient norm.
    """

    skipped: bool
    tokens: int
    loss: float
    grad_norm: float | None
    lr: float
    metrics: dict[str, float]


def update_statistics(updates: Sequence[StepStats]) -> dict[str, float]:
    """The ``policy/`` and ``mismatch/`` metrics of a step: means of its updates weighted by their tokens.

    Maxima stay maxima; loss and gradient norm are means over updates; the rate is that of the last update. A step
    whose updates were all skipped has none of them.
    """
    made = [update for update in updates if not update.skipped]
    if not made:
        return {}
    metrics = {"policy/lr": made[-1].lr}
    weights = np.array([update.tokens for update in made], dtype=np.float64)
    for name in made[0].metrics:
        values = np.array([update.metrics[name] for update in made])
        metrics[name] = float(values.max() if name.endswith("_max") else (values * weights).sum() / weights.sum())
    norms = [update.grad_norm for update in made if update.grad_norm is not None]
    metrics["policy/grad_norm"] = float(np.mean(norms))
    metrics["policy/loss"] = float(np.mean([update.loss for update in made]))
    return metrics


class Learner(Protocol[Prepared]):
    """An engine that trains the policy. ``tests/contract/test_learner*.py`` define it in code."""

    def forward(
        self,
        batch: Sequence[Experience],
        outputs: Collection[Literal["logprobs", "entropy", "values"]],
        adapters: bool = True,
    ) -> Outputs:
        """Evaluate sequences with the current weights, at each sequence's own sampling temperature.

        Raises:
            ValueError: an output that this model cannot give.
        """

    def prepare(self, batch: Sequence[Experience], loss: LossConfig) -> Prepared:
        """Once a mini-batch: plan micro-batches, compute old log-probabilities, keep-masks and denominators."""

    def step(self, prepared: Prepared) -> StepStats:
        """Sum gradients over micro-batches and ranks, then update once.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; weights and optimizer are unchanged.
        """

    def layout(self, kind: WeightKind) -> Layout:
        """Which rank of the engine holds which slice."""

    def send(self, plan: TransferPlan) -> None:
        """Hand over this engine's slices; runs together with the sampler's ``receive``."""

    def save(self, writer: ShardWriter) -> None:
        """Write weights and optimizer state as slices under Hugging Face names.

        Raises:
            FloatingPointError: a weight is not finite; nothing was written.
        """

    def load(self, reader: ShardReader) -> None:
        """Read what any layout saved.

        Raises:
            CheckpointError: a tensor is missing, or its shape or type is another.
        """

    def sleep(self) -> None:
        """Give back what the engine holds on its device."""

    def wake(self) -> None:
        """Take it again."""
