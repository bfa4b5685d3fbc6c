"""The tensors of adapters against the model's own table of linear layers."""

from collections import Counter
from math import prod

import pytest

from beamline.model.beam import BeamShape, ModelError, tensors
from beamline.model.lora import ExpertAdapters, LoraShape, adapter_tensors, sites
from tests.release_beam import RELEASE
from tests.tiny_beam import beam_shape

SHAPE = beam_shape()  # a dense layer and two with 16 experts
DENSE = beam_shape(mlp_layer_types=["dense"] * 3)
ATTENTION = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate", "o")]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
EXPERTS = [f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")]

RANK = 8
EXPERT_ADAPTERS: list[ExpertAdapters] = ["per_expert", "shared_per_layer", "none"]


def lora(*targets: str, experts: ExpertAdapters = "per_expert", rank: int = RANK) -> LoraShape:
    """Adapters on the linears with these names, or on all."""
    return LoraShape(rank, alpha=16.0, targets=targets or None, experts=experts)


def linears(shape: BeamShape) -> dict[str, tuple[int, ...]]:
    """Size of each linear layer that can have an adapter: what the model's table calls a projection."""
    return {spec.name: spec.shape for spec in tensors(shape) if spec.name.endswith("_proj.weight")}


def sizes(shape: BeamShape, of: LoraShape) -> dict[str, tuple[int, ...]]:
    """Sizes of an adapter's tensors by their names, each of which is there once."""
    specs = list(adapter_tensors(shape, of))
    assert {spec.dtype for spec in specs} == {"float32"}
    assert len({spec.name for spec in specs}) == len(specs)
    return {spec.name: spec.shape for spec in specs}


def adapted(shape: BeamShape, of: LoraShape) -> set[str]:
    """The kinds of linear layers with a B, without their layer and expert."""
    found = [name.removesuffix(".lora_B.weight") for name in sizes(shape, of) if name.endswith(".lora_B.weight")]
    return {".".join(part for part in name.split(".")[2:] if not part.isdigit()) for name in found}


@pytest.mark.parametrize("shape", [SHAPE, RELEASE], ids=["tiny", "release"])
def test_every_linear_layer_has_one_b_and_nothing_else_has_any(shape: BeamShape) -> None:
    """Router, norms, biases, embeddings and head have none."""
    found = {name: size for name, size in sizes(shape, lora()).items() if ".lora_B." in name}
    assert {name.replace(".lora_B", ""): size for name, size in found.items()} == {
        name: (rows, RANK) for name, (rows, _) in linears(shape).items()
    }


@pytest.mark.parametrize("shape", [SHAPE, RELEASE], ids=["tiny", "release"])
def test_linear_layers_that_read_one_input_share_an_a_under_the_name_of_the_first(shape: BeamShape) -> None:
    found = {name: size for name, size in sizes(shape, lora()).items() if ".lora_A." in name}
    later = ("k_proj.weight", "v_proj.weight", "self_attn.gate_proj.weight", "up_proj.weight")
    first = {name: size for name, size in linears(shape).items() if not name.endswith(later)}
    assert {name.replace(".lora_A", ""): size for name, size in found.items()} == {
        name: (RANK, columns) for name, (_, columns) in first.items()
    }


def test_names_and_sizes_of_each_kind_of_layer() -> None:
    """In the order in which engines stack projections."""
    layer = {name: size for name, size in sizes(SHAPE, lora()).items() if name.startswith("model.layers.1.")}
    assert list(layer.items())[:13] == [
        ("model.layers.1.self_attn.q_proj.lora_A.weight", (8, 32)),
        ("model.layers.1.self_attn.q_proj.lora_B.weight", (64, 8)),
        ("model.layers.1.self_attn.k_proj.lora_B.weight", (32, 8)),
        ("model.layers.1.self_attn.v_proj.lora_B.weight", (32, 8)),
        ("model.layers.1.self_attn.gate_proj.lora_B.weight", (64, 8)),
        ("model.layers.1.self_attn.o_proj.lora_A.weight", (8, 64)),
        ("model.layers.1.self_attn.o_proj.lora_B.weight", (32, 8)),
        ("model.layers.1.mlp.experts.0.gate_proj.lora_A.weight", (8, 32)),
        ("model.layers.1.mlp.experts.0.gate_proj.lora_B.weight", (16, 8)),
        ("model.layers.1.mlp.experts.0.up_proj.lora_B.weight", (16, 8)),
        ("model.layers.1.mlp.experts.1.gate_proj.lora_A.weight", (8, 32)),
        ("model.layers.1.mlp.experts.1.gate_proj.lora_B.weight", (16, 8)),
        ("model.layers.1.mlp.experts.1.up_proj.lora_B.weight", (16, 8)),
    ]
    assert list(layer.items())[-2:] == [
        ("model.layers.1.mlp.experts.15.down_proj.lora_A.weight", (8, 16)),
        ("model.layers.1.mlp.experts.15.down_proj.lora_B.weight", (32, 8)),
    ]
    dense = {name for name in sizes(SHAPE, lora()) if name.startswith("model.layers.0.mlp.")}
    assert dense == {
        f"model.layers.0.mlp.{rest}.weight"
        for rest in ("gate_proj.lora_A", "gate_proj.lora_B", "up_proj.lora_B", "down_proj.lora_A", "down_proj.lora_B")
    }


# Experts


def test_one_adapter_for_all_experts_has_no_number() -> None:
    own, shared = (sizes(SHAPE, lora(experts=experts)) for experts in EXPERT_ADAPTERS[:2])
    of_first = {name: size for name, size in own.items() if ".experts." not in name or ".experts.0." in name}
    assert shared == {name.replace(".experts.0.", ".experts."): size for name, size in of_first.items()}


def test_experts_without_adapters_leave_the_rest_as_it_is() -> None:
    every, rest = (sizes(SHAPE, lora(experts=experts)) for experts in ("per_expert", "none"))  # type: ignore[arg-type]
    assert rest == {name: size for name, size in every.items() if ".experts." not in name}


# Targets


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj"], ["self_attn.q_proj"]),
        (["k_proj", "o_proj"], ["self_attn.k_proj", "self_attn.o_proj"]),
        (["gate_proj"], ["self_attn.gate_proj", "mlp.gate_proj", "mlp.experts.gate_proj"]),
        (["self_attn.gate_proj"], ["self_attn.gate_proj"]),
        (["mlp.gate_proj"], ["mlp.gate_proj"]),
        (["experts.down_proj"], ["mlp.experts.down_proj"]),
        (["mlp.experts.up_proj", "mlp.up_proj"], ["mlp.up_proj", "mlp.experts.up_proj"]),
        (["down_proj", "experts.down_proj"], ["mlp.down_proj", "mlp.experts.down_proj"]),
        ([name.split(".")[-1] for name in ATTENTION + MLP], ATTENTION + MLP + EXPERTS),
        ([], ATTENTION + MLP + EXPERTS),
    ],
)
def test_targets_are_ends_of_names(targets: list[str], expected: list[str]) -> None:
    assert adapted(SHAPE, lora(*targets)) == set(expected)


