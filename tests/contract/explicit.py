"""The model with adapters, written out: ``W + scale * B A``, or adapters beside W that read what dropout leaves."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from transformers import BeamForCausalLM

from beamline.learner.learner import Learner
from beamline.policy.dropout import Dropout
from tests.contract.learning import batch, weights
from tests.tiny_beam import reference

SIZE = 0.1
"""Deviation of B: adapters change log-probabilities by a few tenths."""
Stored = Mapping[str, Tensor]
"""Tensors of adapters by their names."""


def adapter_of(stored: Stored, place: str, projection: str) -> tuple[Tensor, Tensor] | None:
    """A and B of a linear layer, by the names of stored tensors; of those that share an A one alone has it."""
    b = stored.get(f"{place}.{projection}.lora_B.weight")
    if b is None and ".experts." in place:
        return adapter_of(stored, place.rpartition(".")[0], projection)
    if b is None:
        return None
    groups = [("q_proj", "k_proj", "v_proj", "gate_proj")] if "self_attn" in place else [("gate_proj", "up_proj")]
    names = [f"{place}.{p}.lora_A.weight" for p in next((g for g in groups if projection in g), (projection,))]
    return next(stored[name] for name in names if name in stored), b


def merged(plain: BeamForCausalLM, stored: Stored, scale: float) -> dict[str, Tensor]:
    """The parameters of the Hugging Face module with ``scale * B A`` added to them."""

    def added(place: str, projection: str, weight: Tensor) -> Tensor:
        pair = adapter_of(stored, place, projection)
        return weight if pair is None else weight + scale * pair[1] @ pair[0]

    found = {}
    for name, weight in plain.named_parameters():
        place, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf == "gate_up_proj":
            halves = [weight.chunk(2, dim=1)[i] for i in range(2)]
            stacks = [
                torch.stack([added(f"{place}.{e}", p, w) for e, w in enumerate(half)])
                for p, half in zip(("gate_proj", "up_proj"), halves, strict=True)
            ]
            found[name] = torch.cat(stacks, dim=1)
        elif weight.dim() == 3:
            found[name] = torch.stack([added(f"{place}.{e}", leaf, w) for e, w in enumerate(weight)])
        else:
            found[name] = added(place, leaf, weight)
    return found


def doubles(learner: Learner[Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value).requires_grad_() for name, value in weights(learner).items()}


def gradients_of(stored: Stored) -> dict[str, NDArray[np.float64]]:
    return {name: np.zeros(t.shape) if t.grad is None else t.grad.numpy() for name, t in stored.items()}


def logits_of_merged(module: nn.Module, stored: Stored, scale: float) -> Any:
    plain = reference(module)
    tensors = merged(plain, stored, scale)
    return lambda ids: functional_call(plain, tensors, (ids[None],), {"use_cache": False}).logits[0]


def written_experts(
    experts: Any, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, place: str, stored: Stored, scale: float,
    masks: Dropout,
) -> Tensor:  # fmt: skip
    """The experts' output, one token and choice after the other."""
    (N, D), K, inner = x_ND.shape, chosen_NK.shape[1], experts.intermediate_dim
    outer_masks = masks.factors(f"{place}.gate_proj", D, K).view(N, K, D)
    inner_masks = masks.factors(f"{place}.down_proj", inner, K).view(N, K, inner)

    def linear(weight: Tensor, x: Tensor, mask: Tensor, expert: int, projection: str) -> Tensor:
        pair = adapter_of(stored, f"{place}.{expert}", projection)
        return weight @ x if pair is None else weight @ x + scale * (pair[1] @ (pair[0] @ (x * mask)))

    rows = []
    for i in range(N):
        parts = []
        for k, expert in enumerate(chosen_NK[i].tolist()):
            halves = zip(experts.gate_up_proj[expert].chunk(2), ("gate_proj", "up_proj"), strict=True)
            gate_up = [linear(weight, x_ND[i], outer_masks[i, k], expert, which) for weight, which in halves]
            hidden = experts._apply_gate(torch.cat(gate_up))
            down = linear(experts.down_proj[expert], hidden, inner_masks[i, k], expert, "down_proj")
            parts.append(weights_NK[i, k] * down)
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def logits_of_masked(plain: BeamForCausalLM, stored: Stored, scale: float, masks: Dropout, ids: Tensor) -> Tensor:
    """Logits of one sequence by the Hugging Face module with adapters beside its linear layers, as PEFT has them."""

    def linear(place: str, projection: str) -> Any:
        group = ("q_proj", "k_proj", "v_proj", "gate_proj") if "self_attn" in place else ("gate_proj", "up_proj")
        first = group[0] if projection in group else projection

        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
            pair = adapter_of(stored, place, projection)
            if pair is None:
                return None
            mask = masks.factors(f"{place}.{first}", inputs[0].shape[-1])
            return output + scale * (inputs[0] * mask) @ pair[0].T @ pair[1].T

        return hook

    hooks = []
    for name, module in plain.named_modules():
        place, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_hook(linear(place, leaf)))
        elif leaf == "experts":
            expert = partial(written_experts, place=name, stored=stored, scale=scale, masks=masks)
            hooks.append(module.register_forward_hook(lambda m, args, _, expert=expert: expert(m, *args)))
    logits = plain(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return cast(Tensor, logits)


def logprobs_of(learner: Learner[Any], which: Any = "policy") -> list[NDArray[np.float32]]:
    found = learner.forward(batch(), ["logprobs"], which).logprobs
    assert found is not None
    return list(found)
