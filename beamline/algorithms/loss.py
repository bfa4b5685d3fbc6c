"""The policy loss as data and as a pure function."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Everything a rank has to know to compute the loss of a mini-batch.

    ``on_policy`` says that the weights are still those that sampled: then ``pi_old`` is ``pi`` itself, detached, and
    no pass is spent on it. ``mask_truncated`` takes responses out whose finish is not ``stop``;
    ``renormalize_after_mask`` takes their tokens out of the denominator too.
    """

    clip_low: float
    clip_high: float
    mask_truncated: bool
    renormalize_after_mask: bool
    on_policy: bool


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Sums over the tokens of a micro-batch; sums of micro-batches and ranks are those of the mini-batch."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor


def clipped_loss(logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, config: LossConfig) -> LossTerms:
    """PPO's clipped objective with DAPO's separate bounds, negated and summed over the tokens given.

    ``-min(rho A, clip(rho, 1 - low, 1 + high) A)`` with ``rho = pi / pi_old``. ``kl`` is the sum of
    ``-log rho`` (k1), an estimate of KL(pi_old || pi). The counts are of tokens whose gradient the
    clip removed: below for negative, above for positive advantages.

    Sources: PPO, arXiv 1707.06347, equation 7; clip-higher, DAPO, arXiv 2503.14476, equation 10.
    """
    log_ratio = logprobs_N - old_logprobs_N
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages_N, clipped * advantages_N).sum()
    with torch.no_grad():
        return LossTerms(
            loss=loss,
            clipped_low=((advantages_N < 0) & (ratio < 1 - config.clip_low)).sum(),
            clipped_high=((advantages_N > 0) & (ratio > 1 + config.clip_high)).sum(),
            kl=-log_ratio.sum(),
        )
