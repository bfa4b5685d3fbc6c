"""The parameters of vLLM's own Beam, and what its own loader puts into them, for each rank of an engine, without a GPU.

vLLM is told that it runs on a CPU, and its process groups are stand-ins that only know a rank and a size.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beamline.model.beam import BeamShape
from beamline.rollout.vllm.layout import Mesh, parameters
from tests.release_beam import RELEASE
from tests.unit.rollout.vllm_meshes import MESHES, assembled, checkpoint, name_of, uneven

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(autouse=True, scope="module")
def _without_a_gpu() -> Iterator[None]:
    """vLLM chooses its platform when it is first asked for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Engine":
    return Engine(monkeypatch, tmp_path)


class Engine:
    """Builds the module that vLLM has on one rank."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self._folder = patch, folder

    def rank(self, shape: BeamShape, mesh: Mesh, rank: int, dtype: torch.dtype, device: str) -> Any:
        from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.models.beam import BeamForCausalLM

        write_config(shape, self._folder)
        model = ModelConfig(str(self._folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=16)
        config = VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))
        config.parallel_config.enable_expert_parallel = mesh.experts
        self._pretend(mesh, rank)
        with set_current_vllm_config(config), torch.device(device):
            default = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return BeamForCausalLM(vllm_config=config)
            finally:
                torch.set_default_dtype(default)

    def _pretend(self, mesh: Mesh, rank: int) -> None:
        from vllm.distributed import parallel_state

        stage, index = divmod(rank, mesh.tensor)
        groups = {"_TP": group(index, mesh.tensor), "_PP": group(stage, mesh.pipeline)}
        alone = {name: group(0, 1) for name in ("_DP", "_PCP", "_DCP")}
        for name, stand_in in {**groups, **alone, "_EP": groups["_TP"]}.items():
            self._patch.setattr(parallel_state, name, stand_in)


def group(rank: int, size: int) -> SimpleNamespace:
    """A process group without processes. To the fused all-reduce, which wants GPUs, it is of one rank."""
    ends = {"is_first_rank": rank == 0, "is_last_rank": rank == size - 1}
    return SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=SimpleNamespace(size=lambda: 1), **ends)


def write_config(shape: BeamShape, folder: Path) -> None:
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None}
    config = {"model_type": "beam", "architectures": ["BeamForCausalLM"], "rope_parameters": rope, **asdict(shape)}
    (folder / "config.json").write_text(json.dumps(config))


def sizes(module: torch.nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in module.named_parameters()]


def ours(shape: BeamShape, mesh: Mesh, rank: int) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, size, dtype) for name, (size, dtype) in parameters(shape, mesh, rank, "bfloat16").items()]


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_ranks_have_the_parameters_of_vllm(engine: Engine, mesh: Mesh) -> None:
    for rank in range(mesh.size):
        module = engine.rank(uneven(), mesh, rank, torch.bfloat16, "meta")
        assert sizes(module) == ours(uneven(), mesh, rank)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_the_release_has_the_parameters_of_vllm_on_its_first_and_last_rank(engine: Engine, mesh: Mesh) -> None:
    for rank in {0, mesh.size - 1}:
        module = engine.rank(RELEASE, mesh, rank, torch.bfloat16, "meta")
        assert sizes(module) == ours(RELEASE, mesh, rank)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_parameters_are_what_the_loader_of_vllm_makes_of_the_checkpoint(engine: Engine, mesh: Mesh) -> None:
    shape = uneven()
    weights = checkpoint(shape)
    for rank in range(mesh.size):
        module = engine.rank(shape, mesh, rank, torch.float32, "cpu")
        for parameter in module.parameters():
            parameter.data.fill_(torch.nan)
        module.load_weights((name, torch.from_numpy(array)) for name, array in weights.items())
        expected = assembled(shape, mesh, rank, weights)
        loaded = dict(module.named_parameters())
        assert loaded.keys() == expected.keys()
        for name, array in expected.items():
            torch.testing.assert_close(loaded[name].data, torch.from_numpy(array), rtol=0, atol=0, msg=name)


def test_ranks_are_numbered_as_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded are the groups that vLLM would make of 8 ranks: of tensor ranks, and of pipeline stages."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    made: dict[str, list[list[int]]] = {}

    def record(ranks: list[list[int]], *_: Any, group_name: str, **__: Any) -> SimpleNamespace:
        made[group_name] = ranks
        return group(0, len(ranks[0]))

    mesh = Mesh(tensor=4, pipeline=2)
    for name in ("_TP", "_PP", "_DP", "_PCP", "_DCP", "_EP", "_ETP", "_ENGRAM_DP"):
        monkeypatch.setattr(parallel_state, name, None)
    for name, value in {"is_initialized": True, "get_world_size": mesh.size, "get_rank": 0}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0))
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", record)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.initialize_model_parallel(mesh.tensor, mesh.pipeline, backend="gloo")
    assert made["tp"] == [[stage * mesh.tensor + t for t in range(mesh.tensor)] for stage in range(mesh.pipeline)]
    assert made["pp"] == [[stage * mesh.tensor + t for stage in range(mesh.pipeline)] for t in range(mesh.tensor)]
