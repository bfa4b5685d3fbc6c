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
        held[item.parameter][item.box] = weights[item.part.name][item.part.index]
    return held
