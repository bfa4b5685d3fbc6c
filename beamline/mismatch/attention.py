"""The learner's pass on kernels, with torch's attention in place of theirs."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from beamline.config.schema import PolicyConfig
from beamline.policy import parity
from beamline.policy.attention import Packing, window_mask
from beamline.policy.functions import Heads, Packed
from beamline.policy.lora import Adapters
from beamline.policy.positions import Floats
from beamline.records import Experience, pack


@torch.no_grad()
def attention_logprobs(
    module: nn.Module, adapters: Adapters | None, policy: PolicyConfig, batch: Sequence[Experience]
) -> list[NDArray[np.float32]]:
    """Log-probabilities ``[S - 1]`` of all tokens of each sequence but the first."""
    found = []
    for experience in batch:
        packed = pack([experience])
        packing = Packing.of(packed.cu_seqlens_B1.tolist())
        ids, positions = torch.from_numpy(packed.input_ids_N), torch.from_numpy(packed.position_ids_N)
        routes = packed.routes_NLK if policy.r3 else None
        hidden = parity.hidden_states(module, ids, positions, packing, adapters, routes, attend=torch_attention)
        typed, targets = cast(Any, module), torch.from_numpy(packed.target_ids_N)
        temperature = torch.full((packed.rows,), float(packed.temperature_B[0]))
        cap, chunk = typed.config.final_logit_softcapping, policy.head_chunk_rows
        logprobs, _ = parity.head_logprobs(
            hidden, typed.lm_head.weight, targets, temperature, cap, chunk, packed.support_N
        )
        found.append(logprobs.numpy())
    return found


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
