"""Joins a learner and a sampler whose first ranks are one process: one lays down what it offers, the other takes it."""

from collections.abc import Mapping

from torch import Tensor

from beamline.transfer.plan import TransferError, TransferPlan
from beamline.transfer.source import Source


class LocalChannel:
    """What the learner of this process has sent, until the sampler of this process takes it."""

    def __init__(self) -> None:
        self._sent: tuple[TransferPlan, Source] | None = None

    def send(self, plan: TransferPlan, source: Source) -> None:
        """Offer what the plan takes slices of; nothing is copied until it is received."""
        self._sent = (plan, source)

    def take(self, plan: TransferPlan) -> Source:
        """What was offered under this plan, once.

        Raises:
            TransferError: nothing was sent, or under another plan.
        """
        if self._sent is None or self._sent[0] != plan:
            raise TransferError(
                "receive: the learner has not sent weights under this plan; call learner.send(plan) first"
            )
        source = self._sent[1]
        self._sent = None
        return source

    def receive(self, plan: TransferPlan, tensors: Mapping[str, Tensor]) -> None:
        """Copy every planned slice into ``tensors``, cast to their type.

        Raises:
            TransferError: nothing was sent, or under another plan.
        """
        self.take(plan).copy(plan, tensors)
