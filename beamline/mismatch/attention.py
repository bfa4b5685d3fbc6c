"""Torch's attention for a pass on kernels, in place of theirs."""

import numpy as np
import torch
import torch.nn.functional as F

from beamline.policy.attention import window_mask
from beamline.policy.functions import Heads, Packed
from beamline.policy.positions import Floats


def torch_attention(q: Floats, k: Floats, qkvg: Floats, out: Floats, packed: Packed, window: int, heads: Heads) -> None:
    """``scaled_dot_product_attention`` of each sequence, in place of the sampler's attention."""
    for a, b in packed.spans:
        v = qkvg[a:b, heads.v_first : heads.v_first + heads.kv_width]
        query, key, value = (
            torch.from_numpy(np.ascontiguousarray(x)).unflatten(1, (-1, heads.size)).transpose(0, 1)
            for x in (q[a:b], k[a:b], v)
        )
        key, value = (x.repeat_interleave(heads.group, dim=0) for x in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=window_mask(b - a, window))
        out[a:b] = attended.transpose(0, 1).flatten(1).numpy()
