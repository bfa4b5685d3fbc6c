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
from beamline.kernels import experts, gradients, layers, linear, rows, vocabulary
from beamline.kernels.parallel import over_items, over_rows
from beamline.policy.attention import Packing
from beamline.policy.head import aligned
from beamline.policy.lora import Adapter, Adapters
from beamline.policy.positions import Floats, position_tables, rope_theta
from beamline.records import Support

T = TypeVar("T")

_NOWHERE = np.empty(0, np.int64)
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


def hidden_states(
    module: nn.Module,
    input_ids_N: Tensor,
    position_ids_N: Tensor,
    packing: Packing,
    adapters: Adapters | None = None,
    routes_NLK: NDArray[np.unsignedinteger] | None = None,
) -> Tensor:
    """Last hidden states ``[N, D]`` (after the final norm) of packed sequences; see :func:`model.hidden_states`."""
    config, model = cast(Any, module).config, cast(Any, module).model
    tables = _tables(config.head_dim, rope_theta(config), int(position_ids_N.max()) + 1)
    packed = Packed(position_ids_N.numpy(), tuple(pairwise(packing.borders)), tables)
    h, moe_layers = F.embedding(input_ids_N, model.embed_tokens.weight), 0
    for index, (layer, kind) in enumerate(zip(model.layers, config.layer_types, strict=True)):
        routes_NK = None
        if hasattr(layer.mlp, "experts"):
            routes_NK = None if routes_NLK is None else routes_NLK[:, moe_layers]
            moe_layers += 1
        adapter = partial(_adapter, adapters, f"model.layers.{index}")
        run = partial(_layer, layer, config, kind == "sliding_attention", packed, adapter, routes_NK)
        recompute = layer.gradient_checkpointing and layer.training
        h = checkpoint(run, h, use_reentrant=False) if recompute else run(h)
    return _norm(h, model.norm)


def _adapter(adapters: Adapters | None, layer: str, part: str, projection: str) -> Adapter | None:
    return None if adapters is None else adapters.at(f"{layer}.{part}", projection)


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


def _layer(
    layer: Any, config: Any, sliding: bool, packed: Packed, adapter: Callable[[str, str], Adapter | None],
    routes_NK: NDArray[np.unsignedinteger] | None, h: Tensor,
) -> Tensor:  # fmt: skip
    attention, mlp = layer.self_attn, layer.mlp
    x = _norm(h, layer.input_layernorm)
    weights = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.gate_proj.weight)
    qkvg = _linear(x, torch.cat(weights), adapter("self_attn", "q_proj"))
    gated = _apply(_Attention, qkvg, attention.q_norm.weight, attention.k_norm.weight, attention.gate_bias, config,
                   sliding, packed)  # fmt: skip
    a = _linear(gated, attention.o_proj.weight, adapter("self_attn", "o_proj"))
    h = _normed_residual(a, layer.post_attention_layernorm, h, layer.attn_residual_add_idx)
    x = _norm(h, layer.pre_feedforward_layernorm)
    if hasattr(mlp, "experts"):
        y = _sparse_mlp(x, mlp, config, partial(adapter, "mlp.experts"), routes_NK)
    else:
        wide = _linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), adapter("mlp", "gate_proj"))
        y = _linear(_apply(_Swiglu, wide), mlp.down_proj.weight, adapter("mlp", "down_proj"))
    return _normed_residual(y, layer.post_feedforward_layernorm, h, layer.mlp_residual_add_idx)


def _sparse_mlp(
    x: Tensor, mlp: Any, config: Any, adapter: Callable[[str], Adapter | None],
    routes_NK: NDArray[np.unsignedinteger] | None,
) -> Tensor:  # fmt: skip
    """Router, the chosen experts, and their weighted sum."""
    weights, chosen = _apply(_Route, x, mlp.gate.weight, mlp.gate.e_score_correction_bias, config, routes_NK)
    ends, order = np.empty(len(mlp.gate.weight), np.int64), np.empty(chosen.numel(), np.int64)
    experts.sort_by_expert(chosen.numpy(), ends, order)
    place = np.empty_like(order)
    experts.invert(order, place)
    K = chosen.shape[1]
    wide = _linear(x, mlp.experts.gate_up_proj, adapter("gate_proj"), _Groups(ends, order, place, K))
    outer = _linear(_apply(_Swiglu, wide), mlp.experts.down_proj, adapter("down_proj"), _Groups(ends))
    return cast(Tensor, _apply(_Mix, outer, weights, order, place, float(config.routed_scaling_factor)))


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


class _Groups(NamedTuple):
    """The rows of a linear layer: group g ends before row ``ends[g]``.

    Row p is made from input ``order[p] // choices``, and the rows of input i stand at ``place[i * choices:]``; where
    ``order`` is empty, from input p.
    """

    ends: NDArray[np.int64]
    order: NDArray[np.int64] = _NOWHERE
    place: NDArray[np.int64] = _NOWHERE
    choices: int = 1


