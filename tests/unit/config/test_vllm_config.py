"""Settings of generation by vLLM, and what they cannot be together with."""

import json
import re
from pathlib import Path

import pytest

from beamline.config import ConfigError, RunConfig, load_config, to_yaml
from beamline.config.describe import describe
from beamline.config.keys import keys
from beamline.config.vllm import OWNED, VllmConfig
from beamline.config.vllm_rules import LOCAL_ALONE


def problems(*overrides: str) -> list[str]:
    """What is wrong, one entry for each rule or key."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return [part for line in str(caught.value).splitlines() for part in line.split("; ")]


def with_vllm(*overrides: str) -> list[str]:
    return problems("rollout=vllm", *overrides)


def vllm_of(*overrides: str) -> VllmConfig:
    return load_config(None, ["rollout=vllm", *overrides]).rollout.vllm


# How it is chosen


def test_the_engine_is_chosen_by_its_name_alone(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rollout: {temperature: 0.5, vllm: {replicas: 4, tensor_parallel: 2}}\n")
    rollout = load_config(recipe, ["rollout=vllm", "rollout.vllm.tensor_parallel=1"]).rollout
    assert (rollout.engine, rollout.temperature) == ("vllm", 0.5)
    assert (rollout.vllm.replicas, rollout.vllm.tensor_parallel) == (4, 1)
    assert load_config(None, ["rollout.engine=vllm"]) == load_config(None, ["rollout=vllm"])


def test_a_recipe_may_hold_settings_of_the_engine_that_is_not_chosen() -> None:
    """One recipe runs on a laptop and on GPUs; what cannot be together is said where it would be used."""
    chosen = ["rollout.vllm.devices=[0,0]", "rollout.vllm.quantization=fp8_per_tensor", "rollout.vllm.dtype=float32"]
    assert load_config(None, ["rollout=local", *chosen]).rollout.vllm.devices == [0, 0]
    assert len(with_vllm(*chosen)) == 3


def test_a_full_description_loads_again(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    config = load_config(
        None,
        [
            "rollout=vllm",
            "rollout.vllm={replicas: 2, tensor_parallel: 2, expert_parallel: true, devices: [3, 2, 1, 0]}",
            "rollout.vllm.engine_args={compilation_config: {mode: 3, passes: {a: [1, null]}}, moe_backend: triton}",
        ],
    )
    for text in (to_yaml(config), describe(config)):
        recipe.write_text(text)
        assert load_config(recipe) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout=vlm", 'rollout.engine="vlm": expected `local` or `vllm`'),
        ("rollout.vllm.replicas=0", "rollout.vllm.replicas=0: expected integer >= 1"),
        ("rollout.vllm.tensor_parallel=3", "rollout.vllm.tensor_parallel=3: expected `1` or `2` or `4` or `8`"),
        (
            "rollout.vllm.devices=[-1]",
            "rollout.vllm.devices=-1: expected list of (integer >= 0)",
        ),
        ("rollout.vllm.memory_share=1.0", "rollout.vllm.memory_share=1.0: expected number > 0 and < 1"),
        ("rollout.vllm.bucket_mb=8192", "rollout.vllm.bucket_mb=8192: expected integer >= 1 and <= 4096"),
        ("rollout.vllm.quantization=fp8", 'rollout.vllm.quantization="fp8": expected `none` or `fp8_per_tensor`'),
        (
            "rollout.vllm.engine_args={--max-num-seqs: 1}",
            "--max-num-seqs: '--max-num-seqs' is no name that can stand here: expected a mapping of names matching "
            "`^[a-z][a-z0-9_]*$` to (any value)",
        ),
        ("rollout.replicas=2", "rollout.replicas=2: unknown key"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_valid(override: str, expected: str) -> None:
    (line, *_) = problems(override)
    assert expected in line


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("rollout.vllm.replica=2", "did you mean rollout.vllm.replicas?"),
        ("rollout.vllm.gpu_memory_utilization=0.5", "use rollout.vllm.memory_share"),
        ("rollout.vllm.max_num_batched_tokens=9", "arguments of vLLM's own go under rollout.vllm.engine_args"),
        ("rollout.vllm.engine-args.seed=2", "did you mean rollout.vllm.engine_args?"),
    ],
)
def test_an_unknown_key_may_be_meant_for_vllm(override: str, instead: str) -> None:
    assert problems(override) == [f"override: {override}: unknown key", instead]


# Arguments that stay free, and those that do not


def test_free_arguments_are_taken_as_they_are() -> None:
    args = ["rollout.vllm.engine_args={kv_cache_dtype: fp8, enforce_eager: true}"]
    assert vllm_of(*args).engine_args == {"kv_cache_dtype": "fp8", "enforce_eager": True}
    deeper = "rollout.vllm.engine_args.compilation_config.mode=0"
    assert vllm_of(*args, deeper).engine_args["compilation_config"] == {"mode": 0}


@pytest.mark.parametrize("name", OWNED)
def test_an_argument_of_beamline_is_refused_with_what_to_do(name: str) -> None:
    for engine in ("local", "vllm"):
        line = "; ".join(problems(f"rollout={engine}", f"rollout.vllm.engine_args.{name}=null"))
        assert line == f"rollout.vllm.engine_args: {name} cannot be set: {OWNED[name]}"


def test_a_key_that_is_named_instead_exists() -> None:
    known = {key.name for key in keys()}
    named = set(re.findall(r"(?:rollout|model|policy)\.[\w.]*\w", " ".join(OWNED.values())))
    assert len(named) > 10
    assert sorted(named - known) == []


def test_all_arguments_of_beamline_are_listed() -> None:
    found = with_vllm("rollout.vllm.engine_args={dtype: half, max_num_batched_tokens: 1, tensor_parallel_size: 2}")
    assert found == [
        "rollout.vllm.engine_args: dtype cannot be set: use rollout.vllm.dtype",
        "tensor_parallel_size cannot be set: use rollout.vllm.tensor_parallel",
    ]


# Settings of the other engine


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("slots=64", "use rollout.vllm.max_sequences"),
        ("dtype=bfloat16", "use rollout.vllm.dtype"),
        ("kv_dtype=float8_e4m3", "use rollout.vllm.engine_args.kv_cache_dtype"),
        ("head_dtype=bfloat16", "know that vllm's logits are always float32"),
    ],
)
def test_a_setting_that_only_the_local_engine_heeds_is_refused(override: str, instead: str) -> None:
    reason = f"rollout.{override} is a setting of rollout.engine=local: leave it out, and {instead}"
    assert with_vllm(f"rollout.{override}") == [reason]
    assert load_config(None, [f"rollout.{override}"]).rollout.engine == "local"


def test_a_default_of_the_local_engine_may_be_named() -> None:
    defaults = [f"rollout.{key}={json.dumps(getattr(RunConfig().rollout, key))}" for key in LOCAL_ALONE]
    assert vllm_of(*defaults) == VllmConfig()


def test_adapters_need_the_local_engine() -> None:
    assert with_vllm("policy.lora.rank=8") == [
        "policy.lora.rank=8 needs rollout.engine=local: vllm serves no adapters of Beam yet"
    ]


# Devices


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ("", 1),
        ("replicas: 3", 3),
        ("tensor_parallel: 4", 4),
        ("replicas: 2, tensor_parallel: 2, pipeline_parallel: 2", 8),
    ],
)
def test_there_are_as_many_devices_as_engines_have_parts(settings: str, devices: int) -> None:
    for n in (devices - 1, devices + 1):
        if n > 0:
            found = "; ".join(with_vllm(f"rollout.vllm={{{settings}}}", f"rollout.vllm.devices={list(range(n))}"))
            assert f"rollout.vllm.devices names {n} GPUs, and {devices} are needed" in found
    chosen = list(range(devices))[::-1]
    assert vllm_of(f"rollout.vllm={{{settings}}}", f"rollout.vllm.devices={chosen}").devices == chosen


def test_no_device_is_named_twice() -> None:
    found = with_vllm("rollout.vllm.replicas=2", "rollout.vllm.devices=[1,1]")
    assert found == ["rollout.vllm.devices=[1, 1] names a GPU twice"]


def test_experts_are_spread_over_several_devices_only() -> None:
    (found,) = with_vllm("rollout.vllm.expert_parallel=true")
    assert found.startswith("rollout.vllm.expert_parallel=true has no use with rollout.vllm.tensor_parallel=1")
    assert vllm_of("rollout.vllm.expert_parallel=true", "rollout.vllm.tensor_parallel=2").expert_parallel


def test_quantization_is_of_bfloat16() -> None:
    (found,) = with_vllm("rollout.vllm.quantization=fp8_per_tensor", "rollout.vllm.dtype=float32")
    assert found.startswith("rollout.vllm.quantization=fp8_per_tensor needs rollout.vllm.dtype=bfloat16")
    assert vllm_of("rollout.vllm.quantization=fp8_per_tensor").quantization == "fp8_per_tensor"


# Sampling


@pytest.mark.parametrize("temperature", [0.001, 0.0099, 2.01, 100.0])
@pytest.mark.parametrize("section", ["rollout", "evaluation"])
def test_temperatures_that_vllm_would_change_or_refuse(section: str, temperature: float) -> None:
    (found,) = with_vllm(f"{section}.temperature={temperature}")
    assert found.startswith(f"{section}.temperature={temperature} is not one of vllm's")
    load_config(None, [f"{section}.temperature={temperature}"])


@pytest.mark.parametrize("override", ["evaluation.temperature=0", "rollout.temperature=0.01", "rollout.temperature=2"])
def test_other_temperatures_are_free(override: str) -> None:
    vllm_of(override)


def test_no_routes_come_back_from_pipelines() -> None:
    (found, _) = with_vllm("policy.r3=true", "rollout.vllm.pipeline_parallel=2")
    assert found.startswith("policy.r3=true needs rollout.vllm.pipeline_parallel=1")
    vllm_of("policy.r3=true", "rollout.vllm.tensor_parallel=2")
    vllm_of("rollout.vllm.pipeline_parallel=2")


@pytest.mark.parametrize("filter", ["top_p=0.9", "min_p=0.1", "min_tokens=2"])
def test_a_recorded_support_is_bounded(filter: str) -> None:
    chosen = [f"rollout.{filter}", "rollout.record_support=true"]
    (found,) = with_vllm(*chosen)
    assert found.startswith("rollout.record_support=true needs a rollout.top_k with vllm")
    vllm_of(*chosen, "rollout.top_k=1000")
    load_config(None, chosen)


@pytest.mark.parametrize("value", [".nan", "[1, .inf]", "{a: {b: -.inf}}"])
def test_an_argument_of_vllm_holds_no_number_that_is_none(value: str) -> None:
    """It would be written into the state of the run, and that could not be read again."""
    with pytest.raises(ConfigError, match="x cannot hold what is no finite number"):
        load_config(None, ["rollout=vllm", f"rollout.vllm.engine_args.x={value}"])
