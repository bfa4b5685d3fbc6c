"""What a pass brings to the Hugging Face module: adapters, their dropout, and routes, in that pass alone."""

import weakref
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beamline.model.lora import LoraShape
from beamline.policy import model
from beamline.policy.attention import Packing
from beamline.policy.dropout import Dropout
from beamline.policy.hooks import EXPERTS
from beamline.policy.lora import Adapter, Adapters
from beamline.policy.weights import named_tensors
from beamline.records import Key
from tests.adapters import PER_EXPERT, Routes, loras, random_adapters, random_routes
from tests.tiny_beam import VOCAB, beam_shape, random_beam

LENGTHS = [5, 40, 1, 17]
BORDERS = [0, *np.cumsum(LENGTHS).tolist()]
N = BORDERS[-1]
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(VOCAB, (N,), generator=GENERATOR)
DIRECTION = torch.randn(N, 32, generator=GENERATOR)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])


def adapters(lora: LoraShape = PER_EXPERT, seed: int = 0) -> Adapters:
    return random_adapters(beam_shape(), lora, seed=seed)


def routes(seed: int) -> Routes:
    return random_routes(beam_shape(), N, seed)


def dropout(updates: int) -> Dropout:
    keys = tuple(Key("train", 1, f"problem-{i}", 0) for i in range(len(LENGTHS)))
    return Dropout(0.3, 0, updates, keys, tuple(LENGTHS))


def passed(module: nn.Module, *brought: Any) -> Tensor:
    """Hidden states ``[N, D]``; ``brought`` are adapters, routes and dropout."""
    return model.hidden_states(module, IDS, POSITIONS, Packing.of(BORDERS), *brought)


def recomputing() -> nn.Module:
    module = random_beam().train()
    cast(Any, module).gradient_checkpointing_enable({"use_reentrant": False})
    return module


def gradients(hidden_ND: Tensor, *modules: nn.Module) -> dict[str, Tensor]:
    """Gradients of the parameters of a model and adapters, which are left without."""
    (hidden_ND.float() * DIRECTION).sum().backward()
    found = {}
    for which, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"{which}.{name}"] = parameter.grad
        module.zero_grad()
    return found


def loop(rows: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
    """Grouped products in a type for which torch has none: of rows, and over the rows of each group."""
    borders = offs[:-1].long()
    if matrices.dim() == 2:
        parts = zip(rows.tensor_split(borders, dim=1), matrices.tensor_split(borders), strict=True)
        return torch.stack([left @ right for left, right in parts])
    return torch.cat([part @ matrix for part, matrix in zip(rows.tensor_split(borders), matrices, strict=True)])


# Adapters


@loras
def test_adapters_are_those_of_a_merged_model_in_double_precision(
    lora: LoraShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to roundings of norms, SwiGLU and routers, which compute in float32."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", loop)
    module, merged, added = random_beam().double(), random_beam().double(), adapters(lora).double()
    for name, delta in added.deltas():
        named_tensors(merged)[name] += delta
    expected, found = passed(merged), passed(module, added)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    theirs, ours = gradients(expected, merged), gradients(found, module)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-8, atol=1e-8, msg=name)


@torch.no_grad()
def test_what_sites_read_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    added, made = Adapter.added, []
    monkeypatch.setattr(Adapter, "added", lambda self, *rest: made.append(self.site.name) or added(self, *rest))
    brought = adapters()
    passed(random_beam(), brought)
    assert sorted(made) == sorted(site.name for site in brought.sites)


@torch.no_grad()
def test_grouped_products_are_as_many_for_many_experts_as_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    product = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda x, w, offs: made.append(w.shape) or product(x, w, offs=offs)
    )
    passed(random_beam(), adapters())
    per_layer = [(16, 32, 32), (16, 32, 8), (16, 8, 32), (16, 16, 32), (16, 16, 8), (16, 8, 32)]
    assert made == per_layer * 2


@torch.no_grad()
def test_experts_are_those_of_transformers() -> None:
    ours, theirs = random_beam(), random_beam()
    assert cast(Any, ours).get_experts_implementation() == {"": EXPERTS}
    cast(Any, theirs).set_experts_implementation("grouped_mm")
    torch.testing.assert_close(passed(ours), passed(theirs), rtol=0, atol=2e-6)  # one or two units in the last place