def _linear(x: Tensor, weight: Tensor, adapter: Adapter | None, groups: _Groups | None = None) -> Tensor:
    """A linear layer with its adapter: one weight ``[out, in]``, or ``[groups, out, in]``."""
    if groups is None:
        weight, groups = weight[None], _Groups(np.full(1, len(x)))
    a, b, scale = (None, None, 1.0) if adapter is None else (adapter.a, adapter.b, adapter.scale)
    return cast(Tensor, _apply(_Linear, x, weight, a, b, scale, groups))


class _Linear(torch.autograd.Function):
    """``y = x W^T + scale (x A^T) B^T`` for each group of rows; only gradients that are asked for are computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float, groups: _Groups
    ) -> Tensor:
        ends, order, _, choices = groups
        source, w, rows, depth = _array(x), _array(weight.transpose(1, 2)).reshape(-1), int(ends[-1]), x.shape[1]
        at, bt, sets = np.empty(0, np.float32), np.empty(0, np.float32), 1
        out, z = _new(rows, weight.shape[1]), _new(rows, 0 if a is None else a.shape[1])
        if a is not None and b is not None:
            at, bt, sets = _array(a.transpose(1, 2)).reshape(-1), _array(b.transpose(1, 2)).reshape(-1), len(a)

        def work(first: int, last: int) -> None:
            scratch = _new(last - first if len(order) else 0, depth)
            layers.grouped_linear(source, order, choices, w, 0, ends, at, 0, bt, 0, sets, np.float32(scale), out, z,
                                  scratch, first, last, False)  # fmt: skip

        _over_rows(rows, work, 2 * _ROWS if len(ends) > 1 else _ROWS)
        ctx.save_for_backward(x, weight, a, b, torch.from_numpy(z))
        ctx.scale, ctx.groups = scale, groups
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, z = ctx.saved_tensors
        groups: _Groups = ctx.groups
        to_x, to_weight, *_ = ctx.needs_input_grad
        dweight = da = db = dz = dx = None
        if a is not None:
            dz = _times(dy, b, groups.ends) * ctx.scale
            db = _outer(dy, z, groups.ends, len(b))
        if to_weight or a is not None:
            of_rows = x.index_select(0, torch.from_numpy(groups.order) // groups.choices) if len(groups.order) else x
            dweight = _outer(dy, of_rows, groups.ends, len(weight)) if to_weight else None
            da = None if dz is None else _outer(dz, of_rows, groups.ends, len(a))
        if to_x:
            dx = _times(dy, weight, groups.ends)
            dx = dx if dz is None else dx.add_(_times(dz, a, groups.ends))
            dx = _gathered(dx, groups, len(x)) if len(groups.order) else dx
        return dx, dweight, da, db, None, None


def _times(rows: Tensor, matrices: Tensor, ends: NDArray[np.int64]) -> Tensor:
    """``rows @ matrices[g]`` for each group of rows, or with the one matrix that there is."""
    if len(matrices) == 1:
        return rows @ matrices[0]
    return F.grouped_mm(rows, matrices, offs=torch.from_numpy(ends.astype(np.int32)))


def _outer(left: Tensor, right: Tensor, ends: NDArray[np.int64], matrices: int) -> Tensor:
    """``left^T @ right`` over the rows of each group ``[groups, L, R]``, or over all for one matrix."""
    if matrices == 1:
        return (left.T @ right)[None]
    return F.grouped_mm(left.T, right, offs=torch.from_numpy(ends.astype(np.int32)))


def _gathered(drows: Tensor, groups: _Groups, inputs: int) -> Tensor:
    """The sum over the rows that were made from each input."""
    given, dx, K = _array(drows), _new(inputs, drows.shape[1]), groups.choices
    _over_rows(inputs, lambda a, b: gradients.gather_rows(given, groups.place[a * K : b * K], K, dx[a:b]))
    return torch.from_numpy(dx)


class _Attention(torch.autograd.Function):
    """From projections ``[q | k | v | gate]`` to what goes into the output projection: heads, attention, gate."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, q_norm: Tensor, k_norm: Tensor, gate_bias: Tensor, config: Any, sliding: bool,
        packed: Packed,
    ) -> Tensor:  # fmt: skip
        N, eps, heads, positions = len(projected), config.rms_norm_eps, _heads(config), packed.positions_N
        qkvg, qw, kw, bias = (_array(tensor) for tensor in (projected, q_norm, k_norm, gate_bias))
        q, k, attended, gated = (_new(N, n) for n in (heads.q_width, heads.kv_width, heads.q_width, heads.q_width))

        def turn(a: int, b: int) -> None:
            for first, count, weight, query, turned in (
                (0, heads.heads, qw, True, q), (heads.q_width, heads.kv_heads, kw, False, k),
            ):  # fmt: skip
                rows.turn_heads(qkvg[a:b], first, count, weight, eps, positions[a:b], *packed.tables, sliding, query,
                                turned[a:b], False)  # fmt: skip

        _over_rows(N, turn)
        window = _window(config, sliding, packed)
        _attend(q, k, qkvg, attended, packed, window, heads)
        _over_rows(N, lambda a, b: rows.open_gate(attended[a:b], qkvg[a:b], heads.gate_first, bias, gated[a:b], False))
        held = map(torch.from_numpy, (qkvg, q, k, attended))
        ctx.save_for_backward(q_norm, k_norm, gate_bias, *held)
        ctx.config, ctx.sliding, ctx.packed, ctx.window = config, sliding, packed, window
        return torch.from_numpy(gated)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q_norm, k_norm, gate_bias, *held = ctx.saved_tensors
        qkvg, q, k, attended = (tensor.numpy() for tensor in held)
        config, sliding, window = ctx.config, ctx.sliding, ctx.window
        packed: Packed = ctx.packed
        heads, eps, positions = _heads(config), config.rms_norm_eps, packed.positions_N
        qw, kw, bias = _array(q_norm), _array(k_norm), _array(gate_bias)
        dgated, dqkvg, dattended = _array(dy), _new(*qkvg.shape), _new(*attended.shape)

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
        return torch.from_numpy(dqkvg), _sum(list(dqw)), _sum(list(dkw)), dbias, None, None, None


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
                                kv_heads, size, False)  # fmt: skip
        attention_kernels.attend(q[a:b], keys, values, 0, places, window, slots, positions, kv_heads, heads.group, size,
                                 scores, out[a:b], False)  # fmt: skip

    over_items(packed.spans, torch.get_num_threads(), work)


