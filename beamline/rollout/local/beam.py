"""Beam's forward pass for sampling: one compiled call evaluates rows of tokens, whatever sequences they belong to.

Formulas are those of transformers' ``modeling_beam``, including where each value is rounded to the model's type (but
for attention weights, which stay float32 as in fused attention).
Another model family is another file like this one, made of the same kernels.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamline.kernels.attention import attend, store, whole_blocks
from beamline.kernels.compiled import kernel
from beamline.kernels.experts import gather_experts, invert, route, sort_by_expert
from beamline.kernels.layers import grouped_linear, linear_layer
from beamline.kernels.linear import multiply
from beamline.kernels.rows import add_residual, open_gate, rms_norm, swiglu, turn_heads
from beamline.model.beam import BeamShape, tensors
from beamline.model.layout import DType, Layout, TensorSlice, WeightKind
from beamline.model.lora import LoraShape, Site, adapter_tensors, sites
from beamline.policy.positions import Floats, position_tables
from beamline.policy.weights import split_experts
from beamline.rollout.local.cache import SlotCache
from beamline.rollout.routes import route_dtype


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
    qkvg_a: Floats  # [layers, D, r]; the rank r of adapters is 0 without them
    qkvg_b: Floats  # [layers, r, q + k + v + gate]
    o_a: Floats
    o_b: Floats
    dense_gate_up_a: Floats  # [dense layers, D, r]
    dense_gate_up_b: Floats
    dense_down_a: Floats
    dense_down_b: Floats
    gate_up_a: Floats  # [L, S, D, r], an adapter for each expert or one for all; r is 0 without any on experts
    gate_up_b: Floats
    down_a: Floats
    down_b: Floats


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
    kv_in_8_bits: bool
    adapter_scale: np.float32
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
    z: Floats  # what adapters make of rows before their B
    z_choices: Floats
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
    token_ids: Any, positions: Any, slots: Any, routes: Any, replayed: bool,
) -> Any:  # fmt: skip
    """Evaluate rows, each a token at a position of a slot.

    Returns hidden states after the final norm, ``[rows, D]``, which lie in the workspace. Keys and values of all rows
    are in the cache before a layer attends, so rows may be the positions of one sequence. ``routes [rows, L, K]`` is
    filled, or where it is ``replayed`` says which experts are used.
    """
    n, D = len(token_ids), w.embed.shape[1]
    size, heads = w.q_norm.shape[1], w.gate_bias.shape[1]
    q_width, kv_width = heads * size, traits.kv_heads * size
    bf16, eps, layers = traits.bf16, traits.eps, len(traits.sliding)
    h, x, y, z, scale = space.h[:n], space.x[:n], space.y[:n], space.z[:n], traits.adapter_scale
    qkvg, q, k, attended = space.qkvg[:n], space.q[:n], space.k[:n], space.attended[:n]
    for i in range(n):
        h[i] = w.embed[token_ids[i]]
    for layer in range(layers):
        sliding = traits.sliding[layer]
        rms_norm(h, w.norms, layer * 4 * D, eps, x, bf16)
        linear_layer(x, w.qkvg, w.qkvg_a, w.qkvg_b, layer, scale, qkvg, z, bf16)
        table = (traits.cos, traits.sin, traits.stretch)
        turn_heads(qkvg, 0, heads, w.q_norm[layer], eps, positions, *table, sliding, True, q, bf16)
        turn_heads(qkvg, q_width, traits.kv_heads, w.k_norm[layer], eps, positions, *table, sliding, False, k, bf16)
        v_first = q_width + kv_width
        store(keys, values, at[layer], places[layer], k, qkvg, v_first, slots, positions, traits.kv_heads, size,
              traits.kv_in_8_bits)  # fmt: skip
        window = traits.window if sliding else len(traits.stretch)
        attend(q, keys, values, at[layer], places[layer], window, slots, positions, traits.kv_heads, traits.group,
               size, space.scores, attended, bf16)  # fmt: skip
        open_gate(attended, qkvg, v_first + kv_width, w.gate_bias[layer], q, bf16)
        linear_layer(q, w.o, w.o_a, w.o_b, layer, scale, y, z, bf16)
        rms_norm(y, w.norms, (layer * 4 + 1) * D, eps, x, bf16)
        add_residual(x, 2 * (layer + 1), h, bf16)
        rms_norm(h, w.norms, (layer * 4 + 2) * D, eps, x, bf16)
        if traits.sparse[layer]:
            sparse_mlp(w, traits, space, traits.of_kind[layer], x, routes, replayed, y)
        else:
            dense_mlp(w, traits, space, traits.of_kind[layer], x, y)
        rms_norm(y, w.norms, (layer * 4 + 3) * D, eps, x, bf16)
        add_residual(x, 2 * (layer + 1) + 1, h, bf16)
    rms_norm(h, w.norm, 0, eps, x, bf16)
    return x


@kernel
def dense_mlp(w: Any, traits: Any, space: Any, index: int, x: Any, y: Any) -> None:
    """``y = down(swiglu(gate_up(x)))``."""
    n, scale = len(x), traits.adapter_scale
    wide, inner, z = space.dense[:n], space.inner_dense[:n], space.z[:n]
    linear_layer(x, w.dense_gate_up, w.dense_gate_up_a, w.dense_gate_up_b, index, scale, wide, z, traits.bf16)
    swiglu(wide, inner, traits.bf16)
    linear_layer(inner, w.dense_down, w.dense_down_a, w.dense_down_b, index, scale, y, z, traits.bf16)


@kernel
def sparse_mlp(w: Any, traits: Any, space: Any, index: int, x: Any, routes: Any, replayed: bool, y: Any) -> None:
    """``y`` = the weighted sum of the chosen experts; ``routes[:, index]`` says which."""
    n, K, scale = len(x), routes.shape[2], traits.adapter_scale
    scores, weights, chosen = space.router[:n], space.weights[:n], routes[:, index]
    choices = n * K
    order, place, every = space.order[:choices], space.place[:choices], space.order[:0]
    multiply(x, w.router[index], scores)
    route(scores, w.router_bias[index], traits.expert_groups, traits.best_groups, traits.normalize, replayed, chosen,
          weights)  # fmt: skip
    wide, inner, outer = space.wide[:choices], space.inner[:choices], space.outer[:choices]
    z, ends = space.z_choices[:choices], space.ends
    sort_by_expert(chosen, ends, order)
    grouped_linear(x, order, K, w.gate_up[index], ends, w.gate_up_a[index], w.gate_up_b[index], scale, wide, z,
                   space.rows, 0, choices, traits.bf16)  # fmt: skip
    swiglu(wide, inner, traits.bf16)
    grouped_linear(inner, every, 1, w.down[index], ends, w.down_a[index], w.down_b[index], scale, outer, z, inner, 0,
                   choices, traits.bf16)  # fmt: skip
    invert(order, place)
    gather_experts(outer, place, weights, traits.factor, y, traits.bf16)


@dataclass(frozen=True, slots=True)
class Numerics:
    """As what a decoder computes: of type ``dtype`` all but the router, the cache, and the logits before the soft cap.

    Raises:
        ValueError: a type that cannot be emulated.
    """

    dtype: DType = "float32"
    kv_dtype: Literal["same", "float8_e4m3"] = "same"
    head_dtype: DType = "float32"

    def __post_init__(self) -> None:
        for name in ("dtype", "head_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ValueError(f"the local sampler computes {name}=float32 or bfloat16, not {getattr(self, name)}")


def decoder_layout(shape: BeamShape, dtype: DType, lora: LoraShape | None, kind: WeightKind) -> Layout:
    """What a decoder takes: a model's weights, or an adapter's.

    Raises:
        ValueError: it has no adapters.
    """
    if kind == "adapter" and lora is None:
        raise ValueError("this sampler has no adapters, and takes full weights only")
    specs = adapter_tensors(shape, lora) if kind == "adapter" and lora is not None else tensors(shape, dtype)
    return Layout((tuple(TensorSlice.whole(spec.name, spec.dtype, spec.shape) for spec in specs),))


class BeamDecoder:
    """A Beam model: its weights and adapters under their checkpoint names, and the traits for :func:`forward`."""

    def __init__(
        self, shape: BeamShape, numerics: Numerics, rope_theta: float, max_positions: int, lora: LoraShape | None = None
    ) -> None:
        self.shape, self.numerics, self._lora = shape, numerics, lora
        self.route_dtype = route_dtype(shape)
        held = {name: torch.zeros(size) for name, size in (_sizes(shape) | _adapter_sizes(shape, lora)).items()}
        self.weights = Weights(**{name: tensor.numpy() for name, tensor in held.items()})
        self.tensors = dict(_named(shape, held))
        self.adapters = {} if lora is None else dict(_named_adapters(shape, lora, held))
        self.named = self.tensors | self.adapters
        self.traits = _traits(shape, numerics, rope_theta, max_positions, 1.0 if lora is None else lora.scale)

    def round_weights(self, received: Collection[str]) -> None:
        """Round what was received to the type that is computed as; the router stays float32."""
        if self.traits.bf16:
            for name in received:
                if ".mlp.gate." not in name:
                    self.named[name].copy_(self.named[name].bfloat16())

    def is_finite(self, adapters_alone: bool) -> bool:
        """Whether all values are finite, looked at in stacks: quicker than by their names."""
        stacks = self.weights._asdict().items()
        return all(np.isfinite(s).all() for name, s in stacks if not adapters_alone or name.endswith(("_a", "_b")))

    def new_cache(self, slots: int, positions: int) -> SlotCache:
        """A cache for ``slots`` sequences of up to ``positions`` tokens."""
        window = min(self.shape.sliding_window, positions)
        places = [window if kind == "sliding_attention" else positions for kind in self.shape.layer_types]
        return SlotCache(slots, places, self.shape.num_key_value_heads, self.shape.head_dim)

    def new_workspace(self, rows: int, places: int) -> Workspace:
        """Room for the activations of ``rows`` rows over caches of up to ``places`` places."""
        return _workspace(self.shape, rows, whole_blocks(places), 0 if self._lora is None else self._lora.rank)


def _sizes(shape: BeamShape) -> dict[str, tuple[int, ...]]:
    D, V, d = shape.hidden_size, shape.vocab_size, shape.head_dim
    heads, layers = shape.num_attention_heads, shape.num_hidden_layers
    q, kv, dense, E = heads * d, shape.num_key_value_heads * d, shape.intermediate_size, shape.num_experts
    L, I = len(shape.moe_layers), shape.moe_intermediate_size  # noqa: E741
    return {
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


def _adapter_sizes(shape: BeamShape, lora: LoraShape | None) -> dict[str, tuple[int, ...]]:
    """Those of A and B beside each linear of :func:`_sizes`; of rank 0 where it has no adapter in any layer."""
    sets = {} if lora is None else {_stack(shape, site)[0]: site.sets for site in sites(shape, lora)}
    sizes: dict[str, tuple[int, ...]] = {}
    for name in ("qkvg", "o", "dense_gate_up", "dense_down", "gate_up", "down"):
        layers, *experts, inputs, outputs = _sizes(shape)[name]
        rank = lora.rank if lora is not None and name in sets else 0
        stack = (layers, *([sets.get(name, 1)] if experts else []))
        sizes |= {f"{name}_a": (*stack, inputs, rank), f"{name}_b": (*stack, rank, outputs)}
    return sizes


def _stack(shape: BeamShape, site: Site) -> tuple[str, int]:
    """In which stack of weights the linears of a site lie, and where."""
    if site.place.endswith("self_attn"):
        return {"q_proj": "qkvg", "o_proj": "o"}[site.projections[0]], site.layer
    name = {"gate_proj": "gate_up", "down_proj": "down"}[site.projections[0]]
    return ("" if site.experts else "dense_") + name, _of_kind(shape)[site.layer]


def _named_adapters(shape: BeamShape, lora: LoraShape, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Views of the adapters under their names, shaped as in their files."""
    for site in sites(shape, lora):
        name, index = _stack(shape, site)
        a, b = held[f"{name}_a"][index], held[f"{name}_b"][index]
        for expert, place in site.adapters():
            of_a, of_b = (a, b) if site.experts is None else (a[expert], b[expert])
            yield f"{place}.{site.adapted[0]}.lora_A.weight", of_a.T
            for projection, rows in site.spans():
                yield f"{place}.{projection}.lora_B.weight", of_b.T[rows]


