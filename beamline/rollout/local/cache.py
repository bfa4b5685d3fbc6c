"""Keys and values of the sequences being decoded.

Active sequences hold slots ``0..n-1``, so a decode step works on slices and gathers nothing. A sliding layer keeps a
ring of ``window`` places: position p lies at ``p % window``. The order inside a ring does not matter, because keys are
stored with their rotation and a softmax has no order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """Preallocated keys and values of each layer, side by side: ``[slots, places, KV, 2 d]``.

    A full layer has a place for each position. One tensor for both halves the number of scattered writes.
    """

    def __init__(self, slots: int, places: Sequence[int], kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._layers = [torch.zeros(slots, n, kv_heads, 2 * head_dim, dtype=dtype) for n in places]

    def places(self, layer: int) -> int:
        """Positions that a layer can hold."""
        return self._layers[layer].shape[1]

    def write(self, layer: int, slots_N: Tensor, positions_N: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key``, ``value [N, KV, d]``; of positions that share a place of a ring, only one may be given."""
        places = self.places(layer)
        rows_N = slots_N * places + positions_N % places
        self._layers[layer].flatten(0, 1).index_copy_(0, rows_N, torch.cat([key, value], dim=-1))

    def read(self, layer: int, slots: int, positions: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[slots, KV, places, d]`` of the first slots, in as many places as positions can fill."""
        places = min(positions, self.places(layer))
        keys, values = self._layers[layer][:slots, :places].transpose(1, 2).chunk(2, dim=-1)
        return keys, values

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another."""
        for tensor in self._layers:
            tensor[target] = tensor[source]
