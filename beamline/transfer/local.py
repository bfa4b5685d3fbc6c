"""The executor within one process: the sender lays references down, the receiver copies."""

from collections.abc import Mapping

from torch import Tensor

from beamline.transfer.plan import TransferError, TransferPlan


class LocalChannel:
    """Joins a learner and a sampler of one process; both engines hold the whole model as rank 0."""

    def __init__(self) -> None:
        self._sent: tuple[TransferPlan, Mapping[str, Tensor]] | None = None

    def send(self, plan: TransferPlan, tensors: Mapping[str, Tensor]) -> None:
        """Offer the tensors that the plan takes slices of; nothing is copied until they are received."""
        self._sent = (plan, tensors)

    def take(self, plan: TransferPlan) -> Mapping[str, Tensor]:
        """The tensors that were offered under this plan, once.

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
        source = self.take(plan)
        for move in plan.moves:
            name, index = move.part.name, move.part.index
            tensors[name][index].copy_(source[name][index])
