"""The pieces of a layer on the sampler's kernels, with their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamline.kernels import attention as attention_kernels
from beamline.kernels import experts, gradients, linear, parallel, rows
from beamline.policy.positions import Floats

T = TypeVar("T")

ROWS = 512  # of a chunk: enough work for a call, and activations that stay in a core's cache


def apply(function: Any, *arguments: Any) -> Any:
    """The result of an autograd function, which torch does not type."""
    return function.apply(*arguments)


def array(tensor: Tensor) -> Floats:
    """A float32 tensor as the kernels take it."""
    return cast(Floats, tensor.detach().contiguous().numpy())


def new(*size: int) -> Floats:
    """An array to be filled."""
    return np.empty(size, np.float32)


def over_rows(count: int, work: Callable[[int, int], T], chunk: int | None = None) -> list[T]:
    """``work(start, stop)`` for chunks of rows."""
    return parallel.over_rows(count, torch.get_num_threads(), work, chunk or ROWS)


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the rows of a packed batch stand, and how they attend to each other."""

    positions_N: NDArray[np.int64]
    spans: tuple[tuple[int, int], ...]  # first and last row of each sequence, the last not included
    tables: tuple[Floats, Floats, Floats]
    attend: "Attend"


class Heads(NamedTuple):
    """How a row of fused projections ``[q | k | v | gate]`` is divided."""

    heads: int
    kv_heads: int
    group: int  # query heads that share a key head
    size: int
    q_width: int
    kv_width: int
    v_first: int
    gate_first: int


Attend = Callable[[Floats, Floats, Floats, Floats, Packed, int, Heads], None]
"""What :func:`attend` does, and what may take its place in a pass without gradients: ``backward`` refuses it."""


def norm(x: Tensor, module: Any) -> Tensor:
    """``rms_norm(x)``, with the weight and epsilon of a module."""
    return cast(Tensor, apply(_Norm, x, module.weight, module.variance_epsilon))


def normed_residual(x: Tensor, module: Any, h: Tensor, n: int) -> Tensor:
    """``rms_norm(x) / sqrt(n) + h * sqrt((n - 1) / n)``."""
    return cast(Tensor, apply(_NormedResidual, x, module.weight, module.variance_epsilon, h, n))


