"""What attention makes of a token's position."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_BLOCK = 1024  # positions computed together, always as many, so that a table does not depend on how long it is


def rope_theta(config: Any) -> float:
    """The base of the rotation in sliding layers, of a Hugging Face configuration."""
    return float(config.rope_parameters["sliding_attention"]["rope_theta"])


def position_tables(head_dim: int, theta: float, positions: int) -> tuple[Floats, Floats, Floats]:
    """Cosine and sine ``[positions, d / 2]`` of sliding layers' rotation, and the query factor ``[positions]`` of full.

    The factor is scalable softmax, ``exp(0.1 log(1 + (p + 1) / 2048))``, as in ``compute_attention_scaling`` of
    transformers. Computed by torch, as the Hugging Face module does it: other libraries differ in the last bit.
    """
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    blocks = [_block(first, inverse) for first in range(0, positions, _BLOCK)]
    cos, sin, stretch = (np.concatenate(parts)[:positions] for parts in zip(*blocks, strict=True))
    return cos, sin, stretch


def _block(first: int, inverse: torch.Tensor) -> tuple[Floats, Floats, Floats]:
    places = torch.arange(first, first + _BLOCK).float()
    angles = places[:, None] * inverse
    return angles.cos().numpy(), angles.sin().numpy(), torch.exp(0.1 * torch.log1p((places + 1) / 2048)).numpy()