def test_a_target_is_adapted_in_every_layer_and_expert_that_has_it() -> None:
    found = Counter(name.split(".")[2] for name in sizes(SHAPE, lora("up_proj")) if ".lora_B." in name)
    assert found == {"0": 1, "1": 16, "2": 16}


def test_an_a_has_the_name_of_the_first_that_is_adapted() -> None:
    names = [name for name in sizes(SHAPE, lora("gate_proj", "v_proj", "up_proj")) if ".layers.0." in name]
    assert names == [
        "model.layers.0.self_attn.v_proj.lora_A.weight",
        "model.layers.0.self_attn.v_proj.lora_B.weight",
        "model.layers.0.self_attn.gate_proj.lora_B.weight",
        "model.layers.0.mlp.gate_proj.lora_A.weight",
        "model.layers.0.mlp.gate_proj.lora_B.weight",
        "model.layers.0.mlp.up_proj.lora_B.weight",
    ]


def test_sites_know_the_rows_of_what_they_adapt() -> None:
    attention = sites(SHAPE, lora("gate_proj", "k_proj"))[0]
    assert (attention.rows, attention.adapted) == (192, ("k_proj", "gate_proj"))
    assert list(attention.spans()) == [("k_proj", slice(64, 96)), ("gate_proj", slice(128, 192))]


