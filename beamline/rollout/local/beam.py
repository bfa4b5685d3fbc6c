"""Beam's forward pass for sampling: one compiled call evaluates rows of tokens, whatever sequences they belong to.

Formulas are those of transformers' ``modeling_beam``, including where each value is rounded to the model's type (but
for attention weights, which stay float32 as in fused attention).
Another model family is another file like this one, made of the same kernels.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamline.kernels.attention import attend, store, whole_blocks
from beamline.kernels.compiled import kernel
from beamline.kernels.experts import choose, expert_products, gather_experts, invert, sort_by_expert
from beamline.kernels.linear import multiply
from beamline.kernels.rows import add_residual, open_gate, rms_norm, round_rows, swiglu, turn_heads
from beamline.model.beam import BeamShape, tensors
from beamline.model.layout import DType
from beamline.policy.positions import Floats, position_tables
from beamline.policy.weights import split_experts
from beamline.rollout.local.cache import SlotCache


class Weights(NamedTuple):
    """Every weight, stacked over layers, and transposed to ``[in, out]`` for products of rows."""

    embed: Floats  # [V, D]
    norms: Floats  # [layers, 4, D]: input, post attention, pre and post feedforward
    qkvg: Floats  # [layers, D, q + k + v + gate]
    q_norm: Floats  # [layers, d]
    k_norm: Floats
    gate_bias: Floats  # [layers, H]
    o: Floats  # [layers, q, D]
    dense_gate_up: Floats  # [dense layers, D, 2 I]
    dense_down: Floats  # [dense layers, I, D]
    router: Floats  # [L, D, E]
    router_bias: Floats  # [L, E]
    gate_up: Floats  # [L, E, D, 2 I]
    down: Floats  # [L, E, I, D]
    norm: Floats  # [D]
    head: Floats  # [D, V]


class Traits(NamedTuple):
    """What a compiled call has to know of the model besides its weights."""

    kv_heads: int
    group: int  # query heads that share a key head
    window: int
    expert_groups: int
    best_groups: int
    normalize: bool
    factor: float
    cap: float
    eps: float
    bf16: bool
    sliding: NDArray[np.bool_]  # [layers]
    sparse: NDArray[np.bool_]  # [layers]
    of_kind: NDArray[np.int64]  # [layers] index among the layers of its MLP kind
    cos: Floats  # [positions, d / 2]
    sin: Floats
    stretch: Floats  # [positions] factor of queries in full layers


class Workspace(NamedTuple):
    """Activations of up to so many rows."""

    h: Floats
    x: Floats
    y: Floats
    qkvg: Floats
    q: Floats
    k: Floats
    attended: Floats
    scores: Floats
    dense: Floats
    inner_dense: Floats
    router: Floats
    weights: Floats
    ends: NDArray[np.int64]
    order: NDArray[np.int64]
    place: NDArray[np.int64]
    rows: Floats
    wide: Floats
    inner: Floats
    outer: Floats


@kernel
def forward(
    w: Any, traits: Any, space: Any, keys: Any, values: Any, at: Any, places: Any,
    token_ids: Any, positions: Any, slots: Any, routes: Any,
) -> Any:  # fmt: skip
    """Evaluate rows, each a token at a position of a slot.

    Returns hidden states after the final norm, ``[rows, D]``, which lie in the workspace. Keys and values of all rows
    are in the cache before a layer attends, so rows may be the positions of one sequence. ``routes [rows, L, K]`` is
    filled.
    """
    n, D = len(token_ids), w.embed.shape[1]
    size, heads = w.q_norm.shape[1], w.gate_bias.shape[1]
    q_width, kv_width = heads * size, traits.kv_heads * size
    bf16, eps, layers = traits.bf16, traits.eps, len(traits.sliding)
    h, x, y = space.h[:n], space.x[:n], space.y[:n]
    qkvg, q, k, attended = space.qkvg[:n], space.q[:n], space.k[:n], space.attended[:n]
    for i in range(n):
        h[i] = w.embed[token_ids[i]]
    for layer in range(layers):
        sliding = traits.sliding[layer]
        rms_norm(h, w.norms, layer * 4 * D, eps, x, bf16)
        multiply(x, w.qkvg[layer], qkvg)
        round_rows(qkvg, bf16)
        table = (traits.cos, traits.sin, traits.stretch)
        turn_heads(qkvg, 0, heads, w.q_norm[layer], eps, positions, *table, sliding, True, q, bf16)
        turn_heads(qkvg, q_width, traits.kv_heads, w.k_norm[layer], eps, positions, *table, sliding, False, k, bf16)
        v_first = q_width + kv_width
        store(keys, values, at[layer], places[layer], k, qkvg, v_first, slots, positions, traits.kv_heads, size)
        window = traits.window if sliding else len(traits.stretch)
        attend(q, keys, values, at[layer], places[layer], window, slots, positions, traits.kv_heads, traits.group,
               size, space.scores, attended, bf16)  # fmt: skip
        open_gate(attended, qkvg, v_first + kv_width, w.gate_bias[layer], q, bf16)
        multiply(q, w.o[layer], y)
        round_rows(y, bf16)
        rms_norm(y, w.norms, (layer * 4 + 1) * D, eps, x, bf16)
        add_residual(x, 2 * (layer + 1), h, bf16)
        rms_norm(h, w.norms, (layer * 4 + 2) * D, eps, x, bf16)
        if traits.sparse[layer]:
            sparse_mlp(w, traits, space, traits.of_kind[layer], x, routes, y)
        else:
            dense_mlp(w, traits, space, traits.of_kind[layer], x, y)
        rms_norm(y, w.norms, (layer * 4 + 3) * D, eps, x, bf16)
        add_residual(x, 2 * (layer + 1) + 1, h, bf16)
    rms_norm(h, w.norm, 0, eps, x, bf16)
    return x


@kernel
def dense_mlp(w: Any, traits: Any, space: Any, index: int, x: Any, y: Any) -> None:
    """``y = down(swiglu(gate_up(x)))``."""
    n = len(x)
    wide, inner = space.dense[:n], space.inner_dense[:n]
    multiply(x, w.dense_gate_up[index], wide)
    round_rows(wide, traits.bf16)
    swiglu(wide, inner, traits.bf16)
    multiply(inner, w.dense_down[index], y)
    round_rows(y, traits.bf16)


@kernel
def sparse_mlp(w: Any, traits: Any, space: Any, index: int, x: Any, routes: Any, y: Any) -> None:
    """``y`` = the weighted sum of the chosen experts; ``routes[:, index]`` says which."""
    n, D, E, K = len(x), x.shape[1], w.router.shape[2], routes.shape[2]
    scores, weights, chosen = space.router[:n], space.weights[:n], routes[:, index]
    order, place = space.order[: n * K], space.place[: n * K]
    multiply(x, w.router[index], scores)
    bias = w.router_bias[index]
    choose(scores, bias, traits.expert_groups, traits.best_groups, traits.normalize, chosen, weights)
    I = space.inner.shape[1]  # noqa: E741
    sort_by_expert(chosen, space.ends, order)
    expert_products(x, K, w.gate_up.reshape(-1), index * E * D * 2 * I, w.down.reshape(-1), index * E * I * D,
                    space.ends, order, space.rows, space.wide, space.inner, space.outer, 0, n * K,
                    traits.bf16)  # fmt: skip
    invert(order, place)
    gather_experts(space.outer, place, weights, traits.factor, y, traits.bf16)


class BeamDecoder:
    """A Beam model: its weights under their checkpoint names, and the traits for :func:`forward`."""

    def __init__(self, shape: BeamShape, dtype: DType, rope_theta: float, max_positions: int) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"the local sampler computes as float32 or bfloat16, not {dtype}")
        self.shape = shape
        self.route_dtype = np.dtype(np.uint8 if shape.num_experts <= 256 else np.uint16)
        self.weights, self.tensors = _allocate(shape)
        self.traits = _traits(shape, dtype, rope_theta, max_positions)

    def round_weights(self) -> None:
        """Round what was received to the model's type; the router stays float32."""
        if self.traits.bf16:
            for spec in tensors(self.shape, "bfloat16"):
                if spec.dtype == "bfloat16":
                    self.tensors[spec.name].copy_(self.tensors[spec.name].bfloat16())

    def new_cache(self, slots: int, positions: int) -> SlotCache:
        """A cache for ``slots`` sequences of up to ``positions`` tokens."""
        window = min(self.shape.sliding_window, positions)
        places = [window if kind == "sliding_attention" else positions for kind in self.shape.layer_types]
        return SlotCache(slots, places, self.shape.num_key_value_heads, self.shape.head_dim)

    def new_workspace(self, rows: int, places: int) -> Workspace:
        """Room for the activations of ``rows`` rows over caches of up to ``places`` places."""
        return _workspace(self.shape, rows, whole_blocks(places))


