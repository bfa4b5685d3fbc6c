"""The table of tensors against the figures of the released model, Beam-1.0-501B-A23B."""

from collections import Counter
from math import prod

import pytest
from safetensors import safe_open

from beamline.model.beam import BeamShape, TensorSpec, tensors
from beamline.starter import STARTER
from tests.release_beam import RELEASE


def block(name: str) -> str:
    """The row of the published table that a tensor belongs to."""
    if ".experts." in name:
        return "experts"
    if ".mlp.gate." in name:
        return "router weight" if name.endswith("weight") else "router bias"
    if ".mlp." in name:
        return "dense MLP"
    if name.startswith(("model.embed_tokens", "lm_head")):
        return "embedding" if "embed" in name else "head"
    if "layernorm" in name or name == "model.norm.weight":
        return "norms"
    return "attention" if name.endswith("_proj.weight") else "q/k norms and gate bias"


@pytest.fixture(scope="module")
def table() -> list[TensorSpec]:
    return list(tensors(RELEASE))


def test_parameters_of_every_block_and_in_total(table: list[TensorSpec]) -> None:
    counted: Counter[str] = Counter()
    for spec in table:
        counted[block(spec.name)] += prod(spec.shape)
    assert counted == {
        "experts": 493_250_150_400,
        "attention": 5_452_595_200,
        "dense MLP": 943_718_400,
        "embedding": 777_912_320,
        "head": 777_912_320,
        "router weight": 64_225_280,
        "router bias": 12_544,
        "norms": 1_070_080,
        "q/k norms and gate bias": 15_808,
    }
    assert counted.total() == 501_267_612_352


def test_bytes_of_the_released_checkpoint(table: list[TensorSpec]) -> None:
    width = {"bfloat16": 2, "float32": 4}
    assert sum(prod(spec.shape) * width[spec.dtype] for spec in table) == 1_002_663_700_352


def test_only_the_router_is_float32(table: list[TensorSpec]) -> None:
    assert {block(spec.name) for spec in table if spec.dtype == "float32"} == {"router weight", "router bias"}
    assert {spec.dtype for spec in tensors(RELEASE, "float32")} == {"float32"}


def test_names_are_unique(table: list[TensorSpec]) -> None:
    assert len({spec.name for spec in table}) == len(table)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (151936, 5120)),
        ("lm_head.weight", (151936, 5120)),
        ("model.norm.weight", (5120,)),
        ("model.layers.51.input_layernorm.weight", (5120,)),
        ("model.layers.0.post_attention_layernorm.weight", (5120,)),
        ("model.layers.0.pre_feedforward_layernorm.weight", (5120,)),
        ("model.layers.0.post_feedforward_layernorm.weight", (5120,)),
        ("model.layers.7.self_attn.q_proj.weight", (6144, 5120)),
        ("model.layers.7.self_attn.k_proj.weight", (1024, 5120)),
        ("model.layers.7.self_attn.v_proj.weight", (1024, 5120)),
        ("model.layers.7.self_attn.gate_proj.weight", (6144, 5120)),
        ("model.layers.7.self_attn.o_proj.weight", (5120, 6144)),
        ("model.layers.7.self_attn.q_norm.weight", (128,)),
        ("model.layers.7.self_attn.k_norm.weight", (128,)),
        ("model.layers.7.self_attn.gate_bias", (48,)),
        ("model.layers.2.mlp.gate_proj.weight", (20480, 5120)),
        ("model.layers.2.mlp.up_proj.weight", (20480, 5120)),
        ("model.layers.2.mlp.down_proj.weight", (5120, 20480)),
        ("model.layers.3.mlp.gate.weight", (256, 5120)),
        ("model.layers.51.mlp.gate.e_score_correction_bias", (256,)),
        ("model.layers.3.mlp.experts.0.gate_proj.weight", (2560, 5120)),
        ("model.layers.51.mlp.experts.255.up_proj.weight", (2560, 5120)),
        ("model.layers.51.mlp.experts.255.down_proj.weight", (5120, 2560)),
    ],
)
def test_names_and_shapes_are_those_of_the_release(table: list[TensorSpec], name: str, shape: tuple[int, ...]) -> None:
    assert {spec.name: spec.shape for spec in table}[name] == shape


def test_the_starters_file_holds_exactly_its_table() -> None:
    shape = BeamShape.from_folder(STARTER)
    with safe_open(str(STARTER / "model.safetensors"), framework="np") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert stored == {spec.name: spec.shape for spec in tensors(shape)}
