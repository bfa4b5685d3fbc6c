"""Adapters as parameters: how they begin, what they are called, which weights they act on."""

from typing import Any

import numpy as np
import pytest
import torch

from beamline.config.policy import LoraConfig
from beamline.model.beam import ModelError
from beamline.model.lora import LoraShape, adapter_tensors, sites
from beamline.policy.lora import Adapter, Adapters, lora_shape
from beamline.policy.weights import named_tensors
from tests.adapters import LORAS, PER_EXPERT, loras
from tests.tiny_beam import beam_shape, random_beam


def adapters(lora: LoraShape = PER_EXPERT, init: Any = "kaiming", seed: int = 0) -> Adapters:
    return Adapters(beam_shape(), lora, init, seed)


@loras
def test_views_have_the_names_and_shapes_of_the_table(lora: LoraShape) -> None:
    found = named_tensors(adapters(lora))
    expected = {spec.name: (spec.shape, torch.float32) for spec in adapter_tensors(beam_shape(), lora)}
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} == expected


def test_views_write_to_the_parameters() -> None:
    made = adapters()
    for tensor in named_tensors(made).values():
        tensor.fill_(7.0)
    assert all(bool((parameter == 7.0).all()) for parameter in made.parameters())


@pytest.mark.parametrize(
    ("init", "limit", "deviation"), [("kaiming", 32**-0.5, (3 * 32) ** -0.5), ("gaussian", 1.0, 1 / 8)]
)
def test_a_begins_at_random_and_b_as_0(init: str, limit: float, deviation: float) -> None:
    """A of an expert's site of 16 sets has 4096 numbers: their deviation is known to a few percent."""
    made = adapters(init=init)
    wide = [a.detach() for a, site in zip(made.a, made.sites, strict=True) if site.inputs == 32]
    assert all(float(a.abs().max()) < limit for a in wide)
    assert max(wide, key=torch.Tensor.numel).std().item() == pytest.approx(deviation, rel=0.05)
    assert all(not bool(b.any()) for b in made.b)


def test_a_depends_on_the_seed_and_its_site_alone() -> None:
    one, same, other, fewer = adapters(), adapters(), adapters(seed=1), adapters(LORAS["none on experts"])
    assert all(torch.equal(a, b) for a, b in zip(one.a, same.a, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.a, other.a, strict=True))
    for site, a in zip(fewer.sites, fewer.a, strict=True):
        assert torch.equal(a, one.a[one.sites.index(site)])


@loras
def test_the_adapter_of_a_linear_is_that_of_its_site(lora: LoraShape) -> None:
    made = adapters(lora)
    for index, site in enumerate(made.sites):
        for projection in site.projections:
            found = made.at(site.place, projection)
            assert found is not None
            assert (found.site, found.a is made.a[index], found.b is made.b[index]) == (site, True, True)
    assert made.at("model.layers.1.mlp", "gate") is None


def test_what_is_added_is_the_written_product() -> None:
    """One set of matrices, and one for each group of rows, of which one is empty."""
    generator = torch.Generator().manual_seed(0)
    site = sites(beam_shape(), PER_EXPERT)[0]
    x, ends = torch.randn(9, 32, generator=generator), torch.tensor([2, 2, 9], dtype=torch.int32)
    for sets in (1, 3):
        a, b = torch.randn(sets, 8, 32, generator=generator), torch.randn(sets, 24, 8, generator=generator)
        found = Adapter(site, a, b, 1.5).added(x, ends)
        group = [0] * 9 if sets == 1 else [0, 0, *[2] * 7]
        exact = [1.5 * b[g].double() @ (a[g].double() @ row) for g, row in zip(group, x.double(), strict=True)]
        torch.testing.assert_close(found.double(), torch.stack(exact), rtol=1e-5, atol=1e-5)
        assert Adapter(site, a, b, 1.5).added(x.bfloat16(), ends).dtype == torch.bfloat16


