"""The module's forward pass on the sampler's kernels, with gradients.

Every value is computed by the operations, in the order, that the sampler uses, so log-probabilities of the same weights
have the same bits in both engines. It is also the faster path: norms, gates and SwiGLU are fused into passes over rows
that stay in a core's cache. Gradients come from kernels of their own and, where sums go over all rows, from torch's
matrix products. A CPU and float32 are required.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from beamline.kernels import attention as attention_kernels
from beamline.kernels import experts, gradients, linear, rows, vocabulary
from beamline.kernels.parallel import over_items, over_rows
from beamline.policy.attention import Packing
from beamline.policy.head import aligned
from beamline.policy.positions import Floats, position_tables, rope_theta
from beamline.records import Support

T = TypeVar("T")

_ROWS = 512  # of a chunk: enough work for a call, and activations that stay in a core's cache


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the rows of a packed batch stand."""

    positions_N: NDArray[np.int64]
    spans: tuple[tuple[int, int], ...]  # first and last row of each sequence, the last not included
    tables: tuple[Floats, Floats, Floats]


class _Heads(NamedTuple):
    """How a row of fused projections ``[q | k | v | gate]`` is divided."""

    heads: int
    kv_heads: int
    group: int  # query heads that share a key head
    size: int
    q_width: int
    kv_width: int
    v_first: int
    gate_first: int


