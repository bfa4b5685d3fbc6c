"""Where a Beam lies inside a vLLM engine, against what vLLM's model does, written out again with whole arrays."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from operator import sub

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.model.beam import BeamShape, ModelError, tensors
from beamline.model.layout import Layout, TensorSlice
from beamline.model.placement import Placed
from beamline.rollout.vllm.layout import Mesh, check_mesh, engine_layout, parameters, placed
from beamline.starter import STARTER
from beamline.transfer.plan import plan
from tests.release_beam import RELEASE
from tests.tiny_beam import beam_shape
from tests.unit.rollout.vllm_meshes import MESHES, assembled, checkpoint, name_of, uneven

SHAPES = {
    "release": replace(  # a layer of each kind has what 52 have
        RELEASE, num_hidden_layers=3, layer_types=RELEASE.layer_types[:3], mlp_layer_types=RELEASE.mlp_layer_types[2:5]
    ),
    "starter": BeamShape.from_folder(STARTER),
    "tiny": beam_shape(),
    "uneven": uneven(),
}
CASES = [
    pytest.param(SHAPES[name], mesh, id=f"{name}-{name_of(mesh)}")
    for name in SHAPES
    for mesh in MESHES
    if SHAPES[name].num_attention_heads % mesh.tensor == 0
]
SMALL = [case for case in CASES if case.values[0] is not SHAPES["release"]]
Arrays = dict[str, NDArray[np.float32]]


@pytest.mark.parametrize(("shape", "mesh"), CASES)
def test_every_element_lies_on_some_rank_and_parameters_are_filled_without_gaps(shape: BeamShape, mesh: Mesh) -> None:
    held: dict[str, set[TensorSlice]] = defaultdict(set)
    for rank in range(mesh.size):
        items = placed(shape, mesh, rank, "bfloat16")
        assert_filled(parameters(shape, mesh, rank, "bfloat16"), items, shape.vocab_size)
        for item in items:
            held[item.part.name].add(item.part)
    specs = {spec.name: spec for spec in tensors(shape, "bfloat16")}
    assert held.keys() == specs.keys()
    for name, parts in held.items():
        assert all((part.shape, part.dtype) == (specs[name].shape, specs[name].dtype) for part in parts)
        assert_tiled(parts)


def assert_filled(sizes: Mapping[str, tuple[tuple[int, ...], str]], items: tuple[Placed, ...], vocabulary: int) -> None:
    """Parts lie one after the other in memory, from the first element of a parameter to its last."""
    names = list(dict.fromkeys(item.parameter for item in items))
    assert names == [name for name in sizes if name in set(names)]
    ends: dict[str, int] = defaultdict(int)
    for item in items:
        size, dtype = sizes[item.parameter]
        begin, length = range_in_memory(item.box, size)
        assert begin == ends[item.parameter]
        assert length == prod(item.part.size)
        assert dtype == item.part.dtype
        ends[item.parameter] += length
    for name, (size, _) in sizes.items():
        if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert ends[name] == prod(size)


def range_in_memory(box: tuple[slice, ...], size: tuple[int, ...]) -> tuple[int, int]:
    """First element and number of elements of a box which is one run of memory."""
    sizes = [s.stop - s.start for s in box]
    partial = max((d for d, n in enumerate(sizes) if n != size[d]), default=0)
    assert all(0 <= s.start < s.stop <= n for s, n in zip(box, size, strict=True))
    assert all(n == 1 for n in sizes[:partial])
    strides = [prod(size[d + 1 :]) for d in range(len(size))]
    return sum(s.start * stride for s, stride in zip(box, strides, strict=True)), prod(sizes)


def assert_tiled(parts: set[TensorSlice]) -> None:
    """Different parts of one tensor do not overlap and are the whole of it together."""
    boxes = sorted((part.start, part.stop) for part in parts)
    full = next(iter(parts)).shape
    (along,) = {d for start, stop in boxes for d, n in enumerate(full) if stop[d] - start[d] != n} or {0}
    ends = [0, *(stop[along] for _, stop in boxes)]
    assert [start[along] for start, _ in boxes] == ends[:-1]
    assert ends[-1] == full[along]


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_the_different_parts_of_the_release_are_the_whole_of_it(mesh: Mesh) -> None:
    ranks = engine_layout(RELEASE, mesh, "bfloat16").ranks
    boxes = {(part.name, part.start, part.stop) for parts in ranks for part in parts}
    held: dict[str, int] = defaultdict(int)
    for name, start, stop in boxes:
        held[name] += prod(map(sub, stop, start))
    assert held == {spec.name: prod(spec.shape) for spec in tensors(RELEASE)}


@pytest.mark.parametrize(("shape", "mesh"), CASES)
def test_no_expert_is_held_twice(shape: BeamShape, mesh: Mesh) -> None:
    sizes = [size for r in range(mesh.size) for size in expert_sizes(shape, mesh, r)]
    whole = len(shape.moe_layers) * shape.num_experts * 3 * shape.hidden_size * shape.moe_intermediate_size
    assert sum(sizes) == whole


def expert_sizes(shape: BeamShape, mesh: Mesh, rank: int) -> Iterator[int]:
    held = parameters(shape, mesh, rank, "bfloat16")
    return (prod(size) for name, (size, _) in held.items() if ".experts." in name)


@pytest.mark.parametrize(("shape", "mesh"), SMALL)
def test_parameters_are_what_vllm_makes_of_the_checkpoint(shape: BeamShape, mesh: Mesh) -> None:
    weights = checkpoint(shape)
    for rank in range(mesh.size):
        assert_same(assembled(shape, mesh, rank, weights), reference(shape, mesh, rank, weights))


@pytest.mark.parametrize(("shape", "mesh"), SMALL)
def test_a_transfer_plan_from_one_rank_fills_an_engine(shape: BeamShape, mesh: Mesh) -> None:
    weights = checkpoint(shape)
    source = Layout((tuple(TensorSlice.whole(s.name, s.dtype, s.shape) for s in tensors(shape, "float32")),))
    moves = iter(plan(source, engine_layout(shape, mesh, "bfloat16")).moves)
    for rank in range(mesh.size):
        sizes = parameters(shape, mesh, rank, "bfloat16")
        held = {name: np.zeros(size, np.float32) for name, (size, _) in sizes.items()}
        for item in placed(shape, mesh, rank, "bfloat16"):
            move = next(moves)
            assert (move.source, move.destination) == (0, rank)
            held[item.parameter][item.box] = weights[move.part.name][move.part.index]
        assert_same(held, reference(shape, mesh, rank, weights))
    assert next(moves, None) is None


def assert_same(held: Arrays, expected: Arrays) -> None:
    assert held.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(held[name], array, err_msg=name)


def reference(shape: BeamShape, mesh: Mesh, rank: int, weights: Arrays) -> Arrays:
    """The parameters of a rank, by cutting and joining whole arrays."""
    t, n = rank % mesh.tensor, mesh.tensor
    first, last = rank < n, rank >= mesh.size - n
    held: Arrays = {}

    def vocabulary(name: str) -> None:
        array = weights[name]
        held[name] = np.split(np.pad(array, ((0, -len(array) % 64), (0, 0))), n)[t]

    if first:
        vocabulary("model.embed_tokens.weight")
    for layer in np.array_split(np.arange(shape.num_hidden_layers), mesh.pipeline)[rank // n]:
        held |= layer_reference(shape, mesh, t, {k: v for k, v in weights.items() if f".layers.{layer}." in k})
    if last:
        held["model.norm.weight"] = weights["model.norm.weight"]
        vocabulary("lm_head.weight")
    return held


def layer_reference(shape: BeamShape, mesh: Mesh, t: int, weights: Arrays) -> Arrays:
    n, kv = mesh.tensor, shape.num_key_value_heads
    at = next(iter(weights)).split(".self_attn")[0]

    def cut(name: str, parts: int = n, index: int = t, axis: int = 0) -> NDArray[np.float32]:
        return np.split(weights[f"{at}.{name}"], parts, axis)[index]

    held = {name: array for name, array in weights.items() if name.endswith("norm.weight") or ".mlp.gate." in name}
    heads = {"parts": min(n, kv), "index": t // max(1, n // kv)}
    q, gate = cut("self_attn.q_proj.weight"), cut("self_attn.gate_proj.weight")
    k, v = cut("self_attn.k_proj.weight", **heads), cut("self_attn.v_proj.weight", **heads)
    if n <= kv:
        held[f"{at}.self_attn.qkv_gate_proj.weight"] = np.concatenate([q, k, v, gate])
    else:
        held[f"{at}.self_attn.qkv_proj.weight"] = np.concatenate([q, k, v])
        held[f"{at}.self_attn.output_gate_proj.weight"] = gate
    held[f"{at}.self_attn.o_proj.weight"] = cut("self_attn.o_proj.weight", axis=1)
    held[f"{at}.self_attn.gate_bias"] = cut("self_attn.gate_bias")
    if f"{at}.mlp.gate.weight" not in weights:
        gate_up = [cut(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
        held[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
        held[f"{at}.mlp.down_proj.weight"] = cut("mlp.down_proj.weight", axis=1)
        return held
    gate, up, down = (
        np.stack([weights[f"{at}.mlp.experts.{e}.{name}_proj.weight"] for e in range(shape.num_experts)])
        for name in ("gate", "up", "down")
    )
    if mesh.experts:
        gate, up, down = (np.array_split(array, n)[t] for array in (gate, up, down))
    else:
        gate, up, down = np.split(gate, n, 1)[t], np.split(up, n, 1)[t], np.split(down, n, 2)[t]
    held[f"{at}.mlp.experts.routed_experts.w13_weight"] = np.concatenate([gate, up], axis=1)
    held[f"{at}.mlp.experts.routed_experts.w2_weight"] = down
    return held


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(52, 2, [26, 26]), (7, 2, [4, 3]), (7, 4, [2, 2, 2, 1]), (6, 4, [1, 2, 2, 1]), (5, 4, [1, 1, 2, 1])],
)
def test_left_over_layers_go_to_the_stages_before_the_last(layers: int, stages: int, expected: list[int]) -> None:
    types = {"layer_types": ("full_attention",) * layers, "mlp_layer_types": ("dense",) * layers}
    shape = replace(beam_shape(), num_hidden_layers=layers, **types)
    held = [parameters(shape, Mesh(1, stages), rank, "bfloat16") for rank in range(stages)]
    assert [sum(name.endswith("o_proj.weight") for name in names) for names in held] == expected


def test_the_router_and_its_bias_stay_float32_on_every_rank() -> None:
    mesh = Mesh(8, 2, experts=True)
    for rank in range(mesh.size):
        held = parameters(RELEASE, mesh, rank, "bfloat16")
        exact = {name: size for name, (size, dtype) in held.items() if dtype == "float32"}
        layers = range(3, 26) if rank < 8 else range(26, 52)
        router = {f"model.layers.{i}.mlp.gate.weight": (256, 5120) for i in layers}
        bias = {f"model.layers.{i}.mlp.gate.e_score_correction_bias": (256,) for i in layers}
        assert exact == {**router, **bias}


@pytest.mark.parametrize("experts", [False, True])
def test_a_rank_of_sixteen_holds_a_sixteenth_of_the_release(experts: bool) -> None:
    """58.4 GiB on average: 933.8 in all, and a little that every tensor rank has."""
    mesh = Mesh(8, 2, experts)
    held = [size for rank in range(16) for size in parameters(RELEASE, mesh, rank, "bfloat16").values()]
    total = sum(prod(size) * (4 if dtype == "float32" else 2) for size, dtype in held)
    assert total / 16 / 2**30 == pytest.approx(58.4, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        ({}, Mesh(0), "tensor=0 ranks: there must be at least one: use 1, 2, 4"),
        ({}, Mesh(1, 0), "pipeline=0 stages for 3 layers: use 1 to 3"),
        ({}, Mesh(1, 4), "pipeline=4 stages for 3 layers: use 1 to 3"),
        ({}, Mesh(8), "num_attention_heads=4 is not divisible by 8: use 1, 2, 4"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "num_experts": 12},
            Mesh(4),
            "num_key_value_heads=6 is neither a multiple nor a divisor of 4: use 1, 2",
        ),
        ({"intermediate_size": 50}, Mesh(4), "intermediate_size=50 is not divisible by 4: use 1, 2"),
        (
            {"num_attention_heads": 24, "moe_intermediate_size": 20},
            Mesh(8),
            "moe_intermediate_size=20 is not divisible by 8: use 1, 2, 4",
        ),
        (
            {"num_attention_heads": 6},
            Mesh(6),
            "vocab_size=64, filled up to 64, is not divisible by 6",
        ),
        (
            {"num_attention_heads": 16, "num_experts": 8},
            Mesh(16, experts=True),
            "num_experts=8 leaves ranks without an expert: use 1, 2, 4, 8",
        ),
    ],
)
def test_engines_that_cannot_be_cut_are_refused(changes: dict[str, int], mesh: Mesh, message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        check_mesh(beam_shape(**changes), mesh)
    assert message in str(refusal.value)
    with pytest.raises(ModelError):
        placed(beam_shape(**changes), mesh, 0, "bfloat16")


def test_whole_experts_need_no_divisible_width() -> None:
    shape = beam_shape(num_attention_heads=24, moe_intermediate_size=20)
    check_mesh(shape, Mesh(8, experts=True))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_of_the_engine_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"no rank {rank} in an engine of 4"):
        placed(beam_shape(), Mesh(2, 2), rank, "bfloat16")


def test_neither_torch_nor_vllm_is_needed() -> None:
    script = "import sys, beamline.rollout.vllm.layout; print({'torch', 'vllm'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
