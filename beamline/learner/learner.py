"""What a learner is: sequences in, one optimizer update out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.diagnostics import Compared, Learned, joined, mismatch_statistics, policy_statistics
from beamline.algorithms.loss import LossConfig
from beamline.checkpoint.shards import ShardReader, ShardWriter
from beamline.model.layout import Layout, WeightKind
from beamline.records import Experience
from beamline.transfer.plan import TransferPlan

Weights = Literal["policy", "reference"]
"""Whose weights evaluate: those that are trained, or those that training began with."""


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
    """What an update did. A skipped update has no gradient norm, and nothing that it learned from.

    ``counted_tokens`` are the response tokens of all graded sequences, ``kept_tokens`` those that no mask left out.
    ``compared`` is None where the learner's log-probabilities under the weights that sampled are not known.
    """

    loss: float
    grad_norm: float | None
    lr: float
    counted_tokens: int
    kept_tokens: int
    compared: Compared | None
    learned: Learned | None

    @property
    def skipped(self) -> bool:
        """Whether there was nothing to learn from, so that no update was made."""
        return self.learned is None

    @property
    def tokens(self) -> int:
        """Tokens that the update learned from."""
        return 0 if self.learned is None else len(self.learned.logprobs)


def update_statistics(updates: Sequence[StepStats], response_limit: int) -> dict[str, float]:
    """The ``policy/``, ``mismatch/`` and ``correction/`` metrics of a step, over the tokens of all updates together.

    Loss and gradient norm are means over updates; the rate is that of the last update. A step whose updates were all
    skipped has none of these, but may have been compared with the sampler all the same.
    """
    if not updates:
        return {}
    metrics: dict[str, float] = {
        "policy/counted_tokens": sum(update.counted_tokens for update in updates),
        "policy/kept_tokens": sum(update.kept_tokens for update in updates),
    }
    compared = [update.compared for update in updates if update.compared is not None]
    if compared:
        metrics |= mismatch_statistics(joined(compared), response_limit)
    made = [update for update in updates if not update.skipped]
    if made:
        metrics |= policy_statistics(joined([update.learned for update in made if update.learned is not None]))
        metrics["policy/lr"] = made[-1].lr
        metrics["policy/grad_norm"] = float(np.mean([update.grad_norm for update in made]))
        metrics["policy/loss"] = float(np.mean([update.loss for update in made]))
    return metrics


class Learner(Protocol[Prepared]):
    """An engine that trains the policy. ``tests/contract/test_learner*.py`` define it in code."""

    def forward(
        self,
        batch: Sequence[Experience],
        outputs: Collection[Literal["logprobs", "entropy", "values"]],
        weights: Weights = "policy",
    ) -> Outputs:
        """Evaluate sequences at each one's own sampling temperature.

        The reference is a frozen copy of the model that training began with, or the base without its adapters.

        Raises:
            ValueError: an output that this model cannot give, or no reference was asked for when it was built.
        """

    def prepare(self, batch: Sequence[Experience], loss: LossConfig) -> Prepared:
        """Once a mini-batch: compute what the decisions take, decide masks and weights, plan micro-batches.

        Raises:
            ValueError: a log-probability that a correction or the loss compares with is missing.
        """

    def step(self, prepared: Prepared) -> StepStats:
        """Sum gradients over micro-batches and ranks, then update once.

        Raises:
            FloatingPointError: the loss or the gradient is not finite.
            GuardError: the first update of the process does not look as it must.
                After either, weights and optimizer are unchanged.
        """

    @property
    def kind(self) -> WeightKind:
        """What is trained, saved, and sent after every step: the model's weights, or an adapter."""

    def layout(self, kind: WeightKind) -> Layout:
        """Which rank of the engine holds which slice.

        Raises:
            ValueError: there is nothing of that kind.
        """

    def send(self, plan: TransferPlan) -> None:
        """Hand over this engine's slices; runs together with the sampler's ``receive``."""

    def save(self, writer: ShardWriter) -> None:
        """Write what is trained and its optimizer state as slices under Hugging Face names.

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
