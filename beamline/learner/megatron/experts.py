"""Experts spread over ranks: each row goes to the ranks of its experts and comes back, in one exchange each way."""

from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_to_all_single
from transformers import BeamConfig
from transformers.models.beam.modeling_beam import BeamTopKRouter

from beamline.learner.megatron.recompute import Make, kept
from beamline.policy.grouped import grouped_linear
from beamline.policy.passes import gather, inverse, mixed, swiglu
from beamline.policy.router import chosen_experts, chosen_weights, sorted_by_expert


class Experts(nn.Module):
    """The experts of a layer that this rank holds, neighbours in a row.

    Args:
        config: of the model.
        ranks: those that share the experts; this one's index among them says which are its own.
        dtype: of the weights.
        make: how what lies between products of matrices is held for the backward pass.
    """

    def __init__(self, config: BeamConfig, ranks: ProcessGroup, dtype: torch.dtype, make: Make) -> None:
        super().__init__()
        self._make = make
        self._ranks, self._all = ranks, config.num_experts
        self._own = config.num_experts // ranks.size()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self._own, 2 * width, hidden, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(self._own, hidden, width, dtype=dtype))

    def forward(self, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> Tensor:
        """``sum_k weights[i, k] * expert chosen[i, k] of x[i]``, ``[N, D]``, summed in float32 and rounded once.

        The order of the sum is that of the choice, whichever ranks the experts are on.
        """
        order, back, ends = sorted_by_expert(chosen_NK, self._all)
        # What goes to other ranks is not kept here in any case.
        make = self._make if self._ranks.size() == 1 else kept
        rows, used = make(gather, x_ND, order // chosen_NK.shape[1], back, chosen_NK.shape[1])
        outer = used(self._at_experts(rows, ends))
        return mixed(outer, weights_NK, order, back)

    def _at_experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What experts make of rows in the order of their experts, of which those of expert e end at ``ends[e]``."""
        ranks = self._ranks.size()
        if ranks == 1:
            return self._own_experts(rows, ends)
        sent = ends.diff(prepend=ends.new_zeros(1))
        received = torch.empty_like(sent)  # [rank, own expert]
        all_to_all_single(received, sent, group=self._ranks)
        out_splits, in_splits = torch.stack([sent, received]).view(2, ranks, -1).sum(2).tolist()
        rows = all_to_all(self._ranks, rows, in_splits, out_splits)
        numbers = torch.arange(self._own, device=rows.device).repeat(ranks)
        order = numbers.repeat_interleave(received, output_size=sum(in_splits)).argsort(stable=True)
        back = inverse(order)
        own_ends = received.view(ranks, -1).sum(0).cumsum(0, dtype=torch.int32)
        outer = self._own_experts(gather(rows, order, back, 1), own_ends)
        return cast(Tensor, all_to_all(self._ranks, gather(outer, back, order, 1), out_splits, in_splits))

    def _own_experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        inner, used = self._make(swiglu, grouped_linear(rows, self.gate_up_proj, ends))
        return used(grouped_linear(inner, self.down_proj, ends))


class Moe(nn.Module):
    """A router, which is the same on all ranks, and its experts."""

    def __init__(self, config: BeamConfig, ranks: ProcessGroup, dtype: torch.dtype, make: Make) -> None:
        super().__init__()
        self._make = make
        self.gate = BeamTopKRouter(config).float()
        self.experts = Experts(config, ranks, dtype, make)
        self._factor: float = config.routed_scaling_factor

    def forward(self, x_N1D: Tensor) -> Tensor:
        """Rows ``[N, 1, D]`` of this rank."""
        x_ND = x_N1D.squeeze(1)
        gate = self.gate
        wide_ND, used = self._make(_wide, x_ND)
        logits_NE = used(F.linear(wide_ND, gate.weight))
        bias_E = gate.e_score_correction_bias
        chosen_NK = chosen_experts(logits_NE, bias_E, gate.num_group, gate.topk_group, gate.top_k)
        weights_NK = chosen_weights(logits_NE, chosen_NK, gate.norm_topk_prob)
        out: Tensor = self.experts(x_ND, weights_NK, chosen_NK) * self._factor
        return out.unsqueeze(1)


def _wide(x: Tensor) -> Tensor:
    """A float32 copy, also of what is float32."""
    return x.to(torch.float32, copy=True)
