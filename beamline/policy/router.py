"""Which experts a row goes to, and by which weights it takes what they make of it."""

import torch
from torch import Tensor

from beamline.policy.fused import fused
from beamline.policy.passes import inverse


@torch.no_grad()
@fused("bias_E")
def chosen_experts(logits_NE: Tensor, bias_E: Tensor, groups: int, groups_kept: int, choices: int) -> Tensor:
    """The experts of each row, ``[N, choices]`` int64, the best first; of equals the one with the lower number.

    As ``BeamTopKRouter`` chooses them: by score and bias, among the groups of experts whose two best add up to most.
    Every expert is compared with every other, which a GPU does in one pass, and its top-k in many.
    """
    by_group = (logits_NE.sigmoid() + bias_E).unflatten(1, (groups, -1))
    members = torch.arange(by_group.shape[2], device=logits_NE.device)
    best, where = by_group.max(dim=-1)
    second = by_group.masked_fill(members == where[..., None], -torch.inf).amax(dim=-1)
    kept = _ranks(best + second) < groups_kept
    ranks_NE = _ranks(by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1))
    experts = torch.arange(ranks_NE.shape[1], device=logits_NE.device)
    places = torch.arange(choices, device=logits_NE.device)
    return torch.where(ranks_NE[:, None] == places[:, None], experts, 0).sum(dim=-1)


@fused()
def chosen_weights(logits_NE: Tensor, chosen_NK: Tensor, normed: bool) -> Tensor:
    """The scores of chosen experts, ``[N, K]``; ``normed`` to a sum of 1."""
    experts = torch.arange(logits_NE.shape[1], device=logits_NE.device)
    weights = torch.where(chosen_NK[..., None] == experts, logits_NE.sigmoid()[:, None], 0.0).sum(dim=-1)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) if normed else weights


def sorted_by_expert(chosen_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """All choices in the order of their experts, and of their rows for each: which they are, and where each went.

    The third are the ends of each expert's choices, ``[experts]`` int32.
    """
    # By 16 bits, because a GPU sorts a byte at a time.
    by_expert, order = chosen_NK.reshape(-1).short().sort(stable=True)
    numbers = torch.arange(experts, dtype=torch.short, device=order.device)
    return order, inverse(order), torch.searchsorted(by_expert, numbers, right=True, out_int32=True)


def _ranks(x: Tensor) -> Tensor:
    """How many of a row come before each of its elements: each place is taken once, whatever they are.

    What is no number comes first, as in torch's top-k: it is chosen, and the loss shows it.
    """
    x = x.masked_fill(x.isnan(), torch.inf)
    numbers = torch.arange(x.shape[-1], device=x.device)
    before = (x[..., None, :] > x[..., :, None]) | ((x[..., None, :] == x[..., :, None]) & (numbers < numbers[:, None]))
    return before.sum(dim=-1)
