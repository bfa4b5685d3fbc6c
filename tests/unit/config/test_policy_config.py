"""The settings of the trained model: adapters, replayed routes, types; and of the sampler's numerics."""

from pathlib import Path
from typing import Any

import pytest

from beamline.config import ConfigError, RunConfig, load_config, to_yaml
from beamline.config.describe import describe
from beamline.config.policy import LoraConfig
from beamline.policy.lora import lora_shape

OTHERS: dict[str, Any] = {
    "alpha": 32.0,
    "dropout": 0.1,
    "targets": ["q_proj", "experts.down_proj"],
    "experts": "shared_per_layer",
    "init": "gaussian",
    "adapter_path": "some/adapter",
}
"""A value other than the default of each setting of adapters beside their rank."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\n")
    return path


def problems(recipe: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value).splitlines()


def lora_of(recipe: Path, *overrides: str) -> LoraConfig:
    return load_config(recipe, overrides).policy.lora


# Defaults


def test_by_default_every_weight_is_trained_in_float32_and_routes_are_free() -> None:
    policy, rollout = RunConfig().policy, RunConfig().rollout
    assert (policy.lora.rank, policy.r3, policy.parity, policy.dtype) == (0, False, True, "float32")
    assert (rollout.dtype, rollout.kv_dtype, rollout.head_dtype) == ("float32", "same", "float32")
    assert lora_shape(policy.lora) is None


def test_adapters_are_by_default_on_every_linear_layer_and_expert(recipe: Path) -> None:
    lora = lora_of(recipe, "policy.lora.rank=16")
    assert (lora.targets, lora.experts, lora.init, lora.dropout) == ("all-linear", "per_expert", "kaiming", 0.0)
    assert lora.adapter_path is None


def test_without_adapters_their_defaults_may_be_named(recipe: Path) -> None:
    """As a resolved configuration does, which has every key."""
    recipe.write_text(to_yaml(RunConfig()))
    assert load_config(recipe) == RunConfig()
    assert load_config(recipe, ["policy.lora={rank: 0, targets: all-linear, alpha: null, dropout: 0}"]) == RunConfig()


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (8, 0.5), (64, 4.0)])
def test_alpha_is_the_rank_unless_it_is_given(alpha: float | None, scale: float) -> None:
    shape = lora_shape(LoraConfig(rank=16, alpha=alpha))
    assert shape is not None
    assert shape.scale == scale


# Where they come from


def test_settings_are_read_from_a_recipe(recipe: Path) -> None:
    recipe.write_text(
        "policy:\n"
        "  lora: {rank: 64, alpha: 128, dropout: 0.05, targets: [q_proj, up_proj], experts: none, init: gaussian}\n"
        "  r3: true\n"
        "  parity: false\n"
        "  dtype: bfloat16\n"
        "rollout: {dtype: bfloat16, kv_dtype: float8_e4m3, head_dtype: bfloat16}\n"
    )
    config = load_config(recipe)
    assert config.policy.lora == LoraConfig(
        rank=64, alpha=128.0, dropout=0.05, targets=["q_proj", "up_proj"], experts="none", init="gaussian"
    )
    assert (config.policy.r3, config.policy.parity, config.policy.dtype) == (True, False, "bfloat16")
    numerics = config.rollout.dtype, config.rollout.kv_dtype, config.rollout.head_dtype
    assert numerics == ("bfloat16", "float8_e4m3", "bfloat16")


def test_overrides_win_over_the_recipe_key_by_key(recipe: Path) -> None:
    recipe.write_text("policy: {lora: {rank: 64, alpha: 128, targets: [q_proj]}, r3: true}\n")
    lora = lora_of(recipe, "policy.lora.alpha=16", "policy.lora.targets=[k_proj,experts.up_proj]")
    assert lora == LoraConfig(rank=64, alpha=16.0, targets=["k_proj", "experts.up_proj"])
    assert lora_of(recipe, "policy.lora={alpha: null, targets: all-linear}") == LoraConfig(rank=64)


def test_adapters_of_a_recipe_are_left_out_with_all_their_settings_or_not_at_all(recipe: Path) -> None:
    recipe.write_text("policy: {lora: {rank: 64, alpha: 128}}\n")
    (line,) = problems(recipe, "policy.lora.rank=0")
    assert line == "policy.lora.alpha has no use without adapters: set policy.lora.rank, or leave it out"
    assert lora_of(recipe, "policy.lora.rank=0", "policy.lora.alpha=null").rank == 0


def test_all_settings_load_again_from_yaml(recipe: Path) -> None:
    config = load_config(recipe, ["policy.lora.rank=24", *(f"policy.lora.{k}={v}" for k, v in OTHERS.items())])
    assert config.policy.lora.model_dump(mode="json") == {"rank": 24, **OTHERS}
    recipe.write_text(to_yaml(config))
    assert load_config(recipe) == config


def test_the_description_shows_each_setting_under_its_meaning(recipe: Path) -> None:
    config = load_config(
        recipe, ["policy.lora.rank=24", "policy.lora.targets=[q_proj]", "rollout.kv_dtype=float8_e4m3"]
    )
    lines = describe(config).splitlines()
    for line, meaning, facts in (
        ("    rank: 24", "0 = no adapters", "integer >= 0 and <= 1024 and a multiple of 8"),
        ("    alpha: null", "unset = `rank`", "or null; default `null`"),
        ("    targets:", "`q_proj`, `self_attn.gate_proj`", "default `all-linear`"),
        ("    experts: per_expert", "one for all experts of a layer", "`per_expert` or `shared_per_layer` or `none`"),
        ("  r3: false", "Rollout routing replay", "true or false; default `false`"),
        ("  device: cpu", "where it trains", "`cpu` or `cuda`; default `cpu`"),
        ("  dtype: float32", "has a float32 one beside it", "`float32` or `bfloat16`; default `float32`"),
        ("  kv_dtype: float8_e4m3", "rounded to 8 bits", "`same` or `float8_e4m3`; default `same`"),
        ("  head_dtype: float32", "before soft cap", "`float32` or `bfloat16`; default `float32`"),
    ):
        at = lines.index(line)
        comment = at - 1
        while lines[comment].lstrip().startswith("#"):
            comment -= 1
        told = " ".join(part.strip().removeprefix("# ") for part in lines[comment + 1 : at])
        assert meaning in told, told
        assert facts in told, told


# What cannot be


@pytest.mark.parametrize("rank", [8, 16, 24, 64, 1024])
def test_ranks_are_multiples_of_8(recipe: Path, rank: int) -> None:
    """Or matrices of a group would not begin where products of groups can read them."""
    assert lora_of(recipe, f"policy.lora.rank={rank}").rank == rank


@pytest.mark.parametrize("rank", [1, 4, 7, 12, 63, -8, 1025, 1032, 8.5, "'8'", "true", "null"])
def test_other_ranks_are_refused(recipe: Path, rank: object) -> None:
    (line,) = problems(recipe, f"policy.lora.rank={rank}")
    assert line.startswith("override: policy.lora.rank=")
    assert "expected integer >= 0 and <= 1024 and a multiple of 8" in line


@pytest.mark.parametrize("key", OTHERS)
def test_a_setting_of_adapters_without_any_is_an_error(recipe: Path, key: str) -> None:
    (line,) = problems(recipe, f"policy.lora.{key}={OTHERS[key]}")
    assert line == f"policy.lora.{key} has no use without adapters: set policy.lora.rank, or leave it out"
    assert lora_of(recipe, f"policy.lora.{key}={OTHERS[key]}", "policy.lora.rank=8").rank == 8


def test_every_setting_of_adapters_is_tried() -> None:
    assert {"rank", *OTHERS} == LoraConfig.model_fields.keys()


def test_all_settings_without_a_use_are_listed(recipe: Path) -> None:
    (line,) = problems(recipe, *(f"policy.lora.{key}={value}" for key, value in OTHERS.items()))
    assert [part.split()[0] for part in line.split("; ")] == [f"policy.lora.{key}" for key in sorted(OTHERS)]


@pytest.mark.parametrize(
    ("targets", "left_out"),
    [
        ("[experts.down_proj]", "experts.down_proj"),
        ("[mlp.experts.gate_proj, q_proj, experts.up_proj]", "mlp.experts.gate_proj, experts.up_proj"),
    ],
)
def test_targets_on_experts_and_none_on_experts_contradict_each_other(
    recipe: Path, targets: str, left_out: str
) -> None:
    chosen = "policy.lora.rank=8", f"policy.lora.targets={targets}"
    assert problems(recipe, *chosen, "policy.lora.experts=none") == [
        f"policy.lora.experts=none leaves out {left_out} of policy.lora.targets: use policy.lora.experts=per_expert, "
        "or other targets"
    ]
    assert lora_of(recipe, *chosen, "policy.lora.experts=shared_per_layer").experts == "shared_per_layer"


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj]", "[up_proj]", "[q_proj, down_proj]"])
def test_none_on_experts_goes_with_targets_that_lie_elsewhere_too(recipe: Path, targets: str) -> None:
    chosen = "policy.lora.rank=8", f"policy.lora.targets={targets}", "policy.lora.experts=none"
    assert lora_of(recipe, *chosen).experts == "none"


@pytest.mark.parametrize("targets", ["q_proj", "all", "[]", "[1]", "null", "{q_proj: 1}", "[all-linear]", "['']"])
def test_targets_are_all_or_a_list_of_names(recipe: Path, targets: str) -> None:
    first, *_ = problems(recipe, "policy.lora.rank=8", f"policy.lora.targets={targets}")
    assert "policy.lora.targets" in first
    assert "expected `all-linear` or list of (text matching" in first


FLOAT32_KERNELS = "policy.dtype=bfloat16 needs policy.parity=false: the kernels of parity compute in float32"
KERNELS_OF_A_CPU = "policy.device=cuda needs policy.parity=false: the kernels of parity are those of a CPU"


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        (["policy.dtype=bfloat16"], [FLOAT32_KERNELS]),
        (["policy.device=cuda"], [KERNELS_OF_A_CPU]),
        (["policy.dtype=bfloat16", "policy.device=cuda", "policy.lora.rank=8"], [FLOAT32_KERNELS, KERNELS_OF_A_CPU]),
    ],
)
def test_what_the_kernels_of_parity_cannot_do_is_refused(
    recipe: Path, overrides: list[str], reasons: list[str]
) -> None:
    assert problems(recipe, *overrides) == ["; ".join(reasons)]


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_in_bfloat16_without_parity(recipe: Path, device: str, rank: int) -> None:
    """On a machine without a GPU too: what a recipe says can be read anywhere."""
    chosen = ["policy.dtype=bfloat16", "policy.parity=false", f"policy.device={device}", f"policy.lora.rank={rank}"]
    policy = load_config(recipe, chosen).policy
    assert (policy.dtype, policy.device, policy.lora.rank) == ("bfloat16", device, rank)


def test_only_the_megatron_learner_computes_selectively_again(recipe: Path) -> None:
    assert load_config(recipe, ["learner=megatron", "policy.recompute=selective"]).policy.recompute == "selective"
    assert problems(recipe, "policy.recompute=selective") == [
        "policy.recompute=selective is of learner.engine=megatron; use full, or none"
    ]


def test_the_megatron_learner_is_told_no_device(recipe: Path) -> None:
    assert load_config(recipe, ["learner=megatron"]).policy.device == "cpu"
    assert problems(recipe, "learner=megatron", "policy.device=cuda") == [
        "policy.device=cuda is for learner.engine=torch: leave it out, the Megatron learner is on GPUs in any case"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["same", "float8_e4m3"])
@pytest.mark.parametrize("head_dtype", ["float32", "bfloat16"])
def test_the_samplers_types_are_free_of_each_other(recipe: Path, dtype: str, kv_dtype: str, head_dtype: str) -> None:
    """And of the learner's: what they do to the mismatch is what they are there for."""
    chosen = [f"rollout.dtype={dtype}", f"rollout.kv_dtype={kv_dtype}", f"rollout.head_dtype={head_dtype}"]
    rollout = load_config(recipe, [*chosen, "policy.lora.rank=8", "policy.r3=true"]).rollout
    assert (rollout.dtype, rollout.kv_dtype, rollout.head_dtype) == (dtype, kv_dtype, head_dtype)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("policy.lora.alpha=0", "policy.lora.alpha=0: expected number >= 0.001 and <= 1000000.0 or null"),
        ("policy.lora.dropout=1", "policy.lora.dropout=1: expected number >= 0 and < 1"),
        (
            "policy.lora.experts=each",
            'policy.lora.experts="each": expected `per_expert` or `shared_per_layer` or `none`',
        ),
        ("policy.lora.init=zero", 'policy.lora.init="zero": expected `kaiming` or `gaussian`'),
        ("policy.lora.r=8", "policy.lora.r=8: unknown key; did you mean policy.lora.rank?"),
        ("lora.rank=8", "lora.rank=8: unknown key; did you mean policy.lora.rank?"),
        (
            "policy.lora=8",
            f"policy.lora=8: expected a section with the keys rank, {', '.join(OTHERS)}",
        ),
        ("policy.r3=1", "policy.r3=1: expected true or false"),
        ("policy.device=gpu", 'policy.device="gpu": expected `cpu` or `cuda`'),
        ("policy.dtype=float16", 'policy.dtype="float16": expected `float32` or `bfloat16`'),
        ("rollout.dtype=fp8", 'rollout.dtype="fp8": expected `float32` or `bfloat16`'),
        ("rollout.kv_dtype=fp8", 'rollout.kv_dtype="fp8": expected `same` or `float8_e4m3`'),
        ("rollout.head_dtype=float8_e4m3", 'rollout.head_dtype="float8_e4m3": expected `float32` or `bfloat16`'),
    ],
)
def test_a_wrong_value_is_named_with_what_is_valid(recipe: Path, override: str, expected: str) -> None:
    assert problems(recipe, override) == [f"override: {expected}"]
