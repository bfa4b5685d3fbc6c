"""The names of element types, as layouts and checkpoints have them, and torch's own."""

from typing import get_args

import torch

from beamline.model.layout import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {name: getattr(torch, name) for name in get_args(DType)}
DTYPE_NAMES = {value: name for name, value in TORCH_DTYPES.items()}
