"""What a pass of the tiny Beam may bring: adapters with an effect, and routes that no router would choose."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamline.model.beam import BeamShape
from beamline.model.lora import LoraShape
from beamline.policy.lora import Adapters
from beamline.policy.weights import named_tensors
from beamline.rollout.routes import route_dtype

LORAS = {
    "per expert": LoraShape(8, 12.0),
    "rank 24": LoraShape(24, 24.0),
    "shared per layer": LoraShape(8, 12.0, experts="shared_per_layer"),
    "none on experts": LoraShape(8, 8.0, experts="none"),
    "some targets": LoraShape(8, 24.0, ("k_proj", "self_attn.gate_proj", "experts.up_proj", "mlp.down_proj")),
    "experts alone": LoraShape(8, 24.0, ("experts.down_proj",)),
}
PER_EXPERT = LORAS["per expert"]
loras = pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)

Routes = NDArray[np.unsignedinteger]


@torch.no_grad()
def random_adapters(shape: BeamShape, lora: LoraShape | None = None, b: float = 0.1, seed: int = 0) -> Adapters:
    """Adapters whose B are random numbers of the deviation ``b``; equal arguments give equal ones.

    They are on every linear layer, if nothing else is asked. With ``b=0`` they are as training begins, and with 0.3
    they change a model about as much as its weights do.
    """
    every = LoraShape(8, 12.0, experts="per_expert" if shape.moe_layers else "none")
    adapters, generator = Adapters(shape, lora or every, "kaiming", seed), torch.Generator().manual_seed(seed)
    for name, tensor in named_tensors(adapters).items():
        if ".lora_B." in name:
            tensor.copy_(b * torch.randn(tensor.shape, generator=generator))
    return adapters


def random_routes(shape: BeamShape, rows: int, seed: int = 0) -> Routes:
    """Distinct experts ``[rows, L, K]``, hardly ever those that a router would choose."""
    every = np.broadcast_to(np.arange(shape.num_experts), (rows, len(shape.moe_layers), shape.num_experts))
    shuffled = np.random.default_rng(seed).permuted(every, axis=-1)
    return shuffled[..., : shape.num_experts_per_tok].astype(route_dtype(shape))
