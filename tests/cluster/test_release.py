"""Stages of the release on the meshes of the recipe, without memory and without the other ranks."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import BeamConfig

from beamline.learner.megatron.layout import held
from beamline.learner.megatron.mesh import Mesh
from beamline.transfer.dtypes import TORCH_DTYPES
from tests.cluster.ranks import PROCESSES, on_cpu
from tests.release_beam import RELEASE
from tests.unit.learner.test_megatron_layout import name_of
from tests.unit.learner.test_megatron_mesh import RECIPE

ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None}


def built(mesh: Mesh, rank: int) -> dict[str, Any]:
    """What a rank of many builds, and the ranks of its groups."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from beamline.learner.megatron.model import Stage, initialize

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.size)
    on_cpu()
    initialize(mesh)
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(RELEASE).items()}
    config = BeamConfig(**fields, rope_parameters=ROPE)
    stage = Stage(config, mesh, "bfloat16", torch.device("meta"))
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "expert data": parallel_state.get_expert_data_parallel_group(),
    }
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    return {
        "tensors": {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
        "parameters": [name for name, _ in stage.named_parameters()],
        "groups": {name: torch.distributed.get_process_group_ranks(group) for name, group in groups.items()},
    }


@pytest.mark.parametrize("mesh", RECIPE.values(), ids=name_of)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_rank_builds_what_the_table_says_and_belongs_to_the_groups_of_its_place(mesh: Mesh, share: float) -> None:
    rank = int(share * (mesh.size - 1))
    with ProcessPoolExecutor(1, PROCESSES) as pool:
        found = pool.submit(built, mesh, rank).result()
    table = held(RELEASE, mesh, rank, "bfloat16")
    assert found["tensors"] == {each.name: (each.shape, TORCH_DTYPES[each.dtype]) for each in table}
    assert found["parameters"] == [each.name for each in table if each.name in set(found["parameters"])]
    place, places = mesh.place(rank), [mesh.place(other) for other in range(mesh.size)]
    stage = [other for other, each in enumerate(places) if each.stage == place.stage]
    first = rank // mesh.expert * mesh.expert
    assert found["groups"] == {
        "tensor": [other for other in stage if places[other].data == place.data],
        "data": [other for other in stage if places[other].tensor == place.tensor],
        "expert": list(range(first, first + mesh.expert)),
        "expert data": [other for other in stage if places[other].expert == place.expert],
    }
