"""The module on the sampler's kernels, against the module on torch's operations."""

import tracemalloc
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beamline.model.lora import LoraShape
from beamline.policy import functions, head, model, parity
from beamline.policy.attention import Packing
from beamline.policy.dropout import Dropout
from beamline.policy.lora import Adapters
from beamline.records import Key
from tests.adapters import loras, random_adapters, random_routes
from tests.tiny_beam import VOCAB, beam_shape, random_beam

LENGTHS = [5, 40, 1, 17, 39, 2, 8, 9, 1, 30, 96, 16, 32]  # around the window of 8 and blocks of 16
BORDERS = [0, *np.cumsum(LENGTHS).tolist()]
GENERATOR = torch.Generator().manual_seed(0)
IDS, TARGETS = (torch.randint(VOCAB, (BORDERS[-1],), generator=GENERATOR) for _ in range(2))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
TEMPERATURE = torch.rand(BORDERS[-1], generator=GENERATOR) + 0.5
DIRECTION = torch.randn(BORDERS[-1], generator=GENERATOR)
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "other experts": {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "plain gate weights": {"norm_topk_prob": False, "num_key_value_heads": 4},
    "dense, odd sizes": {"mlp_layer_types": ["dense"] * 3, "sliding_window": 17, "intermediate_size": 37},
    "one expert a token": {"num_experts_per_tok": 1, "topk_group": 1},
    "odd heads": {"head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1},
}


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "ROWS", 40)


