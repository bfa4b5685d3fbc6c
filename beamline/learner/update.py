"""An update's part on one micro-batch: its tokens as tensors, and their loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamline.algorithms.diagnostics import Compared, Learned
from beamline.algorithms.guards import check_mismatch, check_ratio
from beamline.algorithms.kl import kl_losses
from beamline.algorithms.loss import LossConfig
from beamline.algorithms.losses import Tokens, token_losses
from beamline.config.kl import KlLoss
from beamline.learner.planning import Planned
from beamline.policy.device import on_device
from beamline.records import Batch, pack

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Planned sequences, packed, and their T trained tokens as tensors; ``rows_T`` are the rows that predict them.

    ``weights_T`` weigh all losses of a token and ``corrections_T`` its policy loss. ``old_logprobs_T`` is None where
    pi_old is pi. ``verified_logprobs_T`` are those of a pass before the update, where a guard asks for it.
    """

    batch: Batch
    planned: Sequence[Planned]
    rows_T: Tensor
    sequence_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    corrections_T: Tensor
    sampler_logprobs_T: Tensor
    old_logprobs_T: Tensor | None
    reference_logprobs_T: Tensor | None
    selected_T: Tensor | None
    verified_logprobs_T: Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """The same with its tensors on a device; ``rows_T`` stay, for who looks things up by them."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        del tensors["rows_T"]
        return replace(self, **{name: on_device(tensor, device) for name, tensor in tensors.items()})  # type: ignore[arg-type]


def micro_batch(planned: Sequence[Planned], loss: LossConfig) -> MicroBatch:
    """Pack planned sequences; only the tokens that are kept are trained."""
    batch = pack([sequence.experience for sequence in planned])
    keep = np.concatenate([sequence.keep_R for sequence in planned])
    kept_B = [int(sequence.keep_R.sum()) for sequence in planned]
    rows_T = torch.from_numpy(batch.loss_mask_N.nonzero()[0][keep])

    def of_tokens(name: str) -> Tensor | None:
        columns = [getattr(sequence, name) for sequence in planned]
        return None if columns[0] is None else torch.from_numpy(np.concatenate(columns)[keep])

    corrections = of_tokens("correction_R")
    assert corrections is not None
    return MicroBatch(
        batch=batch,
        planned=planned,
        rows_T=rows_T,
        sequence_T=torch.from_numpy(np.repeat(np.arange(len(planned)), kept_B)),
        advantages_T=torch.from_numpy(batch.advantages_N)[rows_T],
        weights_T=torch.from_numpy(np.repeat(np.array([p.weight for p in planned], dtype=np.float32), kept_B)),
        corrections_T=corrections.float(),
        sampler_logprobs_T=torch.from_numpy(batch.sampler_logprobs_N)[rows_T],
        old_logprobs_T=None if loss.on_policy else of_tokens("old_logprobs_R"),
        reference_logprobs_T=of_tokens("reference_logprobs_R"),
        selected_T=of_tokens("selected_R"),
    )


def loss_of(
    micro: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor, loss: LossConfig
) -> tuple[Tensor, Callable[[], Learned]]:
    """The micro-batch's part of the loss, and a function that gives its tokens as they were found.

    To ask for them is to wait for a GPU, which would stand still if that were done between micro-batches.
    """
    old = logprobs_T.detach() if micro.old_logprobs_T is None else micro.old_logprobs_T
    anchor = micro.sampler_logprobs_T if loss.algorithm.loss.anchor == "sampler" else old
    tokens = Tokens(logprobs_T, anchor, micro.advantages_T, micro.sequence_T, micro.selected_T)
    losses = token_losses(tokens, loss.algorithm.loss)
    loss_T, kl_T, kl = micro.corrections_T * losses.loss_T, None, loss.algorithm.kl
    if isinstance(kl, KlLoss):
        assert micro.reference_logprobs_T is not None
        kl_T = kl_losses(logprobs_T, anchor, micro.reference_logprobs_T, kl)
        loss_T = loss_T + kl.coefficient * kl_T
        kl_T = kl_T.detach()
    logprobs_T, clipped_T = logprobs_T.detach(), losses.clipped_T  # no graph is held by what is asked for later

    def learned() -> Learned:
        return Learned(
            logprobs=_host(logprobs_T),
            anchor_logprobs=_host(anchor),
            entropy=_host(entropy_T),
            clipped=clipped_T.cpu().numpy(),
            position=_positions(micro.planned),
            reference_kl=None if kl_T is None else _host(kl_T),
        )

    return (micro.weights_T * loss_T).sum(), learned


def guard_mismatch(loss: LossConfig, compared: Compared | None) -> None:
    """Hold what the sampler wrote down for the first update of the process against the learner.

    Raises:
        GuardError: they are too far apart.
    """
    limit = loss.algorithm.guard.mismatch
    if loss.first and limit is not None and compared is not None:
        check_mismatch(compared.old_logprobs, compared.sampler_logprobs, limit)


def check_update(
    total: float, learned: Learned, verified_T: Floats | None, compared: Compared | None, loss: LossConfig
) -> None:
    """What must be true of an update before it is made: of its loss, its tokens, and of the first in the process.

    ``verified_T`` are log-probabilities of the learned tokens by a pass before it under the same weights, where a guard
    asked for one.

    Raises:
        FloatingPointError: the loss is not finite.
        GuardError: two passes differ, or sampler and learner are too far apart.
    """
    if not np.isfinite(total):
        raise FloatingPointError(f"the loss is {total}; the update was not made")
    if verified_T is not None:
        check_ratio(learned.logprobs, verified_T)
    guard_mismatch(loss, compared)


def _host(tensor: Tensor) -> Floats:
    found: Floats = tensor.detach().cpu().numpy()
    return found


def _positions(planned: Sequence[Planned]) -> Floats:
    """Where in its response each kept token stands, from 0 to below 1."""
    shares = [np.arange(len(p.keep_R), dtype=np.float32)[p.keep_R] / len(p.keep_R) for p in planned]
    return np.concatenate(shares).astype(np.float32)


def compared_of(planned: Sequence[Planned], learned: Learned) -> Compared:
    """In an update by the weights that sampled, pi is what the learner makes of what the sampler drew.

    ``planned`` are the sequences in the order of what was learned from them.
    """
    sampler = np.concatenate([each.experience.rollout.response_logprobs[each.keep_R] for each in planned])
    return Compared(sampler, learned.logprobs, np.array([len(each.keep_R) for each in planned], dtype=np.int64))