def attention(qkvg: Tensor, module: Any, sliding: bool, packed: Packed) -> Tensor:
    """From projections ``[q | k | v | gate]`` to what goes into the output projection: heads, attention, gate."""
    weights = module.q_norm.weight, module.k_norm.weight, module.gate_bias
    return cast(Tensor, apply(_Attention, qkvg, *weights, module.config, sliding, packed))


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows ``[gate | up]``."""
    return cast(Tensor, apply(_Swiglu, gate_up))


def route(x: Tensor, module: Any, config: Any, routes_NK: NDArray[np.unsignedinteger] | None) -> tuple[Tensor, Tensor]:
    """Each row's experts' weights and the experts, ``[N, K]``; these are chosen, or given as ``routes_NK``."""
    arguments = x, module.weight, module.e_score_correction_bias, config, routes_NK
    return cast(tuple[Tensor, Tensor], apply(_Route, *arguments))


def mix(outer: Tensor, weights: Tensor, order: NDArray[np.int64], place: NDArray[np.int64], factor: float) -> Tensor:
    """``factor * sum_k weights[i, k] * outer[place of (i, k)]``: what its experts made of each row."""
    return cast(Tensor, apply(_Mix, outer, weights, order, place, factor))


def _heads(config: Any) -> Heads:
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, kv = heads * size, kv_heads * size
    return Heads(heads, kv_heads, heads // kv_heads, size, q, kv, q + kv, q + 2 * kv)


def _summed(parts: list[Floats]) -> Tensor:
    return torch.from_numpy(np.sum(parts, axis=0, dtype=np.float32))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        source, w, out = array(x), array(weight), new(*x.shape)
        over_rows(len(out), lambda a, b: rows.rms_norm(source[a:b], w, 0, eps, out[a:b], False))
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_norm_gradient(x, weight, ctx.eps, 1.0, dy), None


def _norm_gradient(x: Tensor, weight: Tensor, eps: float, factor: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    source, w, given, dx = array(x), array(weight), array(dy), new(*x.shape)

    def work(a: int, b: int) -> Floats:
        dweight = np.zeros_like(w)
        gradients.rms_norm_gradient(source[a:b], w, eps, factor, given[a:b], dx[a:b], dweight)
        return dweight

    return torch.from_numpy(dx), _summed(over_rows(len(dx), work))


class _NormedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, h: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.n = eps, n
        source, w, out = array(x), array(weight), array(h).copy()

        def work(a: int, b: int) -> None:
            normed = new(b - a, x.shape[1])
            rows.rms_norm(source[a:b], w, 0, eps, normed, False)
            rows.add_residual(normed, n, out[a:b], False)

        over_rows(len(out), work)
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = _norm_gradient(x, weight, ctx.eps, ctx.n**-0.5, dy)
        return dx, dweight, None, dy * ((ctx.n - 1) / ctx.n) ** 0.5, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, q_norm: Tensor, k_norm: Tensor, gate_bias: Tensor, config: Any, sliding: bool,
        packed: Packed,
    ) -> Tensor:  # fmt: skip
        N, eps, heads, positions = len(projected), config.rms_norm_eps, _heads(config), packed.positions_N
        qkvg, qw, kw, bias = (array(tensor) for tensor in (projected, q_norm, k_norm, gate_bias))
        q, k, attended, gated = (new(N, n) for n in (heads.q_width, heads.kv_width, heads.q_width, heads.q_width))

        def turn(a: int, b: int) -> None:
            for first, count, weight, query, turned in (
                (0, heads.heads, qw, True, q), (heads.q_width, heads.kv_heads, kw, False, k),
            ):  # fmt: skip
                rows.turn_heads(qkvg[a:b], first, count, weight, eps, positions[a:b], *packed.tables, sliding, query,
                                turned[a:b], False)  # fmt: skip

        over_rows(N, turn)
        window = _window(config, sliding, packed)
        packed.attend(q, k, qkvg, attended, packed, window, heads)
        over_rows(N, lambda a, b: rows.open_gate(attended[a:b], qkvg[a:b], heads.gate_first, bias, gated[a:b], False))
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
        if packed.attend is not attend:
            raise RuntimeError("a pass with another attention than the kernels' has no gradients: use torch.no_grad()")
        heads, eps, positions = _heads(config), config.rms_norm_eps, packed.positions_N
        qw, kw, bias = array(q_norm), array(k_norm), array(gate_bias)
        dgated, dqkvg, dattended = array(dy), new(*qkvg.shape), new(*attended.shape)

        def reopen(a: int, b: int) -> Floats:
            dbias = np.zeros_like(bias)
            gradients.open_gate_gradient(attended[a:b], qkvg[a:b], heads.gate_first, bias, dgated[a:b],
                                         dattended[a:b], dqkvg[a:b], dbias)  # fmt: skip
            return dbias

        dbias = _summed(over_rows(len(dy), reopen))
        dq, dk = new(*q.shape), np.zeros_like(k)

        def attend_back(span: tuple[int, int]) -> None:
            part = slice(*span)
            gradients.attend_gradient(q[part], k[part], qkvg[part], heads.v_first, attended[part], dattended[part],
                                      window, heads.kv_heads, heads.group, heads.size, dq[part], dk[part],
                                      dqkvg[part])  # fmt: skip

        parallel.over_items(packed.spans, torch.get_num_threads(), attend_back)

        def turn_back(a: int, b: int) -> tuple[Floats, Floats]:
            dqw, dkw = np.zeros_like(qw), np.zeros_like(kw)
            for first, count, weight, query, given, to in (
                (0, heads.heads, qw, True, dq, dqw), (heads.q_width, heads.kv_heads, kw, False, dk, dkw),
            ):  # fmt: skip
                gradients.turn_heads_gradient(qkvg[a:b], first, count, weight, eps, positions[a:b], *packed.tables,
                                              sliding, query, given[a:b], dqkvg[a:b], to)  # fmt: skip
            return dqw, dkw

        dqw, dkw = zip(*over_rows(len(dy), turn_back), strict=True)
        return torch.from_numpy(dqkvg), _summed(list(dqw)), _summed(list(dkw)), dbias, None, None, None


def _window(config: Any, sliding: bool, packed: Packed) -> int:
    """Positions that a query sees at most, itself included; in a full layer all that there are."""
    return int(config.sliding_window) if sliding else len(packed.tables[0])


def attend(q: Floats, k: Floats, qkvg: Floats, out: Floats, packed: Packed, window: int, heads: Heads) -> None:
    """Each sequence through the sampler's attention, as if it had a cache of its own without a ring.

    A query sees ``window`` positions at most; v is a part of ``qkvg``, and ``out [N, heads * size]`` is filled.
    """
    kv_heads, size = heads.kv_heads, heads.size

    def work(span: tuple[int, int]) -> None:
        a, b = span
        places = attention_kernels.whole_blocks(b - a)
        keys, values = new(kv_heads * size * places), new(kv_heads * size * places)
        scores = new(2 * heads.group * places)
        slots, positions = np.zeros(b - a, np.int64), packed.positions_N[a:b]
        attention_kernels.store(keys, values, 0, places, k[a:b], qkvg[a:b], heads.v_first, slots, positions,
                                kv_heads, size, False)  # fmt: skip
        attention_kernels.attend(q[a:b], keys, values, 0, places, window, slots, positions, kv_heads, heads.group, size,
                                 scores, out[a:b], False)  # fmt: skip

    parallel.over_items(packed.spans, torch.get_num_threads(), work)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        wide, inner = array(gate_up), new(len(gate_up), gate_up.shape[1] // 2)
        over_rows(len(wide), lambda a, b: rows.swiglu(wide[a:b], inner[a:b], False))
        ctx.save_for_backward(gate_up)
        return torch.from_numpy(inner)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        wide, given, dwide = array(gate_up), array(dy), new(*gate_up.shape)
        over_rows(len(wide), lambda a, b: gradients.swiglu_gradient(wide[a:b], given[a:b], dwide[a:b]))
        return torch.from_numpy(dwide)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor, router_bias: Tensor, config: Any,
        routes_NK: NDArray[np.unsignedinteger] | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (N, E), K = (len(x), len(router)), config.num_experts_per_tok
        source, r, bias = array(x), array(router.T), array(router_bias)
        scores, weights = new(N, E), new(N, K)
        chosen = np.empty((N, K), np.int64) if routes_NK is None else routes_NK.astype(np.int64)

        def work(a: int, b: int) -> None:
            linear.multiply(source[a:b], r, scores[a:b])
            experts.route(scores[a:b], bias, config.n_group, config.topk_group, config.norm_topk_prob,
                          routes_NK is not None, chosen[a:b], weights[a:b])  # fmt: skip

        over_rows(N, work)
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
        given, dlogits = array(dweights), new(*scores.shape)

        def work(a: int, b: int) -> None:
            gradients.weigh_gradient(scores[a:b], chosen[a:b], weights[a:b], ctx.normalize, given[a:b], dlogits[a:b])

        over_rows(len(scores), work)
        d, (to_x, to_router, *_) = torch.from_numpy(dlogits), ctx.needs_input_grad
        return d @ router if to_x else None, d.T @ x if to_router else None, None, None, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outer: Tensor, weights: Tensor, order: NDArray[np.int64], place: NDArray[np.int64], factor: float
    ) -> Tensor:
        parts, shares, K = array(outer), array(weights), weights.shape[1]
        out = new(len(weights), outer.shape[1])
        over_rows(
            len(out),
            lambda a, b: experts.gather_experts(parts, place[a * K : b * K], shares[a:b], factor, out[a:b], False),
        )
        ctx.save_for_backward(outer, weights)
        ctx.order, ctx.factor = order, factor
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        parts, shares = (array(tensor) for tensor in ctx.saved_tensors)
        given, douter, dweights = array(dy), new(*parts.shape), new(*shares.shape)

        def work(a: int, b: int) -> None:
            gradients.spread_to_experts(given, ctx.order, shares, ctx.factor, parts, douter, dweights, a, b)

        over_rows(len(parts), work, 2 * ROWS)
        return torch.from_numpy(douter), torch.from_numpy(dweights), None, None, None
