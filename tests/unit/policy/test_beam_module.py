"""The module on packed sequences against the plain Hugging Face module on each sequence alone."""

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beamline.model.beam import tensors
from beamline.policy import model
from beamline.policy.attention import Packing
from beamline.policy.weights import named_tensors, raw
from beamline.transfer.dtypes import TORCH_DTYPES
from tests.tiny_beam import VOCAB, WINDOW, beam_config, beam_shape, random_beam, reference

LENGTHS = [5, 40, 1, 17, 39, 2, 8, 9, 1, 30]
BORDERS = [0, *np.cumsum(LENGTHS).tolist()]
IDS = torch.randint(VOCAB, (BORDERS[-1],), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])


def packed_logits(module: nn.Module) -> Tensor:
    """Uncapped logits ``[N, V]`` of all sequences packed end to end."""
    hidden = model.hidden_states(module, IDS, POSITIONS, Packing.of(BORDERS))
    return cast(Tensor, cast(Any, module).lm_head(hidden))


def alone_logits(module: nn.Module) -> Tensor:
    """The same by the plain module, one sequence at a time."""
    plain = reference(module)
    alone = [plain.model(IDS[None, a:b], use_cache=False).last_hidden_state[0] for a, b in pairwise(BORDERS)]
    return cast(Tensor, plain.lm_head(torch.cat(alone)))


def masked_logits(module: nn.Module) -> Tensor:
    """The same by the plain module, in one row of all sequences with dense masks."""
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    distance = POSITIONS[:, None] - POSITIONS
    causal = (sequence[:, None] == sequence) & (distance >= 0)
    masks = {"full_attention": causal, "sliding_attention": causal & (distance < WINDOW)}
    plain = reference(module)
    hidden = plain.model(
        IDS[None],
        position_ids=POSITIONS[None],
        attention_mask={name: mask[None, None] for name, mask in masks.items()},
        use_cache=False,
    ).last_hidden_state[0]
    return cast(Tensor, plain.lm_head(hidden))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    packed_logits(module).logsumexp(-1).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@torch.no_grad()
def test_packed_sequences_give_what_each_gives_alone() -> None:
    expected = alone_logits(random_beam())
    torch.testing.assert_close(packed_logits(random_beam()), expected, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_packed_attention_is_masked_attention_in_double_precision() -> None:
    """All else has the same shapes, so that what the module computes in float32 is rounded alike."""
    module = random_beam().double()
    cast(Any, module).set_experts_implementation("eager")  # torch has no grouped matmul in double precision
    torch.testing.assert_close(packed_logits(module), masked_logits(module), rtol=0, atol=1e-8)


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    module, recomputing = random_beam().train(), random_beam().train()
    cast(Any, recomputing).gradient_checkpointing_enable({"use_reentrant": False})
    expected, actual = gradients(module), gradients(recomputing)
    assert actual.keys() == expected.keys() == dict(module.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_have_the_names_shapes_and_types_of_the_checkpoint(dtype: Any) -> None:
    own = named_tensors(random_beam(dtype=dtype))
    expected = {spec.name: (spec.shape, TORCH_DTYPES[spec.dtype]) for spec in tensors(beam_shape(), dtype)}
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()} == expected


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_router_is_float32_whatever_the_configuration_says(stored: str) -> None:
    module = model.build(beam_config(dtype=stored), "bfloat16")
    gates = {t.dtype for name, t in module.state_dict().items() if ".mlp.gate." in name}
    assert gates == {torch.float32}
    assert cast(Any, module).lm_head.weight.dtype == torch.bfloat16


def test_named_tensors_are_views() -> None:
    """Writing to them writes to the module."""
    module = random_beam()
    for tensor in named_tensors(module).values():
        tensor.fill_(7.0)
    assert all(bool((tensor == 7.0).all()) for tensor in module.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_raw_bits_come_back(dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 5) * 50).to(dtype).T
    bits = raw(tensor).numpy()
    assert torch.equal(torch.from_numpy(bits).view(dtype), tensor)
