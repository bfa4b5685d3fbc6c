"""A tiny random Beam with every trait of the real one, and the Hugging Face module to hold others against.

One dense and two MoE layers, sliding and full attention, a window shorter than the sequences, grouped key heads and
experts, and no parameter left at a value that would hide it: norms are not 1, gate and selection biases are not 0,
logits are large enough for the soft cap to bend them.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BeamConfig, BeamForCausalLM

from beamline.model.beam import BeamShape
from beamline.model.layout import DType
from beamline.policy import model

VOCAB, WINDOW, CONTEXT = 64, 8, 96
THETA = 100.0


LARGER: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 256,
    "sliding_window": 32,
}
"""Changes that make it large enough for kernels of a GPU, those of 8 bits among them."""


def beam_config(**changes: Any) -> BeamConfig:
    """The configuration; ``changes`` replace fields."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "max_position_embeddings": CONTEXT,
        "moe_intermediate_size": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
            "full_attention": None,
        },
    }
    return BeamConfig(**fields | changes)


def beam_shape(**changes: Any) -> BeamShape:
    """The same, as our torch-free shape."""
    return BeamShape.from_config(beam_config(**changes).to_dict())


@torch.no_grad()
def random_beam(seed: int = 0, dtype: DType = "float32", **changes: Any) -> nn.Module:
    """A module with packed attention and random weights; equal seeds give equal weights."""
    module = model.build(beam_config(**changes), dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(_scaled(name, noise))
    return module


def _scaled(name: str, noise: Tensor) -> Tensor:
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith("gate_bias"):
        return 0.5 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith("lm_head.weight"):
        return 0.6 * noise
    return noise / math.sqrt(noise.shape[-1])


def reference(module: nn.Module) -> BeamForCausalLM:
    """A plain Hugging Face module with the same weights: eager experts and, but in double precision, attention.

    Its eager attention takes the softmax in float32, so that in double precision torch's attention takes its place.
    """
    dtype = cast(Tensor, cast(Any, module).lm_head.weight).dtype
    config = BeamConfig(**cast(Any, module).config.to_dict())
    attention = "sdpa" if dtype == torch.float64 else "eager"
    copy = BeamForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
    copy.set_experts_implementation("eager")
    copy.load_state_dict(module.state_dict(), assign=True)
    return copy.eval()


@dataclass(frozen=True)
class Evaluated:
    """What the Hugging Face module makes of one sequence of S tokens."""

    logits_SV: Tensor
    routes_SLK: NDArray[np.int64]

    def logprobs(self, temperature: float = 1.0) -> NDArray[np.float32]:
        """Log-probabilities ``[S, V]`` of the next token."""
        return torch.log_softmax(self.logits_SV / temperature, dim=-1).numpy()


@torch.no_grad()
def evaluate(plain: BeamForCausalLM, token_ids: NDArray[np.integer]) -> Evaluated:
    """Run one sequence through the Hugging Face module, alone and without a cache."""
    gates = [layer.mlp.gate for layer in plain.model.layers if hasattr(layer.mlp, "gate")]
    chosen: list[Tensor] = []
    hooks = [gate.register_forward_hook(lambda _gate, _in, out: chosen.append(out[2])) for gate in gates]
    logits = plain(torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    none = torch.zeros(len(token_ids), 0, plain.config.num_experts_per_tok, dtype=torch.int64)
    return Evaluated(logits, (torch.stack(chosen, dim=1) if chosen else none).numpy())


def teacher_forced(
    plain: BeamForCausalLM, token_ids: NDArray[np.integer], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Log-probability ``[S - 1]`` of each token but the first, given those before it."""
    logprobs = evaluate(plain, token_ids[:-1]).logprobs(temperature)
    chosen: NDArray[np.float32] = logprobs[np.arange(len(logprobs)), token_ids[1:]]
    return chosen
