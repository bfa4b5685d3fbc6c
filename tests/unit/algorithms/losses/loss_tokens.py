"""Tokens by hand, what a loss makes of them, and every loss there is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from hypothesis import strategies as st

from beamline.algorithms.losses import BatchTokens, Tokens, token_losses
from beamline.config.losses import DppoLoss, Loss, PolicyLoss

CLASSES: tuple[type[Any], ...] = get_args(get_args(Loss)[0])
CONFIGS: list[Any] = [*(cls() for cls in CLASSES), DppoLoss(divergence="kl"), CLASSES[0](dual_clip=3.0)]
NAMES = [f"{config.name}{i}" for i, config in enumerate(CONFIGS)]

Token = tuple[float, float, float]  # log pi, log anchor, advantage
LOGPROBS, ADVANTAGES = st.floats(-8, 0), st.floats(-3, 3)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, ADVANTAGES), max_size=20)


class Outcome(NamedTuple):
    loss: torch.Tensor
    gradient: torch.Tensor
    clipped: torch.Tensor


def tokens_of(
    rows: Sequence[Token],
    sequences: Sequence[int] | None = None,
    selected: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tokens:
    """By default each token is a sequence of its own, and none is selected."""
    logprobs, anchor, advantages = torch.tensor(rows, dtype=dtype).reshape(-1, 3).T.contiguous()
    return Tokens(
        logprobs_T=logprobs.requires_grad_(),
        anchor_logprobs_T=anchor,
        advantages_T=advantages,
        sequence_T=torch.tensor(range(len(rows)) if sequences is None else sequences, dtype=torch.int64),
        selected_T=torch.tensor([False] * len(rows) if selected is None else selected, dtype=torch.bool),
    )


def outcome(tokens: Tokens, config: PolicyLoss, weights: torch.Tensor | None = None) -> Outcome:
    """Losses, the gradient of their weighted sum, and marks."""
    losses = token_losses(tokens, config)
    total = (losses.loss_T if weights is None else losses.loss_T * weights).sum()
    (gradient,) = torch.autograd.grad(total, tokens.logprobs_T)
    return Outcome(losses.loss_T.detach(), gradient, losses.clipped_T)


def of_one(config: PolicyLoss, ratio: float, advantage: float, selected: bool = False) -> tuple[float, float, int]:
    """Loss, gradient and mark of a single token that had a probability of 0.1."""
    anchor = float(np.log(0.1))
    found = outcome(tokens_of([(anchor + float(np.log(ratio)), anchor, advantage)], selected=[selected]), config)
    return float(found.loss), float(found.gradient), int(found.clipped)


def batch_of(logprobs: Sequence[float], advantages: Sequence[float], uniforms: Sequence[float]) -> BatchTokens:
    return BatchTokens(*(np.array(values, dtype=np.float64) for values in (logprobs, advantages, uniforms)))


def random_tokens(seed: int, lengths: Sequence[int], spread: float = 0.3) -> tuple[list[Token], list[int]]:
    """Rows and the number of the sequence of each."""
    random = np.random.default_rng(seed)
    sequences = [b for b, length in enumerate(lengths) for _ in range(length)]
    anchor = -3 * random.random(len(sequences)) - 0.1
    logprobs = np.minimum(anchor + spread * random.normal(size=len(sequences)), 0.0)
    return list(zip(logprobs, anchor, random.normal(size=len(sequences)), strict=True)), sequences


def finite_differences_agree(tokens: Tokens, config: PolicyLoss) -> bool:
    """No token may stand on a corner of the loss."""

    def losses(logprobs: torch.Tensor) -> torch.Tensor:
        return token_losses(replace(tokens, logprobs_T=logprobs), config).loss_T

    return torch.autograd.gradcheck(losses, tokens.logprobs_T)
