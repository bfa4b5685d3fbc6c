"""What every sampler with adapters does: it serves base and adapter unmerged, and takes either while it lives."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beamline.model.layout import DType
from beamline.model.lora import LoraShape, adapter_tensors, sites
from beamline.policy.lora import Adapters
from beamline.policy.weights import named_tensors
from beamline.records import Completion, Request
from beamline.transfer.plan import TransferError
from tests.adapters import LORAS, PER_EXPERT, random_adapters
from tests.contract.engines import SamplerBench, SamplerFactory
from tests.contract.sampling import (
    assert_same_bits,
    assert_same_tokens,
    collect,
    request,
    requests,
    run,
    sequence,
    start,
)
from tests.tiny_beam import beam_shape, evaluate, random_beam, reference, teacher_forced

MORE = LORAS | {
    "some targets, shared": LoraShape(8, 24.0, ("o_proj", "gate_proj", "down_proj"), "shared_per_layer"),
    "no expert among the targets": LoraShape(8, 24.0, ("v_proj", "mlp.up_proj")),
}
loras = pytest.mark.parametrize("lora", MORE.values(), ids=MORE)
BASE, OTHER = random_beam(0), random_beam(1)


def adapters_of(lora: LoraShape = PER_EXPERT, seed: int = 0, b: float = 0.3) -> Adapters:
    return random_adapters(beam_shape(), lora, b, seed)


@torch.no_grad()
def merged(base: nn.Module, adapters: Adapters) -> nn.Module:
    """The model whose weights are ``W + scale B A``, written out by the names of its tensors."""
    module = random_beam()
    module.load_state_dict(base.state_dict())
    weights, parts, shape = named_tensors(module), named_tensors(adapters), beam_shape()
    for site in sites(shape, adapters.lora):
        for _, place in site.adapters():
            shared = site.experts is not None and place == site.place
            places = [f"{place}.{expert}" for expert in range(shape.num_experts)] if shared else [place]
            a = parts[f"{place}.{site.adapted[0]}.lora_A.weight"].double()
            for projection in site.adapted:
                b = parts[f"{place}.{projection}.lora_B.weight"].double()
                for of in places:
                    weight = weights[f"{of}.{projection}.weight"]
                    weight.copy_(weight.double() + adapters.lora.alpha / adapters.lora.rank * b @ a)
    return module


def serving(
    sampler_factory: SamplerFactory,
    base: nn.Module,
    adapters: Adapters | None,
    lora: LoraShape | None = None,
    **settings: Any,
) -> SamplerBench:
    """A sampler with a model as version 1 and, unless it has none, an adapter as version 2."""
    bench = sampler_factory(base, lora=lora if adapters is None else adapters.lora, **settings)
    if adapters is not None:
        bench.give(adapters, 2, "keep")
    return bench


def answers(bench: SamplerBench, asked: list[Request] | None = None) -> list[Completion]:
    return run(bench.sampler, requests() if asked is None else asked)


# Unmerged and merged


@loras
def test_logprobs_are_those_of_the_module_with_merged_weights(sampler_factory: SamplerFactory, lora: LoraShape) -> None:
    """To 1e-5: two float32 paths. The adapter changes them ten thousand times as much."""
    adapters, asked = adapters_of(lora), requests()
    plain, without = reference(merged(BASE, adapters)), reference(BASE)
    changed = 0.0
    for wanted, completion in zip(asked, answers(serving(sampler_factory, BASE, adapters)), strict=True):
        new, ids = slice(len(wanted.prefix_ids) - 1, None), sequence(wanted, completion)
        expected = teacher_forced(plain, ids)[new]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(completion.routes, evaluate(plain, ids[:-1]).routes_SLK)
        changed = max(changed, float(np.abs(expected - teacher_forced(without, ids)[new]).max()))
    assert changed > 0.1


@loras
def test_tokens_are_those_of_merged_weights(sampler_factory: SamplerFactory, lora: LoraShape) -> None:
    """From the same random numbers."""
    adapters = adapters_of(lora)
    unmerged = answers(serving(sampler_factory, BASE, adapters))
    assert_same_tokens(unmerged, answers(serving(sampler_factory, merged(BASE, adapters), None)))
    base = answers(serving(sampler_factory, BASE, None))
    assert any(one.token_ids.tolist() != other.token_ids.tolist() for one, other in zip(unmerged, base, strict=True))


@loras
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_without_an_effect_gives_the_bits_of_the_base(
    sampler_factory: SamplerFactory, lora: LoraShape, dtype: DType
) -> None:
    with_adapter = answers(serving(sampler_factory, BASE, adapters_of(lora, b=0.0), dtype=dtype))
    assert_same_bits(with_adapter, answers(serving(sampler_factory, BASE, None, dtype=dtype)))


def test_one_adapter_for_all_experts_gives_the_bits_of_equal_ones_for_each(sampler_factory: SamplerFactory) -> None:
    shared, own = adapters_of(LORAS["shared per layer"]), adapters_of()
    parts = named_tensors(shared)
    with torch.no_grad():
        for name, tensor in named_tensors(own).items():
            tensor.copy_(parts[re.sub(r"\.experts\.\d+\.", ".experts.", name)])
    assert_same_bits(answers(serving(sampler_factory, BASE, own)), answers(serving(sampler_factory, BASE, shared)))


# Numerics


@loras
def test_a_sampler_in_bfloat16_rounds_the_adapter_too(sampler_factory: SamplerFactory, lora: LoraShape) -> None:
    """What was rounded before gives the same bits, and what differs by less than rounding too."""
    adapters, rounded, beside = (adapters_of(lora) for _ in range(3))
    with torch.no_grad():
        for tensor in named_tensors(rounded).values():
            tensor.copy_(tensor.bfloat16())
        for tensor in named_tensors(beside).values():
            tensor.copy_(tensor.bfloat16().float() * (1 + 2.0**-12))
    one, *others = (
        answers(serving(sampler_factory, BASE, each, dtype="bfloat16")) for each in (adapters, rounded, beside)
    )
    for other in others:
        assert_same_bits(one, other)


@torch.no_grad()
def in_bfloat16(module: nn.Module) -> nn.Module:
    """What a sampler of that type holds of a model or an adapter: all but the router is rounded."""
    for name, tensor in named_tensors(module).items():
        if ".mlp.gate." not in name:
            tensor.copy_(tensor.bfloat16())
    return module


def rounding_error(base: nn.Module, adapters: Adapters | None, bench: SamplerBench) -> float:
    """Mean distance of log-probabilities to those of the module in float32."""
    plain, asked = reference(base if adapters is None else merged(base, adapters)), requests(max_tokens=60)
    apart = [
        np.abs(completion.logprobs - teacher_forced(plain, sequence(wanted, completion))[len(wanted.prefix_ids) - 1 :])
        for wanted, completion in zip(asked, answers(bench, asked), strict=True)
    ]
    return float(np.concatenate(apart).mean())


@loras
def test_rounding_costs_as_much_with_an_adapter_as_without(sampler_factory: SamplerFactory, lora: LoraShape) -> None:
    """About 0.07, mostly by routes that turn; with adapters 0.05 to 0.08 were seen."""
    base, adapters = in_bfloat16(random_beam()), adapters_of(lora)
    in_bfloat16(adapters)
    with_adapter, without = (
        rounding_error(base, given, serving(sampler_factory, base, given, dtype="bfloat16"))
        for given in (adapters, None)
    )
    assert 0.5 * without < with_adapter < 1.5 * without


# Company


ASKED = [request(n, sample, max_tokens=20 - sample) for n in (1, 7, 8, 20) for sample in range(4)]


@loras
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_has_the_same_bits_in_any_company(
    sampler_factory: SamplerFactory, lora: LoraShape, dtype: DType
) -> None:
    adapters = adapters_of(lora)
    alone = serving(sampler_factory, BASE, adapters, slots=1, dtype=dtype).sampler
    expected = [run(alone, [wanted])[0] for wanted in ASKED]
    order = np.random.default_rng(0).permutation(len(ASKED))
    for slots, threads in ((3, 1), (64, 1), (64, 3), (5, 2)):
        bench = serving(sampler_factory, BASE, adapters, slots=slots, threads=threads, dtype=dtype)
        assert_same_bits(answers(bench, ASKED), expected)
        assert_same_bits(answers(bench, [ASKED[i] for i in order]), [expected[i] for i in order])


# Exchange


def test_a_new_adapter_takes_the_place_of_the_old_one(sampler_factory: SamplerFactory) -> None:
    first, second = (adapters_of(seed=seed) for seed in range(2))
    bench = serving(sampler_factory, BASE, first)
    before = answers(bench)
    bench.give(second, 3, "keep")
    assert_same_bits(answers(bench), answers(serving(sampler_factory, BASE, second)))
    bench.give(first, 4, "keep")
    assert_same_bits(answers(bench), before)


def test_the_same_adapter_again_changes_nothing(sampler_factory: SamplerFactory) -> None:
    bench = serving(sampler_factory, BASE, adapters_of())
    before = answers(bench)
    bench.give(adapters_of(), 3, "keep")
    assert_same_bits(answers(bench), before)


@loras
def test_new_weights_leave_the_adapter_and_a_new_adapter_leaves_the_weights(
    sampler_factory: SamplerFactory, lora: LoraShape
) -> None:
    first, second = (adapters_of(lora, seed) for seed in range(2))
    bench = serving(sampler_factory, BASE, first)
    bench.give(OTHER, 3, "keep")
    assert_same_bits(answers(bench), answers(serving(sampler_factory, OTHER, first)))
    bench.give(second, 4, "keep")
    assert_same_bits(answers(bench), answers(serving(sampler_factory, OTHER, second)))


def test_the_order_in_which_they_come_does_not_matter(sampler_factory: SamplerFactory) -> None:
    adapters, bench = adapters_of(), sampler_factory(None, lora=PER_EXPERT)
    bench.give(adapters, 1, "keep")
    bench.give(BASE, 2, "keep")
    assert_same_bits(answers(bench), answers(serving(sampler_factory, BASE, adapters)))


@pytest.mark.parametrize("kind", ["adapter", "weights"])
def test_tokens_are_stamped_with_the_version_that_came_last(sampler_factory: SamplerFactory, kind: str) -> None:
    bench = serving(sampler_factory, BASE, adapters_of())
    assert {version for c in answers(bench) for version in c.versions.tolist()} == {2}
    bench.give(adapters_of(seed=1) if kind == "adapter" else OTHER, 7, "keep")
    assert {version for c in answers(bench) for version in c.versions.tolist()} == {7}


def test_unfinished_requests_go_on_with_a_new_adapter(sampler_factory: SamplerFactory) -> None:
    asked, first = requests()[:3], adapters_of()
    whole = answers(serving(sampler_factory, BASE, first), asked)
    bench = serving(sampler_factory, BASE, first)
    start(bench.sampler, asked)
    bench.give(adapters_of(seed=1), 3, "keep")
    done = collect(bench.sampler, 3)
    for wanted, uninterrupted in zip(asked, whole, strict=True):
        completion = done[wanted.key]
        old = int((completion.versions == 2).sum())
        assert 0 < old < 30
        assert completion.versions.tolist() == [2] * old + [3] * (30 - old)
        np.testing.assert_array_equal(completion.token_ids[:old], uninterrupted.token_ids[:old])
        assert completion.token_ids[old:].tolist() != uninterrupted.token_ids[old:].tolist()


def test_unfinished_requests_go_on_as_if_nothing_was_when_the_same_adapter_comes(
    sampler_factory: SamplerFactory,
) -> None:
    """They keep their cache, and nothing is evaluated again."""
    asked, bench = requests()[:3], serving(sampler_factory, BASE, adapters_of())
    start(bench.sampler, asked)
    bench.give(adapters_of(), 3, "keep")
    done = collect(bench.sampler, 3)
    assert_same_bits([done[r.key] for r in asked], answers(serving(sampler_factory, BASE, adapters_of()), asked))


def test_unfinished_requests_are_given_back_when_a_new_adapter_ends_them(sampler_factory: SamplerFactory) -> None:
    asked, first = requests()[:3], adapters_of()
    whole = answers(serving(sampler_factory, BASE, first), asked)
    bench = serving(sampler_factory, BASE, first)
    start(bench.sampler, asked)
    bench.give(adapters_of(seed=1), 3, "abort")
    done = {completion.key: completion for completion in bench.sampler.poll(60.0)}
    for wanted, uninterrupted in zip(asked, whole, strict=True):
        partial = done[wanted.key]
        count = len(partial.token_ids)
        assert (partial.finish, set(partial.versions.tolist())) == ("abort", {2})
        assert 0 < count < 30
        np.testing.assert_array_equal(partial.token_ids, uninterrupted.token_ids[:count])
    assert_same_bits(answers(bench), answers(serving(sampler_factory, BASE, adapters_of(seed=1))))


# Layouts


@loras
def test_the_layout_of_an_adapter_has_every_tensor_of_it(sampler_factory: SamplerFactory, lora: LoraShape) -> None:
    held = [
        (part.name, part.shape)
        for rank in sampler_factory(None, lora=lora).sampler.layout("adapter").ranks
        for part in rank
    ]
    assert sorted(held) == sorted((spec.name, spec.shape) for spec in adapter_tensors(beam_shape(), lora))


@loras
def test_the_layout_of_weights_is_that_of_a_sampler_without_adapters(
    sampler_factory: SamplerFactory, lora: LoraShape
) -> None:
    assert sampler_factory(None, lora=lora).sampler.layout("full") == sampler_factory(None).sampler.layout("full")


def test_without_adapters_there_is_no_layout_of_any(sampler_factory: SamplerFactory) -> None:
    with pytest.raises(ValueError, match="this sampler has no adapters, and takes full weights only"):
        sampler_factory(None).sampler.layout("adapter")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (LoraShape(16, 16.0), r"lora_A\.weight has shape \(16, 32\) at the source and \(8, 32\) at the destination"),
        (LORAS["shared per layer"], r"no source rank holds .* of model\.layers\.1\.mlp\.experts\.0\."),
        (LORAS["none on experts"], r"no source rank holds .* of model\.layers\.1\.mlp\.experts\.0\."),
        (LORAS["some targets"], r"no source rank holds .* of model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight"),
    ],
)
def test_an_adapter_of_another_shape_is_refused_and_changes_nothing(
    sampler_factory: SamplerFactory, given: LoraShape, message: str
) -> None:
    bench = serving(sampler_factory, BASE, adapters_of())
    before = answers(bench)
    with pytest.raises(TransferError, match=message):
        bench.give(adapters_of(given), 3, "keep")
    assert_same_bits(answers(bench), before)


# Half of it


def test_nothing_is_drawn_before_the_adapter_is_there(sampler_factory: SamplerFactory) -> None:
    """Or the base would answer in its place."""
    bench = serving(sampler_factory, BASE, None, lora=PER_EXPERT)
    with pytest.raises(RuntimeError, match="the sampler has no adapter yet; send and receive them first"):
        bench.sampler.submit([request(5)])
    bench.give(adapters_of(), 2, "keep")
    answers(bench)


def test_nothing_is_drawn_before_the_weights_are_there(sampler_factory: SamplerFactory) -> None:
    """Or an adapter on zeros would answer."""
    bench = sampler_factory(None, lora=PER_EXPERT)
    with pytest.raises(RuntimeError, match="the sampler has no weights and no adapter yet"):
        bench.sampler.submit([request(5)])
    bench.give(adapters_of(), 1, "keep")
    with pytest.raises(RuntimeError, match="the sampler has no weights yet"):
        bench.sampler.submit([request(5)])


@pytest.mark.parametrize("first", ["adapter", "weights"])
def test_deep_sleep_loses_weights_and_adapter_and_both_must_come_again(
    sampler_factory: SamplerFactory, first: str
) -> None:
    adapters = adapters_of()
    bench = serving(sampler_factory, BASE, adapters)
    before = answers(bench)
    bench.sampler.sleep(2)
    bench.sampler.wake(["weights", "cache"])
    given, other = (adapters, BASE) if first == "adapter" else (BASE, adapters)
    with pytest.raises(RuntimeError, match="no weights and no adapter"):
        bench.sampler.submit([request(5)])
    bench.give(given, 3, "keep")
    with pytest.raises(RuntimeError, match="no weights yet" if first == "adapter" else "no adapter yet"):
        bench.sampler.submit([request(5)])
    bench.give(other, 3, "keep")
    assert_same_bits(answers(bench), before)


def test_light_sleep_loses_neither(sampler_factory: SamplerFactory) -> None:
    bench = serving(sampler_factory, BASE, adapters_of())
    before = answers(bench)
    bench.sampler.sleep(1)
    bench.give(adapters_of(seed=1), 3, "keep")
    bench.give(adapters_of(), 4, "keep")
    bench.sampler.wake(["cache"])
    assert_same_bits(answers(bench), before)


def test_an_adapter_cannot_arrive_where_it_has_no_place(sampler_factory: SamplerFactory) -> None:
    bench = serving(sampler_factory, BASE, adapters_of())
    bench.sampler.sleep(2)
    with pytest.raises(RuntimeError, match="wake"):
        bench.give(adapters_of(), 3, "keep")


# Values that are not finite


NAMES = [
    "model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.layers.2.self_attn.gate_proj.lora_B.weight",
    "model.layers.1.mlp.experts.15.down_proj.lora_B.weight",
]


def damaged(name: str, value: float) -> Adapters:
    adapters = adapters_of(seed=1)
    tensor: Tensor = named_tensors(adapters)[name]
    with torch.no_grad():
        tensor[-1, -1] = value
    return adapters


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_that_is_not_finite_is_refused_by_name(
    sampler_factory: SamplerFactory, name: str, value: float
) -> None:
    """The old one is gone: nothing is drawn until a better one comes, whatever else is received."""
    bench = serving(sampler_factory, BASE, adapters_of())
    with pytest.raises(FloatingPointError, match=f"{name} of version 3 holds values that are not finite"):
        bench.give(damaged(name, value), 3, "keep")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the sampler has no adapter yet"):
            bench.sampler.submit([request(5)])
        bench.give(OTHER, 4, "keep")
    bench.give(adapters_of(), 5, "keep")
    assert_same_bits(answers(bench), answers(serving(sampler_factory, OTHER, adapters_of())))


def test_what_is_not_finite_once_it_is_rounded_is_refused(sampler_factory: SamplerFactory) -> None:
    largest = float(np.finfo(np.float32).max)  # rounds to infinity in bfloat16
    bench = serving(sampler_factory, BASE, adapters_of(), dtype="bfloat16")
    with pytest.raises(FloatingPointError, match=f"{NAMES[0]} of version 3 holds values that are not finite"):
        bench.give(damaged(NAMES[0], largest), 3, "keep")


def test_unfinished_requests_wait_for_an_adapter_that_is_finite(sampler_factory: SamplerFactory) -> None:
    asked, bench = requests()[:3], serving(sampler_factory, BASE, adapters_of())
    start(bench.sampler, asked)
    with pytest.raises(FloatingPointError, match="not finite"):
        bench.give(damaged(NAMES[0], np.nan), 3, "keep")
    with pytest.raises(RuntimeError, match="no adapter"):
        bench.sampler.poll(60.0)
    bench.give(adapters_of(), 4, "keep")
    done = collect(bench.sampler, 3)
    assert_same_bits([done[r.key] for r in asked], answers(serving(sampler_factory, BASE, adapters_of()), asked))