def test_sites_have_names_of_their_own() -> None:
    """Under which random numbers are drawn: they do not depend on what else is adapted."""
    every = [site.name for site in sites(SHAPE, lora())]
    assert len(set(every)) == len(every)
    assert {site.name for site in sites(SHAPE, lora("up_proj", "v_proj"))} < set(every)


@pytest.mark.parametrize(
    "target",
    ["q_prj", "proj", "_proj", "", "gate", "mlp.gate", "lm_head", "embed_tokens", "input_layernorm", "mlp", "Q_PROJ",
     "model.layers.0.self_attn.q_proj", "experts.0.up_proj", "q_proj.weight", ".q_proj"],
)  # fmt: skip
def test_a_target_that_names_nothing_is_an_error_that_lists_what_there_is(target: str) -> None:
    with pytest.raises(ModelError) as caught:
        sites(SHAPE, lora("q_proj", target))
    reason, _, there_are = str(caught.value).partition("; there are ")
    assert reason == f"policy.lora.targets: {target} matched no linear layer of the model"
    assert there_are.split(", ") == sorted(ATTENTION + MLP + EXPERTS)


def test_all_targets_that_name_nothing_are_listed() -> None:
    with pytest.raises(ModelError, match=r"^policy\.lora\.targets: nope, q matched no linear layer"):
        sites(SHAPE, lora("nope", "k_proj", "q"))


def test_targets_on_experts_that_are_left_out_are_an_error_that_says_why() -> None:
    with pytest.raises(ModelError, match=r"experts\.up_proj matched .*\(policy\.lora\.experts=none leaves experts out"):
        sites(SHAPE, lora("q_proj", "experts.up_proj", experts="none"))


def test_one_adapter_for_all_experts_needs_experts_among_the_targets() -> None:
    """Or the setting would have no effect. An adapter for each is the default, and may have none."""
    with pytest.raises(ModelError, match=r"shared_per_layer has no use: policy\.lora\.targets=\['q_proj'\] names no"):
        sites(SHAPE, lora("q_proj", experts="shared_per_layer"))
    assert adapted(SHAPE, lora("q_proj")) == {"self_attn.q_proj"}
    assert adapted(SHAPE, lora("q_proj", "down_proj", experts="shared_per_layer")) >= {"mlp.experts.down_proj"}


# A model without experts


@pytest.mark.parametrize("experts", EXPERT_ADAPTERS[:2])
def test_adapters_on_experts_need_experts(experts: ExpertAdapters) -> None:
    with pytest.raises(ModelError, match=f"experts={experts} matched nothing: the model has no experts; use none"):
        sites(DENSE, lora(experts=experts))


def test_a_model_without_experts_can_have_adapters_on_the_rest() -> None:
    assert adapted(DENSE, lora(experts="none")) == set(ATTENTION + MLP)
    assert adapted(DENSE, lora("gate_proj")) == {"self_attn.gate_proj", "mlp.gate_proj"}
    with pytest.raises(ModelError, match=r"experts\.gate_proj matched no linear layer"):
        sites(DENSE, lora("experts.gate_proj"))


# Numbers


def test_parameters_of_the_released_model_at_rank_64() -> None:
    """14.5 B, of which 14.386 B on experts: the fused form, whose A are shared; one for each would be 18.665 B."""
    counted = Counter[bool]()
    for name, size in sizes(RELEASE, lora(rank=64)).items():
        counted[".experts." in name] += prod(size)
    assert counted == {True: 14_386_462_720, False: 115_998_720}
    assert counted.total() == 14_502_461_440
    unshared = sum(64 * (rows + columns) for rows, columns in linears(RELEASE).values())
    assert unshared == 18_664_980_480


def test_one_adapter_for_all_experts_is_as_large_as_one_experts_own() -> None:
    found = sizes(RELEASE, lora(rank=64, experts="shared_per_layer"))
    of_experts = sum(prod(size) for name, size in found.items() if ".experts." in name)
    assert of_experts * RELEASE.num_experts == 14_386_462_720


def test_the_scale_is_alpha_over_rank() -> None:
    assert lora(rank=64).scale == 0.25