def scores(module: nn.Module, path: Any = parity, *brought: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the batch; ``brought`` are adapters, routes and dropout."""
    hidden = path.hidden_states(module, IDS, POSITIONS, Packing.of(BORDERS), *brought)
    score = parity.head_logprobs if path is parity else head.head_logprobs
    weight = cast(Any, module).lm_head.weight
    return score(hidden, weight, TARGETS, TEMPERATURE, 30.0, 50)


def gradients(module: nn.Module, path: Any, *brought: Any) -> dict[str, Tensor]:
    """Of the model's parameters, and of those of adapters (``a.0``)."""
    adapters: list[nn.Module] = [each for each in brought if isinstance(each, Adapters)]
    for each in (module, *adapters):
        each.zero_grad()
    (scores(module, path, *brought)[0] * DIRECTION).sum().backward()
    named = [pair for each in (module, *adapters) for pair in each.named_parameters()]
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """To 5e-5 of their length, as near as float32 sums over 300 rows that cancel in part."""
    assert ours.keys() == theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / max(float(gradient.norm()), 1e-3 * scale)
        assert error < 5e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_logprobs_and_entropies_are_those_of_the_module(changes: dict[str, Any]) -> None:
    """As near as two float32 paths are: logits reach 20, so that one unit in the last place is 2e-6."""
    for ours, theirs in zip(*(scores(random_beam(**changes), path) for path in (parity, model)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_those_of_the_module(changes: dict[str, Any]) -> None:
    assert_near(*(gradients(random_beam(**changes), path) for path in (parity, model)))


def test_gradients_are_about_as_near_to_double_precision_as_those_of_the_module() -> None:
    exact_module = random_beam().double()
    cast(Any, exact_module).set_experts_implementation("eager")  # torch has no grouped matmul in double precision
    exact = gradients(exact_module, model)
    ours, theirs = (gradients(random_beam(), path) for path in (parity, model))
    errors = {
        which: sum(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)
        for which, found in (("ours", ours), ("theirs", theirs))
    }
    assert errors["ours"] < 1.5 * errors["theirs"]


@torch.no_grad()
def test_a_sequence_has_the_same_bits_alone_and_among_others() -> None:
    module = random_beam()
    together, _ = scores(module)
    for a, b in pairwise(BORDERS):
        hidden = parity.hidden_states(module, IDS[a:b], POSITIONS[a:b], Packing.of([0, b - a]))
        weight = cast(Any, module).lm_head.weight
        alone, _ = parity.head_logprobs(hidden, weight, TARGETS[a:b], TEMPERATURE[a:b], 30.0, 7)
        assert torch.equal(alone, together[a:b])


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
def test_logprobs_do_not_depend_on_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = scores(random_beam())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(scores(random_beam())[0], expected)


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    module, recomputing = random_beam().train(), random_beam().train()
    cast(Any, recomputing).gradient_checkpointing_enable({"use_reentrant": False})
    expected, actual = gradients(module, parity), gradients(recomputing, parity)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


def test_activation_checkpointing_keeps_no_more_than_the_input_of_each_layer() -> None:
    kept: dict[bool, int] = {}
    for recompute in (False, True):
        module = random_beam().train()
        if recompute:
            cast(Any, module).gradient_checkpointing_enable({"use_reentrant": False})
        tracemalloc.start()
        result = scores(module)  # numpy's arrays are traced, and all activations of the kernels are such
        kept[recompute] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del result
    assert kept[True] < 0.2 * kept[False]


@pytest.mark.parametrize("chunk_rows", [3, 1000])
def test_no_more_logits_exist_than_a_chunk_has(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    new = parity.new
    monkeypatch.setattr(parity, "new", lambda *size: made.append(size) or new(*size))
    N = BORDERS[-1]
    hidden = torch.randn(N, 32, requires_grad=True)
    weight = cast(Any, random_beam()).lm_head.weight
    logprobs, _ = parity.head_logprobs(hidden, weight, TARGETS, TEMPERATURE, 30.0, chunk_rows)
    forward = max(size[0] for size in made if len(size) == 2)
    made.clear()
    logprobs.sum().backward()
    backward = max(size[0] for size in made if len(size) == 2)
    assert (forward, backward) == (min(chunk_rows, 40), min(chunk_rows, N))


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16])
def test_another_type_is_an_error(convert: Any) -> None:
    with pytest.raises(ValueError, match=r"policy\.parity=true needs a float32 model on a CPU"):
        parity.check(convert(random_beam()))


def test_another_attention_has_no_gradients() -> None:
    def attend(*arguments: Any) -> None:
        functions.attend(*arguments)

    hidden = parity.hidden_states(random_beam(), IDS, POSITIONS, Packing.of(BORDERS), attend=attend)
    with pytest.raises(RuntimeError, match=r"another attention than the kernels' has no gradients"):
        hidden.sum().backward()


# What a pass brings: adapters, routes, dropout


def adapters(lora: LoraShape | None = None, b: float = 0.1, **changes: Any) -> Adapters:
    return random_adapters(beam_shape(**changes), lora, b)


def routes(**changes: Any) -> Any:
    return random_routes(beam_shape(**changes), BORDERS[-1])


DROPOUT = Dropout(0.3, 0, 5, tuple(Key("train", 1, f"problem-{i}", 0) for i in range(len(LENGTHS))), tuple(LENGTHS))


def brought(changes: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {
        "adapters": (adapters(**changes),),
        "routes": (None, routes(**changes)),
        "all": (adapters(**changes), routes(**changes), DROPOUT),
    }


kinds = pytest.mark.parametrize("kind", ["adapters", "routes", "all"])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@kinds
def test_logprobs_and_gradients_are_those_of_the_module_with_the_same(changes: dict[str, Any], kind: str) -> None:
    given = brought(changes)[kind]
    with torch.no_grad():
        ours, theirs = (scores(random_beam(**changes), path, *given) for path in (parity, model))
        plain = scores(random_beam(**changes))
    for values, others in zip(ours, theirs, strict=True):
        torch.testing.assert_close(values, others, rtol=1e-5, atol=4e-5)  # with larger terms than without adapters
    if kind != "routes" or beam_shape(**changes).moe_layers:
        assert (ours[0] - plain[0]).abs().mean() > 0.05
    assert_near(*(gradients(random_beam(**changes), path, *given) for path in (parity, model)))


@loras
def test_whatever_is_adapted(lora: LoraShape) -> None:
    found = [gradients(random_beam(), path, adapters(lora)) for path in (parity, model)]
    assert_near(*found)
    made = adapters(lora)
    assert {name for name in found[0] if name[:2] in ("a.", "b.")} == {name for name, _ in made.named_parameters()}
    for index, site in enumerate(made.sites):
        adapted = torch.zeros(site.rows, dtype=torch.bool)
        for _, rows in site.spans():
            adapted[rows] = True
        learned = found[0][f"b.{index}"].abs().amax((0, 2)) > 0
        assert torch.equal(learned, adapted), site.name


def test_a_frozen_model_has_no_gradients_and_its_adapters_have_the_same() -> None:
    module, given = random_beam(), brought({})["all"]
    expected = gradients(module, parity, *given)
    module.requires_grad_(False)
    found = gradients(module, parity, *given)
    assert found.keys() == {name for name in expected if name[:2] in ("a.", "b.")}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@torch.no_grad()
@loras
def test_adapters_without_an_effect_change_no_bit(lora: LoraShape) -> None:
    for ours, theirs in zip(scores(random_beam(), parity, adapters(lora, b=0.0)), scores(random_beam()), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_with_adapters_and_routes_a_sequence_has_the_same_bits_alone_and_among_others() -> None:
    """What adapters read under dropout is multiplied by torch, whose products depend on their size."""
    module, added, given = random_beam(), adapters(), routes()
    together, _ = scores(module, parity, added, given)
    for a, b in pairwise(BORDERS):
        where = IDS[a:b], POSITIONS[a:b], Packing.of([0, b - a])
        hidden = parity.hidden_states(module, *where, added, given[a:b])
        weight = cast(Any, module).lm_head.weight
        alone, _ = parity.head_logprobs(hidden, weight, TARGETS[a:b], TEMPERATURE[a:b], 30.0, 7)
        assert torch.equal(alone, together[a:b])


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
@kinds
def test_with_all_that_is_brought_logprobs_do_not_depend_on_threads(
    kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = scores(random_beam(), parity, *brought({})[kind])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(scores(random_beam(), parity, *brought({})[kind])[0], expected)


@kinds
def test_layers_that_are_recomputed_have_what_was_brought(kind: str) -> None:
    module, recomputing = random_beam().train(), random_beam().train()
    cast(Any, recomputing).gradient_checkpointing_enable({"use_reentrant": False})
    expected, actual = (gradients(each, parity, *brought({})[kind]) for each in (module, recomputing))
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