def _named(shape: BeamShape, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Views of the weights under their checkpoint names, shaped as there."""
    d = shape.head_dim
    q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
    yield from {"model.embed_tokens.weight": held["embed"], "model.norm.weight": held["norm"]}.items()
    yield "lm_head.weight", held["head"].T
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}"
        for name, part in zip(("q", "k", "v", "gate"), held["qkvg"][layer].T.split([q, kv, kv, q]), strict=True):
            yield f"{at}.self_attn.{name}_proj.weight", part
        yield f"{at}.self_attn.o_proj.weight", held["o"][layer].T
        yield f"{at}.self_attn.gate_bias", held["gate_bias"][layer]
        for name in ("q_norm", "k_norm"):
            yield f"{at}.self_attn.{name}.weight", held[name][layer]
        for i, name in enumerate(("input", "post_attention", "pre_feedforward", "post_feedforward")):
            yield f"{at}.{name}_layernorm.weight", held["norms"][layer, i]
        yield from _mlp(shape, layer, at, held)


def _mlp(shape: BeamShape, layer: int, at: str, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
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


def _traits(shape: BeamShape, numerics: Numerics, rope_theta: float, positions: int, adapter_scale: float) -> Traits:
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
        bf16=numerics.dtype == "bfloat16",
        kv_in_8_bits=numerics.kv_dtype == "float8_e4m3",
        adapter_scale=np.float32(adapter_scale),
        sliding=np.array([kind == "sliding_attention" for kind in shape.layer_types]),
        sparse=np.array([kind == "sparse" for kind in shape.mlp_layer_types]),
        of_kind=np.array(_of_kind(shape)),
        cos=cos,
        sin=sin,
        stretch=stretch,
    )


def _workspace(shape: BeamShape, rows: int, places: int, rank: int) -> Workspace:
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
        router=floats(rows, E), weights=floats(rows, K),
        z=floats(rows, rank), z_choices=floats(choices, rank), ends=np.empty(E, np.int64),
        order=np.empty(choices, np.int64), place=np.empty(choices, np.int64),
        rows=floats(choices, D), wide=floats(choices, 2 * I), inner=floats(choices, I), outer=floats(choices, D),
    )  # fmt: skip
