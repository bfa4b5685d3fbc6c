"""A Beam layer, its matrices cut over tensor ranks.

Between the matrices each tensor rank has its own part of the rows (sequence parallel). Inputs are ``[rows, 1, D]``, as
Megatron-Core's layers take them. Matrices are of Megatron-Core; what lies between them is of ``beamline/policy``, and
rounds where the module of transformers does.
"""

from functools import partial

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import BeamConfig
from transformers.models.beam.modeling_beam import BeamRMSNorm

from beamline.learner.megatron.experts import Moe
from beamline.learner.megatron.packed import Packed
from beamline.learner.megatron.recompute import Make
from beamline.policy.attention import attend
from beamline.policy.passes import gated, norm, normed_sum, residual_shares, swiglu


class Attention(nn.Module):
    """Attention with a gate for each head. A tensor rank has the query heads of its key heads."""

    def __init__(self, config: BeamConfig, layer: int, parallel: ModelParallelConfig, make: Make) -> None:
        super().__init__()
        self._make = make
        ranks, self._head = parallel.tensor_model_parallel_size, config.head_dim
        q, kv = (heads // ranks * self._head for heads in (config.num_attention_heads, config.num_key_value_heads))
        self._widths = q, kv, kv, q
        self._window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.gate_bias = nn.Parameter(torch.empty(q // self._head, dtype=parallel.params_dtype))
        self.qkvg_proj = column(config.hidden_size, sum(self._widths) * ranks, parallel)
        self.o_proj = row(q * ranks, config.hidden_size, parallel)
        head_norm = partial(BeamRMSNorm, self._head, config.rms_norm_eps)
        self.q_norm, self.k_norm = head_norm().to(parallel.params_dtype), head_norm().to(parallel.params_dtype)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        """Of this rank's rows; attends over all rows."""
        qkvg = self.qkvg_proj(x)[0].squeeze(1)
        parts = qkvg.split(self._widths, dim=-1)
        query, key, value, gate = (part.unflatten(-1, (-1, self._head)) for part in parts)
        norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon
        (query, key), used = self._make(packed.positioned, query, key, *norms, self._window is not None)
        out = used(attend(query, key, value, packed.packing, self._window))
        out, used = self._make(gated, out, gate, self.gate_bias)
        return used(self.o_proj(out.flatten(1).unsqueeze(1))[0])


class Mlp(nn.Module):
    """A dense layer: each tensor rank has a part of the hidden units."""

    def __init__(self, config: BeamConfig, parallel: ModelParallelConfig, make: Make) -> None:
        super().__init__()
        self._make = make
        self.gate_up_proj = column(config.hidden_size, 2 * config.intermediate_size, parallel)
        self.down_proj = row(config.intermediate_size, config.hidden_size, parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Of this rank's rows."""
        x, used = self._make(swiglu, self.gate_up_proj(x)[0])
        return used(self.down_proj(x)[0])


class Layer(nn.Module):
    """Attention and an MLP, each between two norms, added to what came in by a share that shrinks with depth.

    Args:
        config: of the model.
        layer: its number.
        parallel: how matrices are cut.
        experts: the ranks that share the experts.
        make: how what lies between products of matrices is held for the backward pass.
    """

    def __init__(
        self, config: BeamConfig, layer: int, parallel: ModelParallelConfig, experts: ProcessGroup, make: Make
    ) -> None:
        super().__init__()
        self._make = make
        self.self_attn = Attention(config, layer, parallel, make)
        sparse = config.mlp_layer_types[layer] == "sparse"
        self.mlp = Moe(config, experts, parallel.params_dtype, make) if sparse else Mlp(config, parallel, make)
        layer_norm = partial(BeamRMSNorm, config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = layer_norm().to(parallel.params_dtype)
        self.post_attention_layernorm = layer_norm().to(parallel.params_dtype)
        self.pre_feedforward_layernorm = layer_norm().to(parallel.params_dtype)
        self.post_feedforward_layernorm = layer_norm().to(parallel.params_dtype)
        self._eps: float = config.rms_norm_eps
        self._adds = 2 * (layer + 1), 2 * (layer + 1) + 1

    def forward(self, h: Tensor, packed: Packed) -> Tensor:
        """Of this rank's rows ``[rows, 1, D]``."""
        first, second = (residual_shares(add, h.device) for add in self._adds)
        x, used = self._make(norm, h, self.input_layernorm.weight, self._eps)
        x = used(self.self_attn(x, packed))
        h = normed_sum(x, h, self.post_attention_layernorm.weight, self._eps, first)
        x, used = self._make(norm, h, self.pre_feedforward_layernorm.weight, self._eps)
        x = used(self.mlp(x))
        return normed_sum(x, h, self.post_feedforward_layernorm.weight, self._eps, second)


def column(inputs: int, outputs: int, parallel: ModelParallelConfig) -> ColumnParallelLinear:
    """A matrix whose outputs are cut over the tensor ranks; without a bias, and not filled."""
    return ColumnParallelLinear(inputs, outputs, config=parallel, init_method=_none, bias=False)


def row(inputs: int, outputs: int, parallel: ModelParallelConfig) -> RowParallelLinear:
    """A matrix whose inputs are cut over the tensor ranks; without a bias, and not filled."""
    return RowParallelLinear(
        inputs, outputs, config=parallel, init_method=_none, bias=False, input_is_parallel=True, skip_bias_add=True
    )


def _none(_: Tensor) -> None:
    """Weights are read, not drawn."""
