"""A module's tensors under the names of its Hugging Face checkpoint, as views: reading and writing in place.

In memory the module stacks experts (``experts.gate_up_proj [E, 2 I, D]``); the checkpoint, the transfer and the
optimizer's files name each expert's matrices. Nothing is copied to go from one to the other.
"""

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from beamline.model.layout import Layout, TensorSlice
from beamline.policy.lora import Adapters
from beamline.transfer.dtypes import DTYPE_NAMES

Split = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
"""Views of an in-memory tensor under the names of what is stored of it."""


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


def split_of(module: nn.Module) -> Split:
    """How tensors shaped like those of a model, or of its adapters, are cut into what is stored by name."""
    return module.split if isinstance(module, Adapters) else split_experts


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every stored tensor of a model or of its adapters (parameters and buffers) under its name, detached."""
    state, split = cast(dict[str, Tensor], module.state_dict(keep_vars=False)), split_of(module)
    return {part: view for name, tensor in state.items() for part, view in split(name, tensor)}


def module_layout(module: nn.Module) -> Layout:
    """The layout of a model, or of its adapters, that one rank holds whole."""
    tensors = named_tensors(module)
    return Layout((tuple(TensorSlice.whole(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()),))


def raw(tensor: Tensor) -> Tensor:
    """The tensor's bits as unsigned integers of its element width, which numpy can hold for every type."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.detach().contiguous().view(unsigned)