# In its own pass alone


@pytest.mark.parametrize("between", [(), (adapters(seed=1), routes(1)), (adapters(seed=1), routes(1), dropout(1))])
def test_a_layer_that_is_called_again_has_what_its_own_pass_brought(between: tuple[Any, ...]) -> None:
    """Whatever is evaluated before the backward pass, recomputed layers give the gradients of layers that are kept."""
    brought = adapters(), routes(0), dropout(0)
    plain, again = random_beam(), recomputing()
    expected = gradients(passed(plain, *brought), plain, brought[0])
    hidden = passed(again, *brought)
    passed(again, *between)
    found = gradients(hidden, again, brought[0])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_two_passes_have_one_backward_pass() -> None:
    """Recomputed layers of the one and the other alternate."""
    first, second = (adapters(seed=0), routes(0)), (adapters(seed=1), routes(1))
    plain, again = random_beam(), recomputing()
    expected = [gradients(passed(plain, *brought), brought[0]) for brought in (first, second)]
    both = passed(again, *first) + passed(again, *second)
    found = gradients(both, first[0], second[0])
    for which, one in enumerate(expected):
        for name, gradient in one.items():
            assert torch.equal(found[f"{which}{name.removeprefix('0')}"], gradient), name


def plain(module: nn.Module) -> Tensor:
    """The module called as transformers calls it, without anything that a pass may bring."""
    masks = {"full_attention": None, "sliding_attention": None}
    arguments = {"position_ids": POSITIONS[None], "attention_mask": masks, "packing": Packing.of(BORDERS)}
    return cast(Tensor, cast(Any, module).model(IDS[None], use_cache=False, **arguments).last_hidden_state[0])


@torch.no_grad()
def test_a_pass_leaves_nothing_behind() -> None:
    module, brought = random_beam(), (adapters(), routes(0), dropout(0))
    held = [weakref.ref(each) for each in brought[:2]]
    passed(module, *brought)
    del brought
    assert [reference() for reference in held] == [None, None]
    assert torch.equal(plain(module), passed(random_beam()))


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_fails_leaves_nothing_behind(error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error("stopped")

    module = random_beam()
    hook = cast(Any, module).model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(error, match="stopped"):
        passed(module, adapters(), routes(0), dropout(0))
    hook.remove()
    assert torch.equal(plain(module), passed(random_beam()))


# Routes


@torch.no_grad()
def test_replaying_the_routers_own_choice_changes_no_bit() -> None:
    module, chosen = random_beam(), []
    gates = [layer.mlp.gate for layer in cast(Any, module).model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _g, _i, output: chosen.append(output[2])) for gate in gates]
    expected = passed(module)
    for hook in hooks:
        hook.remove()
    own = torch.stack(chosen, dim=1).numpy().astype(np.uint8)
    assert torch.equal(passed(module, None, own), expected)
    assert not torch.equal(passed(module, None, routes(0)), expected)


# What upstream may change


@torch.no_grad()
@pytest.mark.parametrize(
    ("part", "hooks", "message"),
    [
        ("self_attn.k_proj", "_forward_hooks", r"layer 1 was evaluated without model\.layers\.1\.self_attn\.k_proj: "),
        ("mlp.experts", "_forward_pre_hooks", r"mlp\.experts\.down_proj, .*gate_proj, .*up_proj: "),
        ("mlp.gate", "_forward_hooks", "layer 1 was evaluated without replayed routes: "),
        ("", "_forward_pre_hooks", r"no hook took what the pass brought"),
    ],
)
def test_a_hook_that_is_not_called_is_noticed(part: str, hooks: str, message: str) -> None:
    module = random_beam()
    getattr(cast(Any, module).model.layers[1].get_submodule(part), hooks).clear()
    with pytest.raises(RuntimeError, match=message):
        passed(module, adapters(), routes(0))


@torch.no_grad()
def test_experts_that_know_no_adapters_are_an_error() -> None:
    module = random_beam()
    cast(Any, module).set_experts_implementation("grouped_mm")
    with pytest.raises(TypeError, match="adapters"):
        passed(module, adapters())