@loras
def test_merging_adds_the_written_product(lora: LoraShape) -> None:
    made, before, module = adapters(lora), named_tensors(random_beam()), random_beam()
    with torch.no_grad():
        for name, tensor in named_tensors(made).items():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    made.merge_into(named_tensors(module))
    changed = {name for name, tensor in named_tensors(module).items() if not torch.equal(tensor, before[name])}
    deltas = dict(made.deltas())
    assert changed == deltas.keys()
    stored = named_tensors(made)
    for name, delta in deltas.items():
        place, projection = name.removesuffix(".weight").rsplit(".", 1)
        if lora.experts == "shared_per_layer" and ".experts." in place:
            place = place.rpartition(".")[0]
        site = next(s for s in made.sites if place.startswith(s.place) and projection in s.adapted)
        a, b = stored[f"{place}.{site.adapted[0]}.lora_A.weight"], stored[f"{place}.{projection}.lora_B.weight"]
        torch.testing.assert_close(delta, lora.scale * b @ a)
        torch.testing.assert_close(named_tensors(module)[name], before[name] + delta)


def test_merging_into_bfloat16_rounds_the_sum_once() -> None:
    made, module, exact = adapters(), random_beam(dtype="bfloat16"), random_beam()
    with torch.no_grad():
        for b in made.b:
            b.fill_(0.01)
    exact.load_state_dict(module.state_dict())
    made.merge_into(named_tensors(exact))
    made.merge_into(named_tensors(module))
    for name, tensor in named_tensors(exact).items():
        assert torch.equal(named_tensors(module)[name], tensor.to(named_tensors(module)[name].dtype)), name


@pytest.mark.parametrize(("lora", "weights"), [(PER_EXPERT, 3 * 5 + 3 + 2 * 16 * 3), (LORAS["none on experts"], 18)])
def test_how_many_weights_adapters_act_on(lora: LoraShape, weights: int) -> None:
    assert adapters(lora).check_bound(named_tensors(random_beam())) == weights


def test_adapters_that_match_no_weight_are_an_error_that_names_them() -> None:
    tensors = named_tensors(random_beam())
    renamed = {name.replace("o_proj", "out_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(ModelError, match=r"3 of 114 .*model\.layers\.0\.self_attn\.o_proj\.weight"):
        adapters().check_bound(renamed)
    with pytest.raises(ModelError, match=r"96 of 114 .*experts\.0\.gate_proj"):
        adapters().check_bound(named_tensors(random_beam(moe_intermediate_size=24)))


def test_an_adapter_without_a_gradient_is_an_error_that_names_it() -> None:
    made = adapters()
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.a[0].grad = None
    with pytest.raises(RuntimeError, match=r"1 of 12 .* model\.layers\.0\.self_attn\.q_proj$"):
        made.check_gradients()
    made.a[0].grad = torch.zeros_like(made.a[0])
    made.check_gradients()


def test_projections_that_are_not_adapted_have_no_gradient() -> None:
    made = adapters(LORAS["some targets"])
    for b in made.b:
        b.sum().backward()
    for site, b in zip(made.sites, made.b, strict=True):
        adapted = torch.zeros(site.rows, dtype=torch.bool)
        for _, rows in site.spans():
            adapted[rows] = True
        assert b.grad is not None
        np.testing.assert_array_equal((b.grad == 1).all(-1).all(0), adapted)
        np.testing.assert_array_equal((b.grad == 0).all(-1).all(0), ~adapted)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LoraConfig(), None),
        (LoraConfig(rank=16), LoraShape(16, 16.0)),
        (LoraConfig(rank=8, alpha=32.0, targets=["q_proj"], experts="none"), LoraShape(8, 32.0, ("q_proj",), "none")),
    ],
)
def test_the_shape_that_a_configuration_asks_for(config: LoraConfig, expected: LoraShape | None) -> None:
    assert lora_shape(config) == expected
