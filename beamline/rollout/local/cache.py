"""Keys and values of the sequences being decoded, laid out as :mod:`beamline.kernels.attention` reads them.

A sliding layer keeps a ring of about ``window`` places: position p lies at ``p % places``. All layers
share one flat array of keys and one of values, so that a compiled call takes a cache of any number of layers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.kernels.attention import BLOCK, key_at, whole_blocks
from beamline.kernels.compiled import kernel


class SlotCache:
    """Preallocated keys and values of each layer.

    Layer l begins at ``at[l]`` of both ``keys`` and ``values``, and has ``places[l]``: what was asked for, in whole
    blocks.
    """

    def __init__(self, slots: int, places: Sequence[int], kv_heads: int, head_dim: int) -> None:
        self.places = np.array([whole_blocks(n) for n in places])
        sizes = self.places * kv_heads * head_dim * slots
        ends = np.cumsum(sizes)
        self.at = ends - sizes
        # Scores of places that hold nothing are computed, though never used; pages of zeros are free until touched.
        self.keys, self.values = (np.zeros(int(ends[-1]), np.float32) for _ in range(2))
        self._width = kv_heads, head_dim

    def fill(self, source: "SlotCache", length: int, slots: NDArray[np.int64]) -> None:
        """Copy a sequence of ``length`` positions from slot 0 of a cache without rings to several slots."""
        kv_heads, head_dim = self._width
        _fill(
            source.keys, source.values, source.at, source.places, self.keys, self.values, self.at, self.places,
            kv_heads, head_dim, length, slots,
        )  # fmt: skip


@kernel
def _fill(
    keys: Any, values: Any, at: Any, places: Any, to_keys: Any, to_values: Any, to_at: Any, to_places: Any,
    kv_heads: int, size: int, length: int, slots: Any,
) -> None:  # fmt: skip
    for layer in range(len(places)):
        wide, ring = places[layer], to_places[layer]
        for slot in slots:
            for head in range(kv_heads):
                source = at[layer] + head * size * wide
                target = to_at[layer] + (slot * kv_heads + head) * size * ring
                for p in range(max(0, length - ring), length):
                    place = p % ring
                    key, to_key = source + key_at(p, size), target + key_at(place, size)
                    for j in range(size):
                        to_keys[to_key + j * BLOCK] = keys[key + j * BLOCK]
                        to_values[target + place * size + j] = values[source + p * size + j]