class _Swiglu(torch.autograd.Function):
    """``silu(gate) * up`` of rows ``[gate | up]``."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        wide, inner = _array(gate_up), _new(len(gate_up), gate_up.shape[1] // 2)
        _over_rows(len(wide), lambda a, b: rows.swiglu(wide[a:b], inner[a:b], False))
        ctx.save_for_backward(gate_up)
        return torch.from_numpy(inner)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        wide, given, dwide = _array(gate_up), _array(dy), _new(*gate_up.shape)
        _over_rows(len(wide), lambda a, b: gradients.swiglu_gradient(wide[a:b], given[a:b], dwide[a:b]))
        return torch.from_numpy(dwide)


class _Route(torch.autograd.Function):
    """Each row's experts and their weights, both ``[N, K]``; the experts are chosen, or given as ``routes_NK``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor, router_bias: Tensor, config: Any,
        routes_NK: NDArray[np.unsignedinteger] | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (N, E), K = (len(x), len(router)), config.num_experts_per_tok
        source, r, bias = _array(x), _array(router.T), _array(router_bias)
        scores, weights = _new(N, E), _new(N, K)
        chosen = np.empty((N, K), np.int64) if routes_NK is None else routes_NK.astype(np.int64)

        def work(a: int, b: int) -> None:
            linear.multiply(source[a:b], r, scores[a:b])
            experts.route(scores[a:b], bias, config.n_group, config.topk_group, config.norm_topk_prob,
                          routes_NK is not None, chosen[a:b], weights[a:b])  # fmt: skip

        _over_rows(N, work)
        held = map(torch.from_numpy, (scores, chosen, weights))
        ctx.save_for_backward(x, router, *held)
        ctx.normalize = config.norm_topk_prob
        experts_NK = torch.from_numpy(chosen)
        ctx.mark_non_differentiable(experts_NK)
        return torch.from_numpy(weights), experts_NK

    @staticmethod
    def backward(ctx: Any, dweights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, router, *held = ctx.saved_tensors
        scores, chosen, weights = (tensor.numpy() for tensor in held)
        given, dlogits = _array(dweights), _new(*scores.shape)

        def work(a: int, b: int) -> None:
            gradients.weigh_gradient(scores[a:b], chosen[a:b], weights[a:b], ctx.normalize, given[a:b], dlogits[a:b])

        _over_rows(len(scores), work)
        d, (to_x, to_router, *_) = torch.from_numpy(dlogits), ctx.needs_input_grad
        return d @ router if to_x else None, d.T @ x if to_router else None, None, None, None


class _Mix(torch.autograd.Function):
    """``factor * sum_k weights[i, k] * outer[place of (i, k)]``: what its experts made of each row."""

    @staticmethod
    def forward(
        ctx: Any, outer: Tensor, weights: Tensor, order: NDArray[np.int64], place: NDArray[np.int64], factor: float
    ) -> Tensor:
        parts, shares, K = _array(outer), _array(weights), weights.shape[1]
        out = _new(len(weights), outer.shape[1])
        _over_rows(
            len(out),
            lambda a, b: experts.gather_experts(parts, place[a * K : b * K], shares[a:b], factor, out[a:b], False),
        )
        ctx.save_for_backward(outer, weights)
        ctx.order, ctx.factor = order, factor
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        parts, shares = (_array(tensor) for tensor in ctx.saved_tensors)
        given, douter, dweights = _array(dy), _new(*parts.shape), _new(*shares.shape)

        def work(a: int, b: int) -> None:
            gradients.spread_to_experts(given, ctx.order, shares, ctx.factor, parts, douter, dweights, a, b)

        _over_rows(len(parts), work, 2 * _ROWS)
        return torch.from_numpy(douter), torch.from_numpy(dweights), None, None, None


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
