"""What attention makes of a token's position."""

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def position_tables(head_dim: int, theta: float, positions: int) -> tuple[Floats, Floats, Floats]:
    """Cosine and sine ``[positions, d / 2]`` of sliding layers' rotation, and the query factor ``[positions]`` of full.

    Computed by torch, as the Hugging Face module does it: those of other libraries differ in the last bit.
    """
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    places = torch.arange(positions).float()
    angles = places[:, None] * inverse
    return angles.cos().numpy(), angles.sin().numpy(), torch.exp(0.1 * torch.log1p((places + 1) / 2048)).numpy()
