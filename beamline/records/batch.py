"""What a learner packs for itself: sequences end to end, nothing padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beamline.records.rollout import Rollout
from beamline.records.sampling import Support


@dataclass(frozen=True, slots=True)
class Experience:
    """A rollout to learn from. ``trained=False`` keeps it in no loss and no denominator (ungraded, filtered).

    ``group`` numbers the group within the mini-batch: its samples answer one problem.
    """

    rollout: Rollout
    advantage: float
    trained: bool = True
    group: int = 0

    @property
    def rows(self) -> int:
        """Rows that the sequence takes in a packed batch: one for each predicted token."""
        return len(self.rollout.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed sequences; every per-token array is indexed by the row that *predicts* the token.

    A sequence of S tokens gives S - 1 rows: ``input_ids = ids[:-1]`` and ``target_ids = ids[1:]``. Positions restart
    at 0 in each sequence, and rows ``cu_seqlens_B1[b]:cu_seqlens_B1[b + 1]`` belong to sequence b. ``support_N`` says
    which tokens could be drawn as the target of each row (empty = all); it is None when no sequence recorded any.
    """

    input_ids_N: NDArray[np.int64]
    target_ids_N: NDArray[np.int64]
    position_ids_N: NDArray[np.int64]
    cu_seqlens_B1: NDArray[np.int64]
    loss_mask_N: NDArray[np.bool_]
    advantages_N: NDArray[np.float32]
    sampler_logprobs_N: NDArray[np.float32]
    temperature_B: NDArray[np.float32]
    routes_NLK: NDArray[np.unsignedinteger] | None
    support_N: Support | None = None

    @property
    def rows(self) -> int:
        """Number of packed rows, ``N``."""
        return len(self.input_ids_N)

    @property
    def row_temperatures(self) -> NDArray[np.float32]:
        """The sampling temperature of each row."""
        return np.repeat(self.temperature_B, np.diff(self.cu_seqlens_B1))

    def by_sequence(self, mask_N: NDArray[np.bool_], values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Values of the rows that the mask chooses, as those of each sequence."""
        chosen_B = np.add.reduceat(mask_N, self.cu_seqlens_B1[:-1], dtype=np.int64)
        return np.split(values, np.cumsum(chosen_B)[:-1])

    def support_of(self, rows: NDArray[np.int64]) -> Support | None:
        """What could be drawn as the targets of some rows, in the order given; None when nothing was recorded."""
        return None if self.support_N is None else self.support_N.take(rows)


def pack(experiences: Sequence[Experience]) -> Batch:
    """Pack sequences end to end, in the order given.

    Raises:
        ValueError: nothing to pack, a sequence of fewer than two tokens, routes in only some of the sequences, or
            routes that are not of a sequence's rows.
    """
    if not experiences:
        raise ValueError("pack: no sequence was given")
    rollouts = [experience.rollout for experience in experiences]
    for rollout in rollouts:
        if len(rollout.token_ids) < 2:
            raise ValueError(f"pack: {rollout.key} has {len(rollout.token_ids)} tokens; at least 2 give a row")
    rows_B = np.array([experience.rows for experience in experiences])
    masks = [e.rollout.policy_mask[1:] & e.trained for e in experiences]
    return Batch(
        input_ids_N=np.concatenate([r.token_ids[:-1] for r in rollouts]).astype(np.int64),
        target_ids_N=np.concatenate([r.token_ids[1:] for r in rollouts]).astype(np.int64),
        position_ids_N=np.concatenate([np.arange(n, dtype=np.int64) for n in rows_B]),
        cu_seqlens_B1=np.concatenate([[0], np.cumsum(rows_B)]).astype(np.int64),
        loss_mask_N=np.concatenate(masks),
        advantages_N=np.repeat(np.array([e.advantage for e in experiences], dtype=np.float32), rows_B),
        sampler_logprobs_N=np.concatenate([r.logprobs[1:] for r in rollouts]),
        temperature_B=np.array([r.temperature for r in rollouts], dtype=np.float32),
        routes_NLK=_routes(experiences),
        support_N=_support(rollouts),
    )


def _routes(experiences: Sequence[Experience]) -> NDArray[np.unsignedinteger] | None:
    """Those of every row, or None where no sequence has any. A wrong length would shift those of later sequences."""
    found = [e.rollout.routes for e in experiences if e.rollout.routes is not None]
    if not found:
        return None
    if len(found) < len(experiences):
        raise ValueError(f"pack: {len(found)} of {len(experiences)} sequences have routes; all or none must")
    for experience, routes in zip(experiences, found, strict=True):
        wanted = experience.rows, *found[0].shape[1:]
        if routes.shape != wanted:
            raise ValueError(f"pack: {experience.rollout.key} has routes of shape {routes.shape}, expected {wanted}")
    return np.concatenate(found)


def _support(rollouts: Sequence[Rollout]) -> Support | None:
    """That of every row; a sequence without a recorded support has empty entries."""
    if all(rollout.support is None for rollout in rollouts):
        return None
    return Support.joined(
        [
            Support.unrestricted(len(r.token_ids) - 1)
            if r.support is None
            else r.support.take(np.arange(1, len(r.token_ids)))
            for r in rollouts
        ]
    )
