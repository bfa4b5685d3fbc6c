"""Log-probabilities over a vocabulary that is cut over tensor ranks, chunk by chunk: ``[N, V]`` never exists."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from beamline.policy.fused import fused
from beamline.policy.head import chunks, float32_product, soft_cap


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    cap: float,
    chunk_rows: int,
    ranks: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and entropy of its distribution, both ``[N]`` float32, on every rank.

    ``weight_VD`` are this rank's rows of the head: equal parts of the vocabulary, in the order of the ranks. The
    gradient of ``hidden_ND`` is this rank's part, to be summed over the ranks. Logits, cap and temperature as in
    :func:`beamline.policy.head.head_logprobs`; the entropy carries no gradient. The gradient of the logits is rounded
    to the type of the weights, for the products that follow.
    """
    head = cast(Any, _Head)  # torch does not type `apply`
    return cast(
        tuple[Tensor, Tensor], head.apply(hidden_ND, weight_VD, target_N, temperature_N, cap, chunk_rows, ranks)
    )


class _Head(torch.autograd.Function):
    """The softmax of a rank's tokens needs the largest logit of all ranks and the sum over them, and no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        cap: float,
        chunk_rows: int,
        ranks: ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        own_N1 = (target_N - ranks.rank() * len(weight_VD))[:, None]
        temperature_N1 = temperature_N[:, None]
        chosen_N, normalizer_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32) for _ in range(3))
        for rows in chunks(len(hidden_ND), chunk_rows):
            logits = float32_product(hidden_ND[rows], weight_VD.T)
            largest = _largest(logits, temperature_N1[rows], cap)
            _reduce(largest, ReduceOp.MAX, ranks)
            sums = _sums(logits, temperature_N1[rows], largest[:, None], own_N1[rows], cap)
            _reduce(sums, ReduceOp.SUM, ranks)
            log_sum = sums[0].log()
            chosen_N[rows] = sums[2] - log_sum
            entropy_N[rows] = log_sum - sums[1] / sums[0]
            normalizer_N[rows] = largest + log_sum
        ctx.save_for_backward(hidden_ND, weight_VD, own_N1, temperature_N1, normalizer_N)
        ctx.cap, ctx.chunk_rows = cap, chunk_rows
        ctx.mark_non_differentiable(entropy_N)
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, own_N1, temperature_N1, normalizer_N = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden_ND)
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(hidden_ND), ctx.chunk_rows):
            logits = float32_product(hidden_ND[rows], weight_VD.T)
            by_row = temperature_N1[rows], normalizer_N[rows, None], grad_N[rows, None], own_N1[rows]
            grad = _logits_grad(logits, *by_row, ctx.cap, weight_VD.dtype)
            hidden_grad[rows] = float32_product(grad, weight_VD).to(hidden_grad.dtype)
            if weight_grad is not None:
                weight_grad += float32_product(grad.T, hidden_ND[rows])
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


@fused()
def _largest(logits_NV: Tensor, temperature_N1: Tensor, cap: float) -> Tensor:
    return (soft_cap(logits_NV, cap) / temperature_N1).amax(dim=-1)


@fused()
def _sums(logits_NV: Tensor, temperature_N1: Tensor, largest_N1: Tensor, own_N1: Tensor, cap: float) -> Tensor:
    """Of each row the sum of ``e^l``, that of ``l e^l``, and l of the target, with l less the largest one, ``[3, N]``.

    Targets of other ranks count 0.
    """
    shifted = soft_cap(logits_NV, cap) / temperature_N1 - largest_N1
    weights = shifted.exp()
    return torch.stack(
        [weights.sum(-1), (weights * shifted).sum(-1), torch.where(_at(own_N1, shifted), shifted, 0).sum(-1)]
    )


@fused()
def _logits_grad(
    logits_NV: Tensor,
    temperature_N1: Tensor,
    normalizer_N1: Tensor,
    grad_N1: Tensor,
    own_N1: Tensor,
    cap: float,
    dtype: torch.dtype,
) -> Tensor:
    """``grad / T * (onehot(y) - softmax(l)) * (1 - (c / cap)^2)`` with ``c = cap tanh(z / cap)`` and ``l = c / T``."""
    capped = soft_cap(logits_NV, cap)
    weights = (capped / temperature_N1 - normalizer_N1).exp()
    slope = 1 - (capped / cap).square()
    return ((_at(own_N1, capped).float() - weights) * (grad_N1 / temperature_N1) * slope).to(dtype)


def _at(own_N1: Tensor, like_NV: Tensor) -> Tensor:
    """Where the target of each row stands, if it is one of this rank's."""
    return torch.arange(like_NV.shape[1], device=like_NV.device) == own_N1


def _reduce(x: Tensor, how: Any, ranks: ProcessGroup) -> None:
    if ranks.size() > 1:  # else NCCL would be started, and its kernels, for nothing
        all_reduce(x, how, ranks)
