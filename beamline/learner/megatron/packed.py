"""What the layers of a pass know of the sequences that lie end to end in it: where they lie, and their positions."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import BeamConfig
from transformers.models.beam.modeling_beam import BeamRotaryEmbedding, compute_attention_scaling

from beamline.policy import passes
from beamline.policy.attention import Packing


@dataclass(frozen=True, slots=True)
class Packed:
    """What the layers of a pass share: where its sequences lie, rotations, and the scale of unrotated queries."""

    packing: Packing
    cos_Nd: Tensor
    sin_Nd: Tensor
    scale_N: Tensor

    @classmethod
    def of(cls, borders_B1: tuple[int, ...], config: BeamConfig, device: torch.device) -> "Packed":
        """Sequences with these borders; positions begin at 0 in each."""
        packing = Packing.of(borders_B1, device)
        rows, starts = borders_B1[-1], packing.cu_seqlens[:-1]
        starts = starts.repeat_interleave(packing.cu_seqlens.diff(), output_size=rows)
        position_ids_1N = (torch.arange(rows, device=device) - starts)[None]
        cos_Nd, sin_Nd = _rotations(config, position_ids_1N)
        scale = compute_attention_scaling(position_ids_1N).reshape(-1)
        return cls(packing, cos_Nd, sin_Nd, scale)

    def positioned(
        self, query_NHd: Tensor, key_NGd: Tensor, q_weight_d: Tensor, k_weight_d: Tensor, eps: float, rotated: bool
    ) -> tuple[Tensor, Tensor]:
        """Normed queries and keys that know their positions: rotated, or scaled queries."""
        given = query_NHd, key_NGd, q_weight_d, k_weight_d, eps
        if rotated:
            return passes.rotated(*given, self.cos_Nd, self.sin_Nd)
        return passes.scaled(*given, self.scale_N)


def _rotations(config: BeamConfig, position_ids_1N: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for layers with a window, one row a position; without columns where there is no such layer."""
    kind, device = "sliding_attention", position_ids_1N.device
    if kind not in config.layer_types:
        none = torch.empty(position_ids_1N.shape[1], 0, device=device)
        return none, none
    cos, sin = BeamRotaryEmbedding(config).to(device)(torch.empty(0, device=device), position_ids_1N, kind)
    return cos[0], sin[0]
