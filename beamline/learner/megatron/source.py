"""The weights of all ranks of the learner as a source: each rank hands over its own slices."""

from collections.abc import Mapping
from functools import partial
from itertools import count

from torch import Tensor

from beamline.learner.megatron.ranks import Ranks
from beamline.transfer.plan import Shares, TransferPlan
from beamline.transfer.source import Supply, copy_through_buckets


class RanksSource:
    """Implements :class:`~beamline.transfer.source.Source` on the first rank.

    Args:
        ranks: all of them, whose target is a :class:`~beamline.learner.megatron.rank.Rank`.
        size: how many they are.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self.size = ranks, size
        self._numbers = count()

    def not_finite(self, plan: TransferPlan) -> str | None:
        """See :class:`~beamline.transfer.source.Source`. Each rank looks at all that it holds, whatever the plan."""
        return next(filter(None, self._ranks.call("weights_not_finite")), None)

    def supply(self, shares: Shares, bucket_bytes: int) -> Supply:
        """See :class:`~beamline.transfer.source.Source`."""
        number, call = next(self._numbers), self._ranks.call
        rounds = max(call("supply", number, shares, bucket_bytes))
        return Supply(rounds, partial(call, "of_supply", number), partial(self._end, number))

    def _end(self, number: int) -> None:
        if not self._ranks.broken:  # else they end anyway, and why is what is to be told
            self._ranks.call("end_supply", number)

    def copy(self, plan: TransferPlan, tensors: Mapping[str, Tensor]) -> None:
        """See :class:`~beamline.transfer.source.Source`."""
        copy_through_buckets(self, plan, tensors)
