"""What every policy loss is given, and what it gives."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """The T trained tokens of a micro-batch; a sequence is never divided between micro-batches.

    ``logprobs_T`` is log pi and alone carries a gradient; ``anchor_logprobs_T`` is what the ratio compares it with:
    log pi_old, or log mu where the loss is anchored at the sampler. ``sequence_T`` numbers the sequences from 0.
    ``selected_T`` is what ``select`` of the same loss chose over the whole mini-batch, None for losses without one.
    """

    logprobs_T: Tensor
    anchor_logprobs_T: Tensor
    advantages_T: Tensor
    sequence_T: Tensor
    selected_T: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The loss of each token, to be weighted and summed, and on which of them a bound of the ratio took hold.

    ``clipped_T`` (int8) is -1 where the ratio was too low, 1 where it was too high, 0 elsewhere; it has no gradient.
    What is marked has no gradient through the ratio any more, or with CISPO one of bounded weight. Never marked are
    tokens without an advantage, which have no gradient anyway, and those that ``select`` took it from.
    """

    loss_T: Tensor
    clipped_T: Tensor


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """The T tokens of a whole mini-batch, before its update, for decisions that look at all of them.

    ``logprobs_T`` is log pi_old; ``uniforms_T`` has a number in [0, 1) for each token that depends on the seed and the
    token alone, so that a draw among tokens depends neither on their order nor on who holds them.
    """

    logprobs_T: NDArray[np.float64]
    advantages_T: NDArray[np.float64]
    uniforms_T: NDArray[np.float64]
