"""Where a Beam lies in a learner over Megatron-Core: every element somewhere, nothing twice but what is alike."""

from collections import defaultdict
from math import prod

import numpy as np
import pytest

from beamline.learner.megatron.layout import held, learner_layout
from beamline.learner.megatron.mesh import Mesh
from beamline.model.beam import BeamShape, tensors
from beamline.model.layout import Layout, TensorSlice
from beamline.transfer.plan import plan
from tests.release_beam import RELEASE
from tests.tiny_beam import beam_shape
from tests.unit.learner.test_megatron_mesh import RECIPE

MESHES = [
    Mesh(),
    Mesh(tensor=2),
    Mesh(data=2),
    Mesh(tensor=2, expert=2),
    Mesh(data=4, expert=2),
    Mesh(tensor=2, data=2, expert=4, pipeline=3),
]
GIB = 1 << 30


def name_of(mesh: Mesh) -> str:
    return f"tensor{mesh.tensor}-expert{mesh.expert}-pipeline{mesh.pipeline}-data{mesh.data}"


def copies(shape: BeamShape, mesh: Mesh) -> dict[str, np.ndarray]:
    """How many ranks hold each element of each tensor."""
    counts = {spec.name: np.zeros(spec.shape, dtype=int) for spec in tensors(shape)}
    for rank in learner_layout(shape, mesh, "bfloat16").ranks:
        for part in rank:
            counts[part.name][part.index] += 1
    return counts


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_each_element_is_held_as_often_as_its_kind_is(mesh: Mesh) -> None:
    for name, counts in copies(beam_shape(), mesh).items():
        if ".experts." in name:
            expected = mesh.stage_size // mesh.expert
        elif "norm" in name or ".gate." in name:
            expected = mesh.stage_size
        else:
            expected = mesh.data
        assert (counts == expected).all(), name


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_a_tensor_rank_has_the_key_heads_and_gates_of_its_query_heads(mesh: Mesh) -> None:
    shape = beam_shape()
    per_key = shape.num_attention_heads // shape.num_key_value_heads
    for rank in range(mesh.size):
        rows: dict[str, tuple[int, int]] = {}
        for part in (part for each in held(shape, mesh, rank, "bfloat16") for part in each.parts):
            if ".layers.0.self_attn." in part.name:
                rows[part.name.rsplit("self_attn.")[1]] = part.start[0], part.stop[0]
        if not rows:
            continue
        first, last = (rows["k_proj.weight"][i] // shape.head_dim for i in (0, 1))
        queries = first * per_key * shape.head_dim, last * per_key * shape.head_dim
        assert rows["v_proj.weight"] == rows["k_proj.weight"]
        assert rows["q_proj.weight"] == rows["gate_proj.weight"] == queries
        assert rows["gate_bias"] == (first * per_key, last * per_key)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_parts_fill_their_parameters_one_after_the_other(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        for parameter in held(beam_shape(), mesh, rank, "bfloat16"):
            marks = np.zeros(parameter.shape, dtype=int)
            for number, placed in enumerate(parameter.placed()):
                marks[placed.box] += number + 1
            flat = marks.reshape(-1)
            assert (flat >= 1).all()
            assert (np.diff(flat) >= 0).all()


@pytest.mark.parametrize("mesh", RECIPE.values(), ids=name_of)
def test_the_ranks_of_the_recipe_hold_the_release_and_experts_are_spread_evenly(mesh: Mesh) -> None:
    layers, each = len(RELEASE.moe_layers), RELEASE.num_experts // mesh.expert
    experts: dict[int, int] = defaultdict(int)
    for rank in range(0, mesh.size, 3):  # some of all kinds
        place = mesh.place(rank)
        names = {part.name for parameter in held(RELEASE, mesh, rank, "bfloat16") for part in parameter.parts}
        found = {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}
        assert found == set(range(place.expert * each, (place.expert + 1) * each))
        experts[place.stage] = len({name.split(".mlp.")[0] for name in names if ".experts." in name})
    assert sum(experts.values()) == layers


def test_bytes_of_a_rank_of_the_recipe_are_those_that_were_computed_by_hand() -> None:
    """beam.md 1.6, TP4 EP8: attention and dense layers 1.49 GiB, experts 57.4 GiB with two stages; half with four."""
    for mesh, dense, experts in ((RECIPE[16], 1.49, 57.4), (RECIPE[64], 0.74, 28.7)):
        found = {"dense": 0.0, "experts": 0.0}
        for stage in range(mesh.pipeline):
            for parameter in held(RELEASE, mesh, stage * mesh.stage_size, "bfloat16"):
                kind = "experts" if ".experts." in parameter.name else "dense"
                if "embed" not in parameter.name and "lm_head" not in parameter.name and ".gate." not in parameter.name:
                    found[kind] += prod(parameter.shape) * 2 / mesh.pipeline / GIB
        assert found["dense"] == pytest.approx(dense, rel=0.01)
        assert found["experts"] == pytest.approx(experts, rel=0.002)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_weights_find_their_way_to_another_mesh_and_to_one_rank(mesh: Mesh) -> None:
    shape = beam_shape()
    layout = learner_layout(shape, mesh, "bfloat16")
    whole = Layout((tuple(TensorSlice.whole(s.name, s.dtype, s.shape) for s in tensors(shape)),))
    for destination in (whole, learner_layout(shape, MESHES[-1], "bfloat16")):
        moved = sum(prod(move.part.size) for move in plan(layout, destination).moves)
        assert moved == sum(prod(part.size) for rank in destination.ranks for part in rank)
