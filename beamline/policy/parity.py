"""The module's forward pass on the sampler's kernels, with gradients.

Every value is computed by the operations, in the order, that the sampler uses, so log-probabilities of the same weights
have the same bits in both engines. It is also the faster path: norms, gates and SwiGLU are fused into passes over rows
that stay in a core's cache. Gradients come from kernels of their own and, where sums go over all rows, from torch's
matrix products. A CPU and float32 are required.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from beamline.kernels import gradients, linear, vocabulary
from beamline.policy import functions
from beamline.policy.attention import Packing
from beamline.policy.dropout import Dropout
from beamline.policy.functions import Attend, Packed, apply, array, new, over_rows
from beamline.policy.head import aligned
from beamline.policy.linears import Groups, linear_layer
from beamline.policy.lora import Adapter, Adapters
from beamline.policy.positions import Floats, position_tables, rope_theta
from beamline.records import Support


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
    dropout: Dropout | None = None,
    attend: Attend = functions.attend,
) -> Tensor:
    """Last hidden states ``[N, D]`` (after the final norm) of packed sequences; see :func:`model.hidden_states`.

    Another function may take the place of the kernels' attention, without gradients.
    """
    config, model = cast(Any, module).config, cast(Any, module).model
    tables = _tables(config.head_dim, rope_theta(config), int(position_ids_N.max()) + 1)
    packed = Packed(position_ids_N.numpy(), tuple(pairwise(packing.borders)), tables, attend)
    h, moe_layers = F.embedding(input_ids_N, model.embed_tokens.weight), 0
    for index, (layer, kind) in enumerate(zip(model.layers, config.layer_types, strict=True)):
        routes_NK = None
        if hasattr(layer.mlp, "experts"):
            routes_NK = None if routes_NLK is None else routes_NLK[:, moe_layers]
            moe_layers += 1
        adapter = partial(_adapter, adapters, dropout, f"model.layers.{index}")
        run = partial(_layer, layer, config, kind == "sliding_attention", packed, adapter, routes_NK)
        recompute = layer.gradient_checkpointing and layer.training
        h = checkpoint(run, h, use_reentrant=False) if recompute else run(h)
    return functions.norm(h, model.norm)


def _adapter(
    adapters: Adapters | None, dropout: Dropout | None, layer: str, part: str, projection: str
) -> Adapter | None:
    return None if adapters is None else adapters.at(f"{layer}.{part}", projection, dropout)


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
    return cast(tuple[Tensor, Tensor], apply(_Head, *tensors, cap, chunk_rows, aligned(support, target_N)))


@lru_cache(maxsize=4)
def _tables(head_dim: int, theta: float, positions: int) -> tuple[Floats, Floats, Floats]:
    return position_tables(head_dim, theta, positions)


def _layer(
    layer: Any, config: Any, sliding: bool, packed: Packed, adapter: Callable[[str, str], Adapter | None],
    routes_NK: NDArray[np.unsignedinteger] | None, h: Tensor,
) -> Tensor:  # fmt: skip
    attention, mlp = layer.self_attn, layer.mlp
    x = functions.norm(h, layer.input_layernorm)
    weights = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.gate_proj.weight)
    qkvg = linear_layer(x, torch.cat(weights), adapter("self_attn", "q_proj"))
    gated = functions.attention(qkvg, attention, sliding, packed)
    a = linear_layer(gated, attention.o_proj.weight, adapter("self_attn", "o_proj"))
    h = functions.normed_residual(a, layer.post_attention_layernorm, h, layer.attn_residual_add_idx)
    x = functions.norm(h, layer.pre_feedforward_layernorm)
    if hasattr(mlp, "experts"):
        y = _sparse_mlp(x, mlp, config, partial(adapter, "mlp.experts"), routes_NK)
    else:
        wide = linear_layer(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), adapter("mlp", "gate_proj"))
        y = linear_layer(functions.swiglu(wide), mlp.down_proj.weight, adapter("mlp", "down_proj"))
    return functions.normed_residual(y, layer.post_feedforward_layernorm, h, layer.mlp_residual_add_idx)


def _sparse_mlp(
    x: Tensor, mlp: Any, config: Any, adapter: Callable[[str], Adapter | None],
    routes_NK: NDArray[np.unsignedinteger] | None,
) -> Tensor:  # fmt: skip
    """Router, the chosen experts, and their weighted sum."""
    weights, chosen = functions.route(x, mlp.gate, config, routes_NK)
    groups = Groups.of(chosen, len(mlp.gate.weight))
    wide = linear_layer(x, mlp.experts.gate_up_proj, adapter("gate_proj"), groups)
    inner = functions.swiglu(wide)
    outer = linear_layer(inner, mlp.experts.down_proj, adapter("down_proj"), groups._replace(sorted=True))
    return functions.mix(outer, weights, groups.order, groups.place, float(config.routed_scaling_factor))


class _Head(torch.autograd.Function):
    """Logits of a chunk of rows at a time, computed again in the backward pass: ``[N, V]`` never exists."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature_N: Tensor, cap: float,
        chunk_rows: int, support: Support,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, temperature_N)
        ctx.cap, ctx.chunk_rows, ctx.support = cap, chunk_rows, support
        hidden, w, targets, temperature = (array(x) for x in (hidden_ND, weight_VD.T, target_N, temperature_N))
        N, V = len(hidden), w.shape[1]
        logprobs, entropies = new(N), new(N)

        def work(a: int, b: int) -> None:
            logits = new(b - a, V)
            linear.multiply(hidden[a:b], w, logits)
            vocabulary.soft_cap(logits.reshape(-1), cap)
            vocabulary.score_rows(logits, targets[a:b], temperature[a:b], support.ids, support.borders[a : b + 1],
                                  new(V), logprobs[a:b], entropies[a:b])  # fmt: skip

        over_rows(N, work, min(chunk_rows, functions.ROWS))
        entropy_N = torch.from_numpy(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return torch.from_numpy(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, temperature_N = ctx.saved_tensors
        hidden, w, targets, temperature, grad = (
            array(x) for x in (hidden_ND, weight_VD.T, target_N, temperature_N, grad_N)
        )
        hidden_grad, weight_grad = torch.empty_like(hidden_ND), None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight_VD)
        ids, borders = ctx.support.ids, ctx.support.borders
        for start in range(0, len(hidden), ctx.chunk_rows):
            part, ends = slice(start, start + ctx.chunk_rows), slice(start, start + ctx.chunk_rows + 1)
            logits = _logit_gradient(
                hidden[part], w, ctx.cap, targets[part], temperature[part], ids, borders[ends], grad[part]
            )
            hidden_grad[part] = logits @ weight_VD
            if weight_grad is not None:
                weight_grad += logits.T @ hidden_ND[part]
        return hidden_grad, weight_grad, None, None, None, None, None


def _logit_gradient(
    hidden: Floats, w: Floats, cap: float, targets: NDArray[Any], temperature: Floats, ids: NDArray[np.int32],
    borders: NDArray[np.int64], grad: Floats,
) -> Tensor:  # fmt: skip
    logits = new(len(hidden), w.shape[1])

    def work(a: int, b: int) -> None:
        linear.multiply(hidden[a:b], w, logits[a:b])
        gradients.score_rows_gradient(logits[a:b], cap, targets[a:b], temperature[a:b], ids, borders[a : b + 1],
                                      grad[a:b])  # fmt: skip

    over_rows(len(hidden), work)
    return torch.from_numpy(logits)
