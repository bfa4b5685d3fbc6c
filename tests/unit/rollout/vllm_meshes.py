"""Shapes and engines that the placement of weights in vLLM is tested with, and a rank's parameters made by it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.model.beam import BeamShape, tensors
from beamline.rollout.vllm.layout import Mesh, parameters, placed
from tests.tiny_beam import beam_config

MESHES = tuple(Mesh(t, p, e) for t in (1, 2, 4, 8) for p in (1, 2) for e in (False, True))

# Nothing divides evenly that need not: 3 layers, 18 experts, 70 tokens filled up to 128, of which late ranks hold none.
UNEVEN: dict[str, Any] = {"num_attention_heads": 8, "vocab_size": 70, "num_experts": 18, "n_group": 3}

RELEASE = BeamShape(
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=20480,
    num_hidden_layers=52,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1048576,
    sliding_window=512,
    moe_intermediate_size=2560,
    num_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    final_logit_softcapping=30.0,
    rms_norm_eps=1e-6,
    layer_types=tuple("full_attention" if i % 6 == 5 or i == 51 else "sliding_attention" for i in range(52)),
    mlp_layer_types=("dense",) * 3 + ("sparse",) * 49,
)


def uneven() -> BeamShape:
    return BeamShape.from_config(beam_config(**UNEVEN).to_dict())


def name_of(mesh: Mesh) -> str:
    return f"tensor{mesh.tensor}-pipeline{mesh.pipeline}" + "-experts" * mesh.experts


def checkpoint(shape: BeamShape) -> dict[str, NDArray[np.float32]]:
    """Random tensors under their Hugging Face names."""
    random = np.random.default_rng(0)
    return {spec.name: random.standard_normal(spec.shape, dtype=np.float32) for spec in tensors(shape, "float32")}


def assembled(
    shape: BeamShape, mesh: Mesh, rank: int, weights: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """The parameters of a rank with every part put where it is placed; what no part covers is 0."""
    held = {name: np.zeros(size, np.float32) for name, (size, _) in parameters(shape, mesh, rank, "float32").items()}
    for item in placed(shape, mesh, rank, "float32"):
        part = item.part
        source = tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))
        held[item.parameter][item.box] = weights[part.name][source]
    return held
