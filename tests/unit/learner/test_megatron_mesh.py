"""Ranks of a learner over Megatron-Core: what each stands for, and which models can be cut for them."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest

from beamline.learner.megatron.mesh import Mesh, check_mesh, mesh_of, stage_layers
from beamline.model.beam import ModelError
from tests.release_beam import RELEASE
from tests.tiny_beam import beam_shape

RECIPE = {
    16: mesh_of(16, tensor=4, expert=8, pipeline=2),
    32: mesh_of(32, tensor=4, expert=8, pipeline=2),
    64: mesh_of(64, tensor=4, expert=8, pipeline=4),
    "64, MXFP8": mesh_of(64, tensor=4, expert=8, pipeline=8),
}


@pytest.mark.parametrize("mesh", RECIPE.values(), ids=str)
def test_the_meshes_of_the_recipe_fit_the_release(mesh: Mesh) -> None:
    check_mesh(RELEASE, mesh)


def test_what_tensor_and_pipeline_leave_is_data_parallel() -> None:
    assert [(mesh.data, mesh.size) for mesh in RECIPE.values()] == [(2, 16), (4, 32), (4, 64), (2, 64)]


def test_ranks_are_numbered_tensor_first_and_stages_last() -> None:
    mesh = Mesh(tensor=2, expert=4, pipeline=2, data=4)
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert [place.tensor for place in places[:4]] == [0, 1, 0, 1]
    assert [place.data for place in places[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place.expert for place in places[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [place.stage for place in places] == [0] * 8 + [1] * 8
    assert places[8:] == [replace(place, stage=1) for place in places[:8]]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none_is_an_error(rank: int) -> None:
    with pytest.raises(ValueError, match=f"no rank {rank} in a mesh of 4"):
        Mesh(tensor=2, data=2).place(rank)


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 8, 52])
def test_stages_have_all_layers_in_order_and_differ_by_one_at_most(stages: int) -> None:
    parts = [stage_layers(52, stages, stage) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(52))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_eight_stages_of_the_release_are_four_of_seven_and_four_of_six_layers() -> None:
    assert [len(stage_layers(52, 8, stage)) for stage in range(8)] == [7, 7, 7, 7, 6, 6, 6, 6]


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (12, {"tensor": 8, "expert": 1, "pipeline": 1}, "12 ranks are not a multiple of tensor=8 x pipeline=1: use 16"),
        (8, {"tensor": 2, "expert": 3, "pipeline": 1}, "expert=3 ranks are taken from the 8 .* use 1, 2, 4, 8"),
        (8, {"tensor": 1, "expert": 8, "pipeline": 2}, "expert=8 ranks are taken from the 4 .* use 1, 2, 4"),
    ],
)
def test_numbers_that_do_not_divide_are_named_with_what_would_do(
    world: int, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        mesh_of(world, **sizes)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(tensor=16), "tensor=16 ranks: num_key_value_heads=8 is not divisible by 16: use 1, 2, 4, 8"),
        (Mesh(tensor=3), "tensor=3 ranks: num_key_value_heads=8 is not divisible by 3; vocab_size=151936"),
        (Mesh(expert=96, data=96), "expert=96 ranks: num_experts=256 is not divisible by them: use 1, 2, 4, 8"),
        (Mesh(pipeline=53), "pipeline=53 stages for 52 layers: use 1 to 52"),
    ],
)
def test_a_mesh_that_cannot_hold_the_release_is_named_with_the_rule(mesh: Mesh, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        check_mesh(RELEASE, mesh)


def test_a_model_without_dense_layers_or_experts_has_no_rule_for_them() -> None:
    check_mesh(beam_shape(mlp_layer_types=["sparse"] * 3, intermediate_size=47), Mesh(tensor=2))
    check_mesh(beam_shape(mlp_layer_types=["dense"] * 3), Mesh(expert=3, data=3))


def test_experts_are_spread_over_neighbours_in_a_stage() -> None:
    """So that their exchange stays in a node of eight, whichever data ranks there are."""
    mesh = RECIPE[32]
    nodes = defaultdict(set)
    for rank in range(mesh.size):
        nodes[rank // 8].add(mesh.place(rank).expert)
    assert all(experts == set(range(8)) for experts in nodes.values())