def _allocate(shape: BeamShape) -> tuple[Weights, dict[str, Tensor]]:
    """The stacked weights, and views of them under checkpoint names, shaped as there."""
    D, V, d = shape.hidden_size, shape.vocab_size, shape.head_dim
    heads, kv_heads, layers = shape.num_attention_heads, shape.num_key_value_heads, shape.num_hidden_layers
    q, kv, dense, E = heads * d, kv_heads * d, shape.intermediate_size, shape.num_experts
    L, I = len(shape.moe_layers), shape.moe_intermediate_size  # noqa: E741
    sizes: dict[str, tuple[int, ...]] = {
        "embed": (V, D),
        "norms": (layers, 4, D),
        "qkvg": (layers, D, 2 * q + 2 * kv),
        "q_norm": (layers, d),
        "k_norm": (layers, d),
        "gate_bias": (layers, heads),
        "o": (layers, q, D),
        "dense_gate_up": (layers - L, D, 2 * dense),
        "dense_down": (layers - L, dense, D),
        "router": (L, D, E),
        "router_bias": (L, E),
        "gate_up": (L, E, D, 2 * I),
        "down": (L, E, I, D),
        "norm": (D,),
        "head": (D, V),
    }
    held = {name: torch.zeros(size) for name, size in sizes.items()}
    named = {"model.embed_tokens.weight": held["embed"], "model.norm.weight": held["norm"]}
    named["lm_head.weight"] = held["head"].T
    for layer in range(layers):
        at = f"model.layers.{layer}"
        parts = held["qkvg"][layer].T.split([q, kv, kv, q])
        named |= {
            f"{at}.self_attn.{n}_proj.weight": part for n, part in zip(("q", "k", "v", "gate"), parts, strict=True)
        }
        named[f"{at}.self_attn.o_proj.weight"] = held["o"][layer].T
        named[f"{at}.self_attn.gate_bias"] = held["gate_bias"][layer]
        named |= {f"{at}.self_attn.{n}.weight": held[n][layer] for n in ("q_norm", "k_norm")}
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        named |= {f"{at}.{n}_layernorm.weight": held["norms"][layer, i] for i, n in enumerate(norms)}
        named |= dict(_mlp(shape, layer, at, held))
    arrays = {name: tensor.numpy() for name, tensor in held.items()}
    return Weights(**arrays), named


