"""Attention over sequences that lie end to end, with a window or without, and what depends on positions."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BeamConfig
from transformers.models.beam.modeling_beam import BeamRotaryEmbedding, compute_attention_scaling

from beamline.policy import passes
from beamline.policy.attention import flash, flash_takes, window_mask


@dataclass(frozen=True, slots=True)
class Packed:
    """What the layers of a pass share: borders of the sequences, rotations, and the scale of unrotated queries.

    ``borders_B1`` are those of ``cu_seqlens_B1`` on the host; ``longest`` is the length of the longest sequence.
    """

    borders_B1: tuple[int, ...]
    cu_seqlens_B1: Tensor
    longest: int
    cos_Nd: Tensor
    sin_Nd: Tensor
    scale_N: Tensor

    @classmethod
    def of(cls, borders_B1: tuple[int, ...], config: BeamConfig, device: torch.device) -> "Packed":
        """Sequences with these borders; positions begin at 0 in each."""
        cu_seqlens = torch.tensor(borders_B1, dtype=torch.int32, device=device)
        rows, starts = borders_B1[-1], cu_seqlens[:-1]
        starts = starts.repeat_interleave(cu_seqlens.diff(), output_size=rows)
        position_ids_1N = (torch.arange(rows, device=device) - starts)[None]
        cos_Nd, sin_Nd = _rotations(config, position_ids_1N)
        scale = compute_attention_scaling(position_ids_1N).reshape(-1)
        longest = max(b - a for a, b in pairwise(borders_B1))
        return cls(borders_B1, cu_seqlens, longest, cos_Nd, sin_Nd, scale)

    @property
    def rows(self) -> int:
        """Rows of all sequences."""
        return self.borders_B1[-1]

    def positioned(
        self, query_NHd: Tensor, key_NGd: Tensor, q_weight_d: Tensor, k_weight_d: Tensor, eps: float, rotated: bool
    ) -> tuple[Tensor, Tensor]:
        """Normed queries and keys that know their positions: rotated, or scaled queries."""
        given = query_NHd, key_NGd, q_weight_d, k_weight_d, eps
        if rotated:
            return passes.rotated(*given, self.cos_Nd, self.sin_Nd)
        return passes.scaled(*given, self.scale_N)

    def attend(self, query_NHd: Tensor, key_NGd: Tensor, value_NGd: Tensor, window: int | None) -> Tensor:
        """Causal attention within each sequence, ``[N, H, d]``; a query sees ``window`` tokens, itself included.

        By torch's flash attention for 16 bits on a GPU; else sequence by sequence, which is for tests.
        """
        if flash_takes(query_NHd):
            return flash(query_NHd, key_NGd, value_NGd, self.cu_seqlens_B1, self.longest, window)
        spans = [slice(a, b) for a, b in pairwise(self.borders_B1)]
        return torch.cat([self._alone(query_NHd[span], key_NGd[span], value_NGd[span], window) for span in spans])

    @staticmethod
    def _alone(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        length, shared = len(query), query.shape[1] // key.shape[1]
        q, k, v = query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = window_mask(length, window).to(q.device) if window is not None and window < length else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out[0].transpose(0, 1)


def _rotations(config: BeamConfig, position_ids_1N: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for layers with a window, one row a position; without columns where there is no such layer."""
    kind, device = "sliding_attention", position_ids_1N.device
    if kind not in config.layer_types:
        none = torch.empty(position_ids_1N.shape[1], 0, device=device)
        return none, none
    cos, sin = BeamRotaryEmbedding(config).to(device)(torch.empty(0, device=device), position_ids_1N, kind)
    return cos[0], sin[0]
