"""Log-probabilities and entropy from hidden states, chunk by chunk: ``[N, V]`` never exists."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from beamline.records import Support


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)`` in float32, as the Hugging Face module computes it."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in float32, from inputs as they are."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    cap: float | None,
    chunk_rows: int,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and entropy of its distribution, both ``[N]`` float32.

    Logits come from the given precision with float32 output, are never rounded, then soft-capped, then divided by
    the temperature. Each row is normalized over the tokens of its entry of ``support``; a row whose entry is empty, and
    every row without a support, over the vocabulary. Each chunk is recomputed in the backward pass, where the gradient
    of the logits is rounded to the type of the weights, for the products that follow. The entropy carries no gradient.

    Raises:
        ValueError: the support is that of other rows.
    """
    head = cast(Any, _Head)  # torch does not type `apply`
    tensors = hidden_ND, weight_VD, target_N, temperature_N
    return cast(tuple[Tensor, Tensor], head.apply(*tensors, cap, chunk_rows, aligned(support, target_N)))


def aligned(support: Support | None, target_N: Tensor) -> Support:
    """The support of the rows of these targets, which restricts none of them if there is none.

    Raises:
        ValueError: it has another number of rows, or a target is not among the tokens that could be drawn.
    """
    if support is None:
        return Support.unrestricted(len(target_N))
    if len(support) != len(target_N):
        raise ValueError(f"the support of {len(support)} rows was given for {len(target_N)} rows")
    targets = target_N.cpu().numpy()
    wrong = np.flatnonzero(~support.allows(targets))
    if len(wrong):
        raise ValueError(
            f"the support of {len(wrong)} of {len(support)} rows lacks their token, first that of row {wrong[0]} "
            f"(token {targets[wrong[0]]}): was it recorded for other rows?"
        )
    return support


class _Head(torch.autograd.Function):
    """``d log p(y) / dz = (onehot(y) - softmax(l)) / T * (1 - tanh(z / cap)^2)`` with ``l = cap tanh(z / cap) / T``.

    The softmax of a restricted row is over its support, and 0 for the other tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        cap: float | None,
        chunk_rows: int,
        support: Support,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, temperature_N)
        ctx.cap, ctx.chunk_rows, ctx.support = cap, chunk_rows, support
        logprob_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32) for _ in range(2))
        for rows in chunks(len(hidden_ND), chunk_rows):
            logits = soft_cap(float32_product(hidden_ND[rows], weight_VD.T), cap) / temperature_N[rows, None]
            logprobs = torch.log_softmax(_restricted(logits, support, rows), dim=-1)
            logprob_N[rows] = logprobs.gather(1, target_N[rows, None]).squeeze(1)
            entropy_N[rows] = -(logprobs.exp() * logprobs).sum(-1)
        ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, temperature_N = ctx.saved_tensors
        hidden_grad, weight_grad = torch.empty_like(hidden_ND), None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32)
        for rows in chunks(len(hidden_ND), ctx.chunk_rows):
            capped = soft_cap(float32_product(hidden_ND[rows], weight_VD.T), ctx.cap)
            scale = (grad_N[rows] / temperature_N[rows])[:, None]
            logits = _restricted(capped / temperature_N[rows, None], ctx.support, rows)
            grad = torch.softmax(logits, dim=-1).mul_(-scale)
            grad.scatter_add_(1, target_N[rows, None], scale)
            if ctx.cap is not None:
                grad.mul_(1 - (capped / ctx.cap).square_())
            grad = grad.to(weight_VD.dtype)
            hidden_grad[rows] = float32_product(grad, weight_VD).to(hidden_grad.dtype)
            if weight_grad is not None:
                weight_grad += float32_product(grad.T, hidden_ND[rows])
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


def _restricted(logits: Tensor, support: Support, rows: slice) -> Tensor:
    """Logits of some rows, those of tokens that could not be drawn as low as float32 goes.

    Their probability is exactly 0, and so is its product with their log-probability, unlike with minus infinity.
    """
    borders = support.borders[rows.start : rows.stop + 1]
    sizes = np.diff(borders)
    if not sizes.any():
        return logits
    ids = support.ids[borders[0] : borders[-1]].astype(np.int64)
    indices = (torch.from_numpy(index).to(logits.device) for index in (np.repeat(np.arange(len(sizes)), sizes), ids))
    allowed = torch.from_numpy(sizes == 0).to(logits.device)[:, None].repeat(1, logits.shape[1])
    allowed[tuple(indices)] = True
    return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)


def chunks(rows: int, chunk_rows: int) -> Iterator[slice]:
    """Rows in their order, up to ``chunk_rows`` at a time."""
    return (slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows))
