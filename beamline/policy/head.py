"""Log-probabilities and entropy from hidden states, chunk by chunk: ``[N, V]`` never exists."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)`` in float32, as the Hugging Face module computes it."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    cap: float | None,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and entropy of its distribution, both ``[N]`` float32.

    Logits come from the given precision with float32 output, are never rounded, then soft-capped, then divided by
    the temperature. Each chunk is recomputed in the backward pass. The entropy carries no gradient.
    """
    head = cast(Any, _Head)  # torch does not type `apply`
    return cast(tuple[Tensor, Tensor], head.apply(hidden_ND, weight_VD, target_N, temperature_N, cap, chunk_rows))


class _Head(torch.autograd.Function):
    """``d log p(y) / dz = (onehot(y) - softmax(l)) / T * (1 - tanh(z / cap)^2)`` with ``l = cap tanh(z / cap) / T``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        cap: float | None,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, temperature_N)
        ctx.cap, ctx.chunk_rows = cap, chunk_rows
        logprob_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32) for _ in range(2))
        for rows in _chunks(len(hidden_ND), chunk_rows):
            logits = soft_cap(hidden_ND[rows].float() @ weight_VD.float().T, cap) / temperature_N[rows, None]
            logprobs = torch.log_softmax(logits, dim=-1)
            logprob_N[rows] = logprobs.gather(1, target_N[rows, None]).squeeze(1)
            entropy_N[rows] = -(logprobs.exp() * logprobs).sum(-1)
        ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, temperature_N = ctx.saved_tensors
        hidden_grad, weight_grad = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
        for rows in _chunks(len(hidden_ND), ctx.chunk_rows):
            hidden, weight = hidden_ND[rows].float(), weight_VD.float()
            capped = soft_cap(hidden @ weight.T, ctx.cap)
            scale = (grad_N[rows] / temperature_N[rows])[:, None]
            grad = torch.softmax(capped / temperature_N[rows, None], dim=-1).mul_(-scale)
            grad.scatter_add_(1, target_N[rows, None], scale)
            if ctx.cap is not None:
                grad.mul_(1 - (capped / ctx.cap).square_())
            hidden_grad[rows] = grad @ weight
            weight_grad += grad.T @ hidden
        return hidden_grad, weight_grad.to(weight_VD.dtype), None, None, None, None


def _chunks(rows: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows))
