"""What is computed between the matrices of a layer: each function is one pass over memory on a GPU.

Values are rounded where the module of transformers rounds them.
"""

import math
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.beam.modeling_beam import apply_rotary_pos_emb

from beamline.policy.fused import fused


@fused("weight_D")
def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root mean square norm of rows ``[..., D]``, as ``BeamRMSNorm``."""
    return _norm(x, weight_D, eps)


@cache
def residual_shares(add: int, device: torch.device) -> Tensor:
    """What the ``add``-th residual sum takes of what is added and of what was there, as ``depth_scaled_residual_add``.

    A tensor, because kernels are made for each value of a number.
    """
    return torch.tensor([1 / math.sqrt(add), math.sqrt((add - 1) / add)], device=device)


@fused("weight_D", "shares_2")
def normed_sum(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, shares_2: Tensor) -> Tensor:
    """``shares[0] * norm(x) + shares[1] * residual``."""
    of_x, of_residual = (
        each.float() * share for each, share in zip((_norm(x, weight_D, eps), residual), shares_2, strict=True)
    )
    added: Tensor = of_x.to(x.dtype) + of_residual.to(x.dtype)
    return added


@fused("q_weight_d", "k_weight_d")
def rotated(
    query_NHd: Tensor,
    key_NGd: Tensor,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    eps: float,
    cos_Nd: Tensor,
    sin_Nd: Tensor,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed for each head and turned by their positions."""
    query, key = _norm(query_NHd, q_weight_d, eps), _norm(key_NGd, k_weight_d, eps)
    turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, cos_Nd, sin_Nd)
    return turned


@fused("q_weight_d", "k_weight_d")
def scaled(
    query_NHd: Tensor, key_NGd: Tensor, q_weight_d: Tensor, k_weight_d: Tensor, eps: float, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed for each head, the queries scaled by their positions."""
    query, key = _norm(query_NHd, q_weight_d, eps), _norm(key_NGd, k_weight_d, eps)
    return (query.float() * scale_N[:, None, None]).to(query.dtype), key


@fused("bias_H")
def gated(x_NHd: Tensor, gate_NHd: Tensor, bias_H: Tensor) -> Tensor:
    """``x * sigmoid(gate + bias)``, with a bias for each head."""
    return x_NHd * torch.sigmoid(gate_NHd + bias_H[:, None])


@fused()
def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows ``[gate | up]``, in float32 and rounded once."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def inverse(order: Tensor) -> Tensor:
    """The place of each row in an order of all of them."""
    if order.is_cuda and len(order):
        from beamline.policy.gpu import inverse as on_gpu

        return on_gpu(order)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def gather(x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
    """Row ``index[j]`` of x for each j. Each row is taken ``copies`` times; ``back`` says where each copy went.

    The gradients of copies are added in their order, in float32, and rounded once.
    """
    return cast(Tensor, cast(Any, _Gather).apply(x, index, back, copies))


def mixed(outer: Tensor, weights_NK: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """``sum_k weights[n, k] * outer[back[n K + k]]``, ``[N, D]``, summed in float32 and rounded once.

    ``order`` is the inverse of ``back``.
    """
    return cast(Tensor, cast(Any, _Mixed).apply(outer, weights_NK, order, back))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        gathered = grad.index_select(0, back) if ctx.copies == 1 else _gathered_sum(back.view(-1, ctx.copies), grad)
        return gathered, None, None, None


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outer: Tensor, weights_NK: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(outer, weights_NK, order, back)
        return _weighted_sum(weights_NK, back.view(weights_NK.shape), outer)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        outer, weights_NK, order, back = ctx.saved_tensors
        weights_grad = _products(grad_ND, back.view(weights_NK.shape), outer)
        return _weighted_copies(order, grad_ND, weights_NK), weights_grad, None, None


@fused()
def _gathered_sum(back_NK: Tensor, rows: Tensor) -> Tensor:
    total = rows[back_NK[:, 0]].float()
    for k in range(1, back_NK.shape[1]):  # written out, because kernels read a row at a time so, and sums over k do not
        total = total + rows[back_NK[:, k]].float()
    return total.to(rows.dtype)


@fused()
def _weighted_sum(weights_NK: Tensor, back_NK: Tensor, outer: Tensor) -> Tensor:
    total = outer[back_NK[:, 0]] * weights_NK[:, :1]
    for k in range(1, back_NK.shape[1]):
        total = total + outer[back_NK[:, k]] * weights_NK[:, k, None]
    return total.to(outer.dtype)


@fused()
def _products(grad_ND: Tensor, back_NK: Tensor, outer: Tensor) -> Tensor:
    return (grad_ND[:, None].float() * outer[back_NK].float()).sum(dim=-1)


@fused()
def _weighted_copies(order: Tensor, grad_ND: Tensor, weights_NK: Tensor) -> Tensor:
    weight = weights_NK.reshape(-1)[order, None]
    return (grad_ND[order // weights_NK.shape[1]] * weight).to(grad_ND.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