def _mlp(shape: BeamShape, layer: int, at: str, held: dict[str, Tensor]) -> Any:
    index = _of_kind(shape)[layer]
    if shape.mlp_layer_types[layer] == "dense":
        gate, up = held["dense_gate_up"][index].T.chunk(2)
        yield f"{at}.mlp.gate_proj.weight", gate
        yield f"{at}.mlp.up_proj.weight", up
        yield f"{at}.mlp.down_proj.weight", held["dense_down"][index].T
    else:
        yield f"{at}.mlp.gate.weight", held["router"][index].T
        yield f"{at}.mlp.gate.e_score_correction_bias", held["router_bias"][index]
        yield from split_experts(f"{at}.mlp.experts.gate_up_proj", held["gate_up"][index].transpose(1, 2))
        yield from split_experts(f"{at}.mlp.experts.down_proj", held["down"][index].transpose(1, 2))


def _of_kind(shape: BeamShape) -> list[int]:
    kinds = shape.mlp_layer_types
    return [kinds[:layer].count(kind) for layer, kind in enumerate(kinds)]


def _traits(shape: BeamShape, dtype: DType, rope_theta: float, positions: int) -> Traits:
    cos, sin, stretch = position_tables(shape.head_dim, rope_theta, positions)
    return Traits(
        kv_heads=shape.num_key_value_heads,
        group=shape.num_attention_heads // shape.num_key_value_heads,
        window=shape.sliding_window,
        expert_groups=shape.n_group,
        best_groups=shape.topk_group,
        normalize=shape.norm_topk_prob,
        factor=float(shape.routed_scaling_factor),
        cap=float(shape.final_logit_softcapping),
        eps=float(shape.rms_norm_eps),
        bf16=dtype == "bfloat16",
        sliding=np.array([kind == "sliding_attention" for kind in shape.layer_types]),
        sparse=np.array([kind == "sparse" for kind in shape.mlp_layer_types]),
        of_kind=np.array(_of_kind(shape)),
        cos=cos,
        sin=sin,
        stretch=stretch,
    )


def _workspace(shape: BeamShape, rows: int, places: int) -> Workspace:
    D, d, K, E = shape.hidden_size, shape.head_dim, shape.num_experts_per_tok, shape.num_experts
    q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
    group = shape.num_attention_heads // shape.num_key_value_heads
    dense, I = shape.intermediate_size, shape.moe_intermediate_size  # noqa: E741

    def floats(*size: int) -> Floats:
        return np.empty(size, np.float32)

    choices = rows * K
    return Workspace(
        h=floats(rows, D), x=floats(rows, D), y=floats(rows, D),
        qkvg=floats(rows, 2 * q + 2 * kv), q=floats(rows, q), k=floats(rows, kv), attended=floats(rows, q),
        scores=floats(2 * group * places),
        dense=floats(rows, 2 * dense), inner_dense=floats(rows, dense),
        router=floats(rows, E), weights=floats(rows, K), ends=np.empty(E, np.int64),
        order=np.empty(choices, np.int64), place=np.empty(choices, np.int64),
        rows=floats(choices, D), wide=floats(choices, 2 * I), inner=floats(choices, I), outer=floats(choices, D),
    )  # fmt: skip
