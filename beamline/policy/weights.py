"""A module's tensors under the names of its Hugging Face checkpoint, as views: reading and writing in place.

In memory the module stacks experts (``experts.gate_up_proj [E, 2 I, D]``); the checkpoint, the transfer and the
optimizer's files name each expert's matrices. Nothing is copied to go from one to the other.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from beamline.model.layout import DType, Layout, TensorSlice

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}
DTYPE_NAMES = {value: name for name, value in TORCH_DTYPES.items()}


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of one in-memory tensor under its checkpoint names; a tensor that is stored as it is gives itself."""
    stem, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj" and stem.endswith(".experts"):
        width = tensor.shape[1] // 2
        for expert, matrix in enumerate(tensor):
            yield f"{stem}.{expert}.gate_proj.weight", matrix[:width]
            yield f"{stem}.{expert}.up_proj.weight", matrix[width:]
    elif leaf == "down_proj" and stem.endswith(".experts"):
        for expert, matrix in enumerate(tensor):
            yield f"{stem}.{expert}.down_proj.weight", matrix
    else:
        yield name, tensor


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every stored tensor of the module (parameters and persistent buffers) under its checkpoint name, detached."""
    state = cast(dict[str, Tensor], module.state_dict(keep_vars=False))
    return {part: view for name, tensor in state.items() for part, view in split_experts(name, tensor)}


def module_layout(module: nn.Module) -> Layout:
    """The layout of a module that one rank holds whole."""
    tensors = named_tensors(module)
    return Layout((tuple(TensorSlice.whole(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()),))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a value that is not finite."""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)


def raw(tensor: Tensor) -> Tensor:
    """The tensor's bits as unsigned integers of its element width, which numpy can hold for every type."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.detach().contiguous().view(unsigned)
