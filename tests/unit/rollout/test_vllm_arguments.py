"""What a configuration means to vLLM, held against vLLM's own source where it is installed."""

import ast
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest

import beamline
from beamline.config import ConfigError, load_config
from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import OWNED
from beamline.rollout.vllm.arguments import engine_arguments, environment

FOUND = importlib.util.find_spec("vllm")
needs_vllm = pytest.mark.skipif(FOUND is None, reason="vllm is not installed (it needs Python 3.12 or later)")


def rollout_of(*overrides: str) -> RolloutConfig:
    return load_config(None, ["rollout=vllm", *overrides]).rollout


def arguments_of(*overrides: str, routes: bool = False) -> dict[str, Any]:
    return engine_arguments(rollout_of(*overrides), routes, Path("/models/beam"), 160)


def source(name: str) -> ast.Module:
    """A module of vLLM, read and not imported: importing it takes many seconds and wants a GPU."""
    assert FOUND is not None
    assert FOUND.submodule_search_locations is not None
    return ast.parse(Path(FOUND.submodule_search_locations[0], name).read_text())


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


# Arguments


def test_the_arguments_of_a_plain_configuration() -> None:
    assert arguments_of() == {
        "model": "/models/beam",
        "tokenizer": "/models/beam",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "quantization": None,
        "hf_overrides": {"head_dtype": "float32"},
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_expert_parallel": False,
        "max_model_len": 160,
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 512,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "enable_return_routed_experts": False,
        "return_sampling_mask": False,
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": "beamline.rollout.vllm.worker.WeightsExtension",
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("vllm: {dtype: float32}", {"dtype": "float32"}),
        ("vllm: {quantization: fp8_per_tensor}", {"quantization": "fp8_per_tensor"}),
        ("vllm: {pipeline_parallel: 2}", {"pipeline_parallel_size": 2}),
        (
            "vllm: {tensor_parallel: 2, expert_parallel: true}",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        ),
        ("vllm: {memory_share: 0.5}", {"gpu_memory_utilization": 0.5}),
        ("vllm: {max_sequences: 7}", {"max_num_seqs": 7}),
        ("record_support: true, top_k: 20", {"return_sampling_mask": True}),
        ("vllm: {engine_args: {enforce_eager: true}}", {"enforce_eager": True}),
    ],
)
def test_each_setting_is_an_argument(settings: str, expected: dict[str, Any]) -> None:
    assert arguments_of(f"rollout={{{settings}}}") == {**arguments_of(), **expected}


def test_routes_are_returned_where_they_are_needed() -> None:
    assert arguments_of(routes=True) == {**arguments_of(), "enable_return_routed_experts": True}


def test_no_argument_of_ours_can_be_set_by_a_recipe() -> None:
    assert arguments_of().keys() <= OWNED.keys()


@needs_vllm
def test_vllm_has_every_argument_that_is_named() -> None:
    (definition,) = [
        node
        for node in source("engine/arg_utils.py").body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    ]
    fields = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    free = {"kv_cache_dtype", "max_num_batched_tokens"}  # named in docstrings and errors
    assert sorted({*OWNED, *arguments_of(), *free} - fields) == []


# Environment


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("replicas: 3", ["0", "1", "2"]),
        ("replicas: 2, tensor_parallel: 2", ["0,1", "2,3"]),
        ("replicas: 2, tensor_parallel: 2, devices: [7, 6, 1, 0]", ["7,6", "1,0"]),
        ("tensor_parallel: 2, pipeline_parallel: 2", ["0,1,2,3"]),
    ],
)
def test_each_replica_has_devices_of_its_own(settings: str, expected: list[str]) -> None:
    rollout = rollout_of(f"rollout.vllm={{{settings}}}")
    seen = [environment(rollout, replica)["CUDA_VISIBLE_DEVICES"] for replica in range(rollout.vllm.replicas)]
    assert seen == expected


def test_devices_are_counted_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8c1f,6")
    rollout = rollout_of("rollout.vllm={replicas: 2, devices: [1, 0]}")
    assert [environment(rollout, replica)["CUDA_VISIBLE_DEVICES"] for replica in (0, 1)] == ["GPU-8c1f", "4"]


@pytest.mark.parametrize(("visible", "shown"), [("4,5", 2), ("", 0)])
def test_a_device_that_is_not_visible_is_an_error(monkeypatch: pytest.MonkeyPatch, visible: str, shown: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as caught:
        environment(rollout_of("rollout.vllm.replicas=3"), 2)
    assert f"engine 2 is to have GPU 2, counted from 0, but CUDA_VISIBLE_DEVICES={visible} shows {shown}" in str(
        caught.value
    )


@pytest.mark.parametrize(("plugins", "expected"), [("", "beamline"), ("other", "other,beamline")])
def test_our_plugin_is_loaded_where_plugins_are_listed(
    monkeypatch: pytest.MonkeyPatch, plugins: str, expected: str
) -> None:
    """Or the engine would run without our patches, and not say so."""
    assert "VLLM_PLUGINS" not in environment(rollout_of(), 0)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert environment(rollout_of(), 0)["VLLM_PLUGINS"] == expected


def test_the_plugin_is_declared_and_active_in_engine_processes() -> None:
    from beamline.rollout.vllm import plugin

    declared = tomllib.loads(Path(beamline.__file__).parents[1].joinpath("pyproject.toml").read_text())
    entry = declared["project"]["entry-points"]["vllm.general_plugins"]["beamline"]
    assert entry == f"{plugin.__name__}:{plugin.register.__name__}"
    assert environment(rollout_of(), 0)[plugin.ACTIVE] == "1"


@needs_vllm
def test_vllm_reads_every_variable_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    read = {node.value for node in ast.walk(source("envs.py")) if isinstance(node, ast.Constant)}
    ours = {name for name in environment(rollout_of(), 0) if name.startswith("VLLM_")}
    assert len(ours) == 6
    assert sorted(ours - read) == []
