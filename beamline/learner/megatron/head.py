"""Log-probabilities over a vocabulary that is cut over tensor ranks, chunk by chunk: ``[N, V]`` never exists."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

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
        own_N = target_N - ranks.rank() * len(weight_VD)
        chosen_N, normalizer_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32) for _ in range(3))
        for rows in chunks(len(hidden_ND), chunk_rows):
            logits = soft_cap(float32_product(hidden_ND[rows], weight_VD.T), cap) / temperature_N[rows, None]
            largest = logits.amax(dim=-1)
            all_reduce(largest, ReduceOp.MAX, ranks)
            shifted = logits - largest[:, None]
            weights = shifted.exp()
            mine = (own_N[rows] >= 0) & (own_N[rows] < len(weight_VD))
            target = shifted.gather(1, own_N[rows].clamp(0, len(weight_VD) - 1)[:, None]).squeeze(1)
            sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), target.where(mine, 0.0)])
            all_reduce(sums, ReduceOp.SUM, ranks)
            log_sum = sums[0].log()
            chosen_N[rows] = sums[2] - log_sum
            entropy_N[rows] = log_sum - sums[1] / sums[0]
            normalizer_N[rows] = largest + log_sum
        ctx.save_for_backward(hidden_ND, weight_VD, own_N, temperature_N, normalizer_N)
        ctx.cap, ctx.chunk_rows = cap, chunk_rows
        ctx.mark_non_differentiable(entropy_N)
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, own_N, temperature_N, normalizer_N = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden_ND)
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(hidden_ND), ctx.chunk_rows):
            capped = soft_cap(float32_product(hidden_ND[rows], weight_VD.T), ctx.cap)
            scale = grad_N[rows] / temperature_N[rows]
            grad = (capped / temperature_N[rows, None] - normalizer_N[rows, None]).exp_().mul_(-scale[:, None])
            mine = (own_N[rows] >= 0) & (own_N[rows] < len(weight_VD))
            grad.scatter_add_(1, own_N[rows].clamp(0, len(weight_VD) - 1)[:, None], (scale * mine)[:, None])
            grad.mul_(1 - (capped / ctx.cap).square_())
            grad = grad.to(weight_VD.dtype)
            hidden_grad[rows] = float32_product(grad, weight_VD).to(hidden_grad.dtype)
            if weight_grad is not None:
                weight_grad += float32_product(grad.T, hidden_ND[rows])
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None