def _heads(config: Any) -> _Heads:
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, kv = heads * size, kv_heads * size
    return _Heads(heads, kv_heads, heads // kv_heads, size, q, kv, q + kv, q + 2 * kv)


def check(module: nn.Module) -> None:
    """Make sure that the kernels can evaluate a module.

    Raises:
        ValueError: a weight is not float32 on a CPU.
    """
    for name, weight in module.named_parameters():
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(
                f"policy.parity=true needs a float32 model on a CPU, and {name} is {weight.dtype} on {weight.device}; "
                "use policy.parity=false"
            )


def hidden_states(module: nn.Module, input_ids_N: Tensor, position_ids_N: Tensor, packing: Packing) -> Tensor:
    """Last hidden states ``[N, D]`` (after the final norm) of packed sequences; see :func:`model.hidden_states`."""
    config, model = cast(Any, module).config, cast(Any, module).model
    tables = _tables(config.head_dim, rope_theta(config), int(position_ids_N.max()) + 1)
    packed = Packed(position_ids_N.numpy(), tuple(pairwise(packing.borders)), tables)
    h = F.embedding(input_ids_N, model.embed_tokens.weight)
    for layer, kind in zip(model.layers, config.layer_types, strict=True):
        run = partial(_layer, layer, config, kind == "sliding_attention", packed)
        recompute = layer.gradient_checkpointing and layer.training
        h = checkpoint(run, h, use_reentrant=False) if recompute else run(h)
    return _norm(h, model.norm)


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    cap: float,
    chunk_rows: int,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and entropy of its distribution; see :func:`head.head_logprobs`."""
    tensors = hidden_ND, weight_VD, target_N, temperature_N
    return cast(tuple[Tensor, Tensor], _apply(_Head, *tensors, cap, chunk_rows, aligned(support, target_N)))


@lru_cache(maxsize=4)
def _tables(head_dim: int, theta: float, positions: int) -> tuple[Floats, Floats, Floats]:
    return position_tables(head_dim, theta, positions)


def _layer(layer: Any, config: Any, sliding: bool, packed: Packed, h: Tensor) -> Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    x = _norm(h, layer.input_layernorm)
    qkvg = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight,
                      attention.gate_proj.weight])  # fmt: skip
    a = _apply(_Attention, x, qkvg, attention.q_norm.weight, attention.k_norm.weight, attention.gate_bias,
               attention.o_proj.weight, config, sliding, packed)  # fmt: skip
    h = _normed_residual(a, layer.post_attention_layernorm, h, layer.attn_residual_add_idx)
    x = _norm(h, layer.pre_feedforward_layernorm)
    if hasattr(mlp, "experts"):
        y = _apply(_SparseMlp, x, mlp.gate.weight, mlp.gate.e_score_correction_bias, mlp.experts.gate_up_proj,
                   mlp.experts.down_proj, config)  # fmt: skip
    else:
        y = _apply(_DenseMlp, x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), mlp.down_proj.weight)
    return _normed_residual(y, layer.post_feedforward_layernorm, h, layer.mlp_residual_add_idx)


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)  # torch does not type it


def _norm(x: Tensor, norm: Any) -> Tensor:
    return cast(Tensor, _apply(_Norm, x, norm.weight, norm.variance_epsilon))


def _normed_residual(x: Tensor, norm: Any, h: Tensor, n: int) -> Tensor:
    return cast(Tensor, _apply(_NormedResidual, x, norm.weight, norm.variance_epsilon, h, n))


def _array(tensor: Tensor) -> Floats:
    return cast(Floats, tensor.detach().contiguous().numpy())


def _over_rows(count: int, work: Callable[[int, int], T], chunk: int | None = None) -> list[T]:
    """``work(start, stop)`` for chunks of rows."""
    return over_rows(count, torch.get_num_threads(), work, chunk or _ROWS)


def _new(*size: int) -> Floats:
    return np.empty(size, np.float32)


def _sum(parts: list[Floats]) -> Tensor:
    return torch.from_numpy(np.sum(parts, axis=0, dtype=np.float32))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        source, w, out = _array(x), _array(weight), _new(*x.shape)
        _over_rows(len(out), lambda a, b: rows.rms_norm(source[a:b], w, 0, eps, out[a:b], False))
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_norm_gradient(x, weight, ctx.eps, 1.0, dy), None


def _norm_gradient(x: Tensor, weight: Tensor, eps: float, factor: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    source, w, given, dx = _array(x), _array(weight), _array(dy), _new(*x.shape)

    def work(a: int, b: int) -> Floats:
        dweight = np.zeros_like(w)
        gradients.rms_norm_gradient(source[a:b], w, eps, factor, given[a:b], dx[a:b], dweight)
        return dweight

    return torch.from_numpy(dx), _sum(_over_rows(len(dx), work))


class _NormedResidual(torch.autograd.Function):
    """``rms_norm(x) / sqrt(n) + h * sqrt((n - 1) / n)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, h: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.n = eps, n
        source, w, out = _array(x), _array(weight), _array(h).copy()

        def work(a: int, b: int) -> None:
            normed = _new(b - a, x.shape[1])
            rows.rms_norm(source[a:b], w, 0, eps, normed, False)
            rows.add_residual(normed, n, out[a:b], False)

        _over_rows(len(out), work)
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = _norm_gradient(x, weight, ctx.eps, ctx.n**-0.5, dy)
        return dx, dweight, None, dy * ((ctx.n - 1) / ctx.n) ** 0.5, None


class _Attention(torch.autograd.Function):
    """From the normed input ``[N, D]`` to the output projection: heads, attention, gate."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, qkvg_weight: Tensor, q_norm: Tensor, k_norm: Tensor, gate_bias: Tensor,
        o_weight: Tensor, config: Any, sliding: bool, packed: Packed,
    ) -> Tensor:  # fmt: skip
        N, eps, heads = len(x), config.rms_norm_eps, _heads(config)
        source, qw, kw, bias = _array(x), _array(q_norm), _array(k_norm), _array(gate_bias)
        w, o = _array(qkvg_weight.T), _array(o_weight.T)
        qkvg, q, k, attended, gated = (
            _new(N, n) for n in (w.shape[1], heads.q_width, heads.kv_width, heads.q_width, heads.q_width)
        )
        out, positions = _new(N, o.shape[1]), packed.positions_N

        def project(a: int, b: int) -> None:
            linear.multiply(source[a:b], w, qkvg[a:b])
            for first, count, weight, query, turned in (
                (0, heads.heads, qw, True, q), (heads.q_width, heads.kv_heads, kw, False, k),
            ):  # fmt: skip
                rows.turn_heads(qkvg[a:b], first, count, weight, eps, positions[a:b], *packed.tables, sliding, query,
                                turned[a:b], False)  # fmt: skip

        def close(a: int, b: int) -> None:
            rows.open_gate(attended[a:b], qkvg[a:b], heads.gate_first, bias, gated[a:b], False)
            linear.multiply(gated[a:b], o, out[a:b])

        _over_rows(N, project)
        window = _window(config, sliding, packed)
        _attend(q, k, qkvg, attended, packed, window, heads)
        _over_rows(N, close)
        ctx.save_for_backward(x, qkvg_weight, q_norm, k_norm, gate_bias, o_weight,
                              *map(torch.from_numpy, (qkvg, q, k, attended, gated)))  # fmt: skip
        ctx.config, ctx.sliding, ctx.packed, ctx.window = config, sliding, packed, window
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, qkvg_weight, q_norm, k_norm, gate_bias, o_weight, *held = ctx.saved_tensors
        qkvg, q, k, attended, gated = (tensor.numpy() for tensor in held)
        config, sliding, window = ctx.config, ctx.sliding, ctx.window
        packed: Packed = ctx.packed
        heads, eps, positions = _heads(config), config.rms_norm_eps, packed.positions_N
        qw, kw, bias = _array(q_norm), _array(k_norm), _array(gate_bias)
        dgated, dqkvg, dattended = _array(dy @ o_weight), _new(*qkvg.shape), _new(*attended.shape)

        def reopen(a: int, b: int) -> Floats:
            dbias = np.zeros_like(bias)
            gradients.open_gate_gradient(attended[a:b], qkvg[a:b], heads.gate_first, bias, dgated[a:b],
                                         dattended[a:b], dqkvg[a:b], dbias)  # fmt: skip
            return dbias

        dbias = _sum(_over_rows(len(dy), reopen))
        dq, dk = _new(*q.shape), np.zeros_like(k)

        def attend_back(span: tuple[int, int]) -> None:
            part = slice(*span)
            gradients.attend_gradient(q[part], k[part], qkvg[part], heads.v_first, attended[part], dattended[part],
                                      window, heads.kv_heads, heads.group, heads.size, dq[part], dk[part],
                                      dqkvg[part])  # fmt: skip

        over_items(packed.spans, torch.get_num_threads(), attend_back)

        def turn_back(a: int, b: int) -> tuple[Floats, Floats]:
            dqw, dkw = np.zeros_like(qw), np.zeros_like(kw)
            for first, count, weight, query, given, to in (
                (0, heads.heads, qw, True, dq, dqw), (heads.q_width, heads.kv_heads, kw, False, dk, dkw),
            ):  # fmt: skip
                gradients.turn_heads_gradient(qkvg[a:b], first, count, weight, eps, positions[a:b], *packed.tables,
                                              sliding, query, given[a:b], dqkvg[a:b], to)  # fmt: skip
            return dqw, dkw

        dqw, dkw = zip(*_over_rows(len(dy), turn_back), strict=True)
        d = torch.from_numpy(dqkvg)
        weights = d.T @ x, _sum(list(dqw)), _sum(list(dkw)), dbias, dy.T @ torch.from_numpy(gated)
        return d @ qkvg_weight, *weights, None, None, None


def _window(config: Any, sliding: bool, packed: Packed) -> int:
    """Positions that a query sees at most, itself included; in a full layer all that there are."""
    return int(config.sliding_window) if sliding else len(packed.tables[0])


def _attend(q: Floats, k: Floats, qkvg: Floats, out: Floats, packed: Packed, window: int, heads: _Heads) -> None:
    """Each sequence through the sampler's attention, as if it had a cache of its own without a ring."""
    kv_heads, size = heads.kv_heads, heads.size

    def work(span: tuple[int, int]) -> None:
        a, b = span
        places = attention_kernels.whole_blocks(b - a)
        keys, values = _new(kv_heads * size * places), _new(kv_heads * size * places)
        scores = _new(2 * heads.group * places)
        slots, positions = np.zeros(b - a, np.int64), packed.positions_N[a:b]
        attention_kernels.store(keys, values, 0, places, k[a:b], qkvg[a:b], heads.v_first, slots, positions,
                                kv_heads, size)  # fmt: skip
        attention_kernels.attend(q[a:b], keys, values, 0, places, window, slots, positions, kv_heads, heads.group, size,
                                 scores, out[a:b], False)  # fmt: skip

    over_items(packed.spans, torch.get_num_threads(), work)


class _DenseMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        source, w, d = _array(x), _array(gate_up.T), _array(down.T)
        wide, inner, out = _new(len(x), w.shape[1]), _new(len(x), len(d)), _new(len(x), d.shape[1])

        def work(a: int, b: int) -> None:
            linear.multiply(source[a:b], w, wide[a:b])
            rows.swiglu(wide[a:b], inner[a:b], False)
            linear.multiply(inner[a:b], d, out[a:b])

        _over_rows(len(x), work)
        ctx.save_for_backward(x, gate_up, down, torch.from_numpy(wide), torch.from_numpy(inner))
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, gate_up, down, wide, inner = ctx.saved_tensors
        dwide = _swiglu_gradient(wide.numpy(), _array(dy @ down))
        return dwide @ gate_up, dwide.T @ x, dy.T @ inner


def _swiglu_gradient(wide: Floats, dinner: Floats) -> Tensor:
    dwide = _new(*wide.shape)
    _over_rows(len(wide), lambda a, b: gradients.swiglu_gradient(wide[a:b], dinner[a:b], dwide[a:b]))
    return torch.from_numpy(dwide)


class _SparseMlp(torch.autograd.Function):
    """Router, the chosen experts, and their weighted sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor, router_bias: Tensor, gate_up: Tensor, down: Tensor, config: Any
    ) -> Tensor:
        N, D = x.shape
        E, K, I = len(router), config.num_experts_per_tok, down.shape[2]  # noqa: E741
        source, r, bias = _array(x), _array(router.T), _array(router_bias)
        scores, weights, chosen = _new(N, E), _new(N, K), np.empty((N, K), np.int64)
        ends, order, place = np.empty(E, np.int64), np.empty(N * K, np.int64), np.empty(N * K, np.int64)

        def route(a: int, b: int) -> None:
            linear.multiply(source[a:b], r, scores[a:b])
            experts.choose(scores[a:b], bias, config.n_group, config.topk_group, config.norm_topk_prob, chosen[a:b],
                           weights[a:b])  # fmt: skip

        _over_rows(N, route)
        experts.sort_by_expert(chosen, ends, order)
        experts.invert(order, place)
        w, d = _array(gate_up.transpose(1, 2)).reshape(-1), _array(down.transpose(1, 2)).reshape(-1)
        wide, inner, outer, out = _new(N * K, 2 * I), _new(N * K, I), _new(N * K, D), _new(N, D)

        def multiply(a: int, b: int) -> None:
            experts.expert_products(source, K, w, 0, d, 0, ends, order, _new(b - a, D), wide, inner, outer, a, b, False)

        _over_rows(N * K, multiply, 2 * _ROWS)
        factor = float(config.routed_scaling_factor)
        _over_rows(
            N, lambda a, b: experts.gather_experts(outer, place[a * K : b * K], weights[a:b], factor, out[a:b], False)
        )
        held = scores, chosen, weights, ends, order, place, wide, inner, outer
        ctx.save_for_backward(x, router, gate_up, down, *map(torch.from_numpy, held))
        ctx.config = config
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, router, gate_up, down, *held = ctx.saved_tensors
        scores, chosen, weights, ends, order, place, wide, inner, outer = (tensor.numpy() for tensor in held)
        (N, D), K, factor = x.shape, chosen.shape[1], float(ctx.config.routed_scaling_factor)
        given, douter, dweights = _array(dy), _new(N * K, D), _new(N, K)
        _over_rows(
            N * K,
            lambda a, b: gradients.spread_to_experts(given, order, weights, factor, outer, douter, dweights, a, b),
            2 * _ROWS,
        )
        offsets, d = torch.from_numpy(ends.astype(np.int32)), torch.from_numpy(douter)
        dwide = _swiglu_gradient(wide, _array(F.grouped_mm(d, down, offs=offsets)))
        drows, dx, dlogits = _array(F.grouped_mm(dwide, gate_up, offs=offsets)), _new(N, D), _new(*scores.shape)
        normalize = ctx.config.norm_topk_prob

        def gather(a: int, b: int) -> None:
            gradients.gather_rows(drows, place[a * K : b * K], K, dx[a:b])
            gradients.weigh_gradient(scores[a:b], chosen[a:b], weights[a:b], normalize, dweights[a:b], dlogits[a:b])

        _over_rows(N, gather)
        rows_of_choices = x.index_select(0, torch.from_numpy(order) // K)
        dgate_up = F.grouped_mm(dwide.T, rows_of_choices, offs=offsets)
        ddown = F.grouped_mm(d.T, torch.from_numpy(inner), offs=offsets)
        to_router = torch.from_numpy(dlogits)
        return torch.from_numpy(dx).addmm_(to_router, router), to_router.T @ x, None, dgate_up, ddown, None


class _Head(torch.autograd.Function):
    """Logits of a chunk of rows at a time, computed again in the backward pass: ``[N, V]`` never exists."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature_N: Tensor, cap: float,
        chunk_rows: int, support: Support,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, temperature_N)
        ctx.cap, ctx.chunk_rows, ctx.support = cap, chunk_rows, support
        hidden, w, targets, temperature = (_array(x) for x in (hidden_ND, weight_VD.T, target_N, temperature_N))
        N, V = len(hidden), w.shape[1]
        logprobs, entropies = _new(N), _new(N)

        def work(a: int, b: int) -> None:
            logits = _new(b - a, V)
            linear.multiply(hidden[a:b], w, logits)
            vocabulary.soft_cap(logits.reshape(-1), cap)
            vocabulary.score_rows(logits, targets[a:b], temperature[a:b], support.ids, support.borders[a : b + 1],
                                  _new(V), logprobs[a:b], entropies[a:b])  # fmt: skip

        _over_rows(N, work, min(chunk_rows, _ROWS))
        entropy_N = torch.from_numpy(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return torch.from_numpy(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, temperature_N = ctx.saved_tensors
        hidden, w, targets, temperature, grad = (
            _array(x) for x in (hidden_ND, weight_VD.T, target_N, temperature_N, grad_N)
        )
        hidden_grad, weight_grad = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
        ids, borders = ctx.support.ids, ctx.support.borders
        for start in range(0, len(hidden), ctx.chunk_rows):
            part, ends = slice(start, start + ctx.chunk_rows), slice(start, start + ctx.chunk_rows + 1)
            logits = _logit_gradient(
                hidden[part], w, ctx.cap, targets[part], temperature[part], ids, borders[ends], grad[part]
            )
            hidden_grad[part] = logits @ weight_VD
            weight_grad += logits.T @ hidden_ND[part]
        return hidden_grad, weight_grad, None, None, None, None, None


def _logit_gradient(
    hidden: Floats, w: Floats, cap: float, targets: NDArray[Any], temperature: Floats, ids: NDArray[np.int32],
    borders: NDArray[np.int64], grad: Floats,
) -> Tensor:  # fmt: skip
    logits = _new(len(hidden), w.shape[1])

    def work(a: int, b: int) -> None:
        linear.multiply(hidden[a:b], w, logits[a:b])
        gradients.score_rows_gradient(logits[a:b], cap, targets[a:b], temperature[a:b], ids, borders[a : b + 1],
                                      grad[a:b])  # fmt: skip

    _over_rows(len(hidden), work)
    return torch.from_numpy(logits)
