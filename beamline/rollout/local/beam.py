"""Beam's forward pass for sampling: fused projections, one token a sequence, routes recorded.

Formulas are those of transformers' ``modeling_beam``, including where each value is rounded to the model's type.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from beamline.model.beam import BeamShape, tensors
from beamline.model.layout import DType
from beamline.policy.attention import Packing, packed_attention
from beamline.policy.head import soft_cap
from beamline.policy.weights import TORCH_DTYPES, split_experts
from beamline.rollout.local.cache import SlotCache

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q [N, H, d], k and v [N, KV, d] -> [N, H * d]


@dataclass(slots=True)
class _Layer:
    qkvg: Tensor  # [q + k + v + gate, D]
    o: Tensor
    gate_bias: Tensor
    q_norm: Tensor
    k_norm: Tensor
    norms: dict[str, Tensor]
    gate_up: Tensor  # dense [2 I, D], sparse [E, 2 I, D]
    down: Tensor  # dense [D, I], sparse [E, D, I]
    router: Tensor | None
    router_bias: Tensor | None


class BeamDecoder:
    """A Beam model that evaluates prompts into a cache and then one token a sequence."""

    def __init__(self, shape: BeamShape, dtype: DType, rope_theta: float, max_positions: int) -> None:
        self.shape = shape
        self.dtype = TORCH_DTYPES[dtype]
        self.route_dtype = torch.uint8 if shape.num_experts <= 256 else torch.int32
        self._allocate(dtype)
        angles = torch.arange(max_positions).float()[:, None] / rope_theta ** (
            torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        )
        self._cos, self._sin = (torch.cat((f(angles),) * 2, dim=-1) for f in (torch.cos, torch.sin))

    def _allocate(self, dtype: DType) -> None:
        shape = self.shape
        own = {spec.name: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in tensors(shape, dtype)}
        self._layers = []
        for i in range(shape.num_hidden_layers):
            at = f"model.layers.{i}"
            qkvg = _fuse(own, [f"{at}.self_attn.{name}_proj.weight" for name in ("q", "k", "v", "gate")])
            if shape.mlp_layer_types[i] == "dense":
                gate_up = _fuse(own, [f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"])
                down = own[f"{at}.mlp.down_proj.weight"]
            else:
                E, I, D = shape.num_experts, shape.moe_intermediate_size, shape.hidden_size  # noqa: E741
                gate_up = torch.empty(E, 2 * I, D, dtype=self.dtype)
                down = torch.empty(E, D, I, dtype=self.dtype)
                own.update(split_experts(f"{at}.mlp.experts.gate_up_proj", gate_up))
                own.update(split_experts(f"{at}.mlp.experts.down_proj", down))
            names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            self._layers.append(
                _Layer(
                    qkvg=qkvg,
                    o=own[f"{at}.self_attn.o_proj.weight"],
                    gate_bias=own[f"{at}.self_attn.gate_bias"],
                    q_norm=own[f"{at}.self_attn.q_norm.weight"],
                    k_norm=own[f"{at}.self_attn.k_norm.weight"],
                    norms={name: own[f"{at}.{name}_layernorm.weight"] for name in names},
                    gate_up=gate_up,
                    down=down,
                    router=own.get(f"{at}.mlp.gate.weight"),
                    router_bias=own.get(f"{at}.mlp.gate.e_score_correction_bias"),
                )
            )
        self.weights = own

    def new_cache(self, slots: int, positions: int) -> SlotCache:
        """A cache for ``slots`` sequences of up to ``positions`` tokens."""
        window = min(self.shape.sliding_window, positions)
        places = [window if kind == "sliding_attention" else positions for kind in self.shape.layer_types]
        return SlotCache(slots, places, self.shape.num_key_value_heads, self.shape.head_dim, self.dtype)

    def prefill(
        self, prefixes: Sequence[Tensor], slots: Sequence[Sequence[int]], cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """Evaluate distinct prefixes once each; prefix p fills every slot of ``slots[p]``.

        Returns the logits ``[P, V]`` after each prefix, and the routes ``[N, L, K]`` of all its rows, end to end.
        """
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        borders = F.pad(lengths.cumsum(0), (1, 0))
        packing = Packing.of(borders.tolist())
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        copies = [(p, slot) for p, several in enumerate(slots) for slot in several]
        copied_rows = torch.cat([torch.arange(int(borders[p]), int(borders[p + 1])) for p, _ in copies])
        copied_slots = torch.tensor([slot for _, slot in copies]).repeat_interleave(lengths[[p for p, _ in copies]])
        from_end = lengths.repeat_interleave(lengths) - positions

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            fits = from_end[copied_rows] <= cache.places(layer)
            rows, targets = copied_rows[fits], copied_slots[fits]
            cache.write(layer, targets, positions[rows], k[rows], v[rows])
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out, _ = packed_attention(
                _NO_MODULE, q, k, v, None, packing=packing, scaling=self._scale, sliding_window=self._window(layer)
            )
            return out.reshape(out.shape[1], -1)

        hidden, routes = self._forward(torch.cat(list(prefixes)), positions, attend)
        return self._logits(hidden[borders[1:] - 1]), routes

    def decode(self, token_ids_n: Tensor, positions_n: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Evaluate one token of each of the first n slots; returns logits ``[n, V]`` and routes ``[n, L, K]``."""
        n = len(token_ids_n)
        slots_n = torch.arange(n)
        positions = int(positions_n.max()) + 1
        seen = torch.arange(positions) <= positions_n[:, None]
        mask = seen[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, slots_n, positions_n, k, v)
            keys, values = cache.read(layer, n, positions)
            grouped = q.unflatten(1, (self.shape.num_key_value_heads, -1))  # heads of a group share one key
            allowed = mask[..., : keys.shape[2]]
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=allowed, scale=self._scale).flatten(
                1
            )

        hidden, routes = self._forward(token_ids_n, positions_n, attend)
        return self._logits(hidden), routes

    def _window(self, layer: int) -> int | None:
        return self.shape.sliding_window if self.shape.layer_types[layer] == "sliding_attention" else None

    @property
    def _scale(self) -> float:
        return 1.0 / math.sqrt(self.shape.head_dim)

    def _forward(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        h = self.weights["model.embed_tokens.weight"][token_ids_N]
        cos, sin = self._cos[positions_N][:, None], self._sin[positions_N][:, None]
        scale = torch.exp(0.1 * torch.log1p((positions_N.float() + 1) / 2048))[:, None, None]
        routes = []
        for i, layer in enumerate(self._layers):
            x = self._norm(h, layer.norms["input"])
            a = self._attention(i, layer, x, cos, sin, scale, attend)
            h = _residual(self._norm(a, layer.norms["post_attention"]), h, 2 * (i + 1))
            x = self._norm(h, layer.norms["pre_feedforward"])
            if layer.router is None:
                y = _swiglu(x @ layer.gate_up.T) @ layer.down.T
            else:
                y, chosen = self._experts(layer, x)
                routes.append(chosen)
            h = _residual(self._norm(y, layer.norms["post_feedforward"]), h, 2 * (i + 1) + 1)
        N, K = len(token_ids_N), self.shape.num_experts_per_tok
        return h, torch.stack(routes, dim=1) if routes else torch.zeros(N, 0, K, dtype=self.route_dtype)

    def _attention(
        self, i: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, attend: Attend
    ) -> Tensor:
        shape = self.shape
        q_width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        qk, v, gate = (x @ layer.qkvg.T).split([q_width + kv_width, kv_width, q_width], dim=-1)
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        weights = torch.cat([layer.q_norm.expand(heads, -1), layer.k_norm.expand(kv_heads, -1)]).float()
        qk = qk.unflatten(-1, (-1, shape.head_dim))
        qk = (F.rms_norm(qk.float(), (shape.head_dim,), eps=shape.rms_norm_eps) * weights).to(self.dtype)
        v = v.unflatten(-1, (-1, shape.head_dim))
        if self._window(i) is not None:
            qk = (qk * cos + _rotate_half(qk) * sin).to(self.dtype)
        q, k = qk.split([heads, kv_heads], dim=1)
        if self._window(i) is None:
            q = (q.float() * scale).to(q.dtype)
        out = attend(i, q, k, v)
        gate = gate.unflatten(-1, (-1, shape.head_dim)) + layer.gate_bias[:, None]
        return (out * torch.sigmoid(gate).flatten(1)) @ layer.o.T

    def _experts(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the chosen experts' outputs ``[N, D]``, and which were chosen, ``[N, K]``."""
        chosen, weights = self._route(layer, x)
        K = chosen.shape[1]
        sorted_experts, order = torch.sort(chosen.flatten(), stable=True)
        ends = torch.searchsorted(sorted_experts, torch.arange(self.shape.num_experts), right=True).int()
        rows = x.index_select(0, order // K)
        inner = _swiglu(F.grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends))
        outer = F.grouped_mm(inner, layer.down.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
        by_choice = outer.index_select(0, torch.argsort(order))
        y = by_choice.unflatten(0, (-1, K)).sum(1).to(x.dtype) * self.shape.routed_scaling_factor
        return y, chosen.to(self.route_dtype)

    def _route(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        assert layer.router is not None
        assert layer.router_bias is not None
        scores = torch.sigmoid(x.float() @ layer.router.T)
        choice = (scores + layer.router_bias).unflatten(-1, (shape.n_group, -1))
        group_scores = choice.topk(2, dim=-1)[0].sum(-1)
        groups = group_scores.topk(shape.topk_group, dim=-1)[1]
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
        chosen = choice.masked_fill(dropped[..., None], -math.inf).flatten(1).topk(shape.num_experts_per_tok, dim=-1)[1]
        weights = scores.gather(1, chosen)
        if shape.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, self.weights["model.norm.weight"])
        return soft_cap(normed.float() @ self.weights["lm_head.weight"].float().T, self.shape.final_logit_softcapping)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.shape.rms_norm_eps).to(x.dtype)


_NO_MODULE = torch.nn.Module()  # packed attention has the signature of transformers, and uses no module


def _fuse(own: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """One matrix that holds several, each of which becomes a view of its rows."""
    fused = torch.cat([own[name] for name in names])
    sizes = [own[name].shape[0] for name in names]
    own.update(zip(names, fused.split(sizes), strict=True))
    return fused


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _residual(x: Tensor, residual: Tensor, n: int) -> Tensor:
    return x * (1.0 / math.sqrt(n)) + residual * math.sqrt((n - 1) / n)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
