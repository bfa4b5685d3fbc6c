"""Attention of one query after the other over a cache of keys and values.

A layer's cache is a run of two flat arrays: keys ``[slots, KV, places / 16, d, 16]`` (blocks of 16 places, transposed,
so that scores are a product of rows) and values ``[slots, KV, places, d]``. Position p lies at ``p % places``.
The softmax and the weighted sum go over positions in their order, wherever they lie.
"""

from typing import Any

import numpy as np

from beamline.kernels.arithmetic import rounded, rounded_to_8_bits, total
from beamline.kernels.compiled import kernel
from beamline.kernels.linear import product
from beamline.kernels.rows import exponentials

BLOCK = 16


@kernel
def whole_blocks(places: int) -> int:
    """The places of as many blocks as hold so many."""
    return (places + BLOCK - 1) // BLOCK * BLOCK


@kernel
def key_at(place: int, size: int) -> int:
    """Where the key of a place begins, from the first of its head; its values lie ``BLOCK`` apart."""
    return place // BLOCK * size * BLOCK + place % BLOCK


@kernel
def store(
    keys: Any, values: Any, at: int, places: int, k: Any, qkvg: Any, v_first: int, slots: Any, positions: Any,
    kv_heads: int, size: int, in_8_bits: bool,
) -> None:  # fmt: skip
    """Write keys ``k [rows, KV * d]`` and values (columns ``v_first...`` of ``qkvg``) to their slots and places."""
    for i in range(len(k)):
        place = positions[i] % places
        for head in range(kv_heads):
            base = at + (slots[i] * kv_heads + head) * size * places
            key = base + key_at(place, size)
            value = base + place * size
            for j in range(size):
                of_key, of_value = k[i, head * size + j], qkvg[i, v_first + head * size + j]
                keys[key + j * BLOCK] = rounded_to_8_bits(of_key) if in_8_bits else of_key
                values[value + j] = rounded_to_8_bits(of_value) if in_8_bits else of_value


@kernel
def attend(
    q: Any, keys: Any, values: Any, at: int, places: int, window: int, slots: Any, positions: Any,
    kv_heads: int, group: int, size: int, scores: Any, out: Any, bf16: bool,
) -> None:  # fmt: skip
    """``out = softmax(q k^T / sqrt(d)) v`` over the last ``window`` positions of each row's slot.

    ``q`` and ``out`` are ``[rows, KV * group * d]``; ``scores [2 * group * places]`` is scratch.
    """
    scale = np.float32(1 / np.sqrt(size))
    queries, results = q.reshape(-1), out.reshape(-1)
    width = kv_heads * group * size
    ordered = group * places  # where in ``scores`` they lie in the order of their positions
    for i in range(len(q)):
        position = positions[i]
        first = max(0, position - window + 1)
        count = position + 1 - first
        begin = first % places
        before_end = min(count, places - begin)  # the rest wraps around to place 0
        wraps = count > before_end
        first_block = 0 if wraps else begin // BLOCK
        last_block = places // BLOCK if wraps else (begin + count - 1) // BLOCK + 1
        for head in range(kv_heads):
            base = at + (slots[i] * kv_heads + head) * size * places
            query = i * width + head * group * size
            for block in range(first_block, last_block):
                product(queries, query, size, keys, base + block * size * BLOCK, BLOCK, scores, block * BLOCK, places,
                        group, BLOCK, size, False)  # fmt: skip
            for g in range(group):
                source, target = g * places, ordered + g * places
                for j in range(before_end):
                    scores[target + j] = scores[source + begin + j]
                for j in range(count - before_end):
                    scores[target + before_end + j] = scores[source + j]
            exponentials(scores, ordered, places, group, count, scale)
            product(scores, ordered, places, values, base + begin * size, size, results, query, size,
                    group, size, before_end, False)  # fmt: skip
            if wraps:
                product(scores, ordered + before_end, places, values, base, size, results, query, size,
                        group, size, count - before_end, True)  # fmt: skip
            for g in range(group):
                share = total(scores, ordered + g * places, count)
                row = results[query + g * size : query + (g + 1) * size]
                for j in range(size):
                    row[j] = rounded(row[j] / share, bf16)
