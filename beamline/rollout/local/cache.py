"""Keys and values of the sequences being decoded.

Active sequences hold slots ``0..n-1``, so a decode step works on slices and gathers nothing. A sliding layer keeps a
ring of ``window`` places: position p lies at ``p % window``. The order inside a ring does not matter, because keys are
stored with their rotation and a softmax has no order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """Preallocated keys and values ``[slots, KV, places, d]`` of each layer; a full layer has a place per position."""

    def __init__(self, slots: int, places: Sequence[int], kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.keys = [torch.zeros(slots, kv_heads, n, head_dim, dtype=dtype) for n in places]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def places(self, layer: int) -> int:
        """Positions that a layer can hold."""
        return self.keys[layer].shape[2]

    def write(self, layer: int, slots_N: Tensor, positions_N: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key``, ``value [N, KV, d]``; of positions that share a place of a ring, only one may be given."""
        places_N = positions_N % self.places(layer)
        self.keys[layer][slots_N, :, places_N] = key
        self.values[layer][slots_N, :, places_N] = value

    def read(self, layer: int, slots: int, positions: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``slots`` slots, as many places as ``positions`` positions can fill."""
        places = min(positions, self.places(layer))
        return self.keys[layer][:slots, :, :places], self.values[layer][:slots, :, :places]

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another."""
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
