"""The activation of dense layers and experts."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows ``[gate | up]``, in float32 and rounded once."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)
