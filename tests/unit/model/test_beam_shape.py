import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from beamline.model.beam import BeamShape, ModelError
from beamline.starter import STARTER

SMALL = BeamShape(
    vocab_size=100,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    sliding_window=8,
    moe_intermediate_size=12,
    num_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    final_logit_softcapping=30.0,
    rms_norm_eps=1e-6,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    mlp_layer_types=("dense", "sparse", "sparse"),
)
CONFIG: dict[str, Any] = {"model_type": "beam", "hidden_act": "silu", **asdict(SMALL)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "layer_types has 3 entries for 4 layers; mlp_layer_types has 3 of 4"),
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries for 3 layers"),
        ({"mlp_layer_types": ("dense",) * 4}, "mlp_layer_types has 4 of 3"),
        ({"mlp_layer_types": ("dense", "moe", "sparse")}, "layers of unknown type 'moe'"),
        ({"layer_types": ("full_attention", "linear", "chunked")}, "layers of unknown type 'chunked', 'linear'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 over num_key_value_heads=3"),
        ({"num_key_value_heads": 0}, "num_attention_heads=4 over num_key_value_heads=0"),
        ({"n_group": 3}, "num_experts=8 cannot be cut into n_group=3"),
        ({"n_group": 0, "topk_group": 0, "num_experts_per_tok": 0}, ".*cannot be cut into n_group=0; topk_group=0 .*"),
        ({"topk_group": 5}, r"topk_group=5 is not in 1\.\.n_group=4"),
        ({"topk_group": 0, "num_experts_per_tok": 0}, r"topk_group=0 is not in 1\.\.n_group=4"),
        ({"n_group": 8}, "n_group=8 leaves 1 of 8 experts to a group, which is judged by its best 2"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 but 2 groups hold 4 experts"),
        ({"sliding_window": 65}, "sliding_window=65 is larger than the context, max_position_embeddings=64"),
    ],
)
def test_numbers_that_contradict_each_other_are_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"model shape: {message}$"):
        replace(SMALL, **changes)


def test_all_contradictions_are_listed_at_once() -> None:
    with pytest.raises(ModelError, match=r"num_key_value_heads=3; .*n_group=3; .*sliding_window=99"):
        replace(SMALL, num_key_value_heads=3, n_group=3, sliding_window=99)


def test_the_ends_of_the_ranges_belong_to_them() -> None:
    replace(SMALL, num_experts_per_tok=4, sliding_window=64, num_key_value_heads=4)
    replace(SMALL, n_group=1, topk_group=1, num_experts_per_tok=8)


def test_moe_layers_are_global_indices() -> None:
    assert SMALL.moe_layers == (1, 2)
    assert replace(SMALL, mlp_layer_types=("sparse", "dense", "sparse")).moe_layers == (0, 2)


def test_a_configuration_gives_its_shape_and_other_keys_do_not_matter() -> None:
    assert BeamShape.from_config(json.loads(json.dumps(CONFIG))) == SMALL


@pytest.mark.parametrize("model_type", ["llama", None])
def test_another_model_family_is_an_error_that_names_it(model_type: str | None) -> None:
    with pytest.raises(ModelError, match=f"model_type is {model_type!r}; this model family is not supported"):
        BeamShape.from_config(CONFIG | {"model_type": model_type})


def test_missing_numbers_are_listed() -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("head_dim", "n_group")} | {"topk_group": None}
    with pytest.raises(ModelError, match=r"lacks head_dim, n_group, topk_group$"):
        BeamShape.from_config(config)


@pytest.mark.parametrize("name", [field.name for field in fields(BeamShape) if field.type in (int, float)])
def test_every_number_must_be_positive(name: str) -> None:
    for value in (0, -1, "8", True, [8]):
        with pytest.raises(ModelError, match="not a positive number") as caught:
            BeamShape.from_config(CONFIG | {name: value})
        assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: Beam has 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "'yarn'.* is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "no rotation. in full layers"),
    ],
)
def test_what_the_engines_do_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        BeamShape.from_config(CONFIG | changes)


def test_a_model_folder_gives_its_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert BeamShape.from_folder(tmp_path) == SMALL


def test_the_starter_has_every_trait_of_the_large_model() -> None:
    shape = BeamShape.from_folder(STARTER)
    assert set(shape.layer_types) == {"sliding_attention", "full_attention"}
    assert set(shape.mlp_layer_types) == {"dense", "sparse"}
    assert shape.num_attention_heads > shape.num_key_value_heads
    assert shape.n_group > shape.topk_group > 1
    assert shape.num_experts_per_tok > 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "holds a list, not an object"),
        (b"{}", "model_type is None"),
        (json.dumps(CONFIG | {"n_group": 3}).encode(), "cannot be cut into n_group=3"),
        (json.dumps(CONFIG | {"layer_types": 7}).encode(), "not iterable"),
        (json.dumps(CONFIG | {"num_experts": "8"}).encode(), "num_experts='8': not a positive number"),
    ],
)
def test_an_unusable_configuration_is_an_error_with_its_path(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        BeamShape.from_folder(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_folder_or_configuration_is_an_error_that_says_which(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model folder .*/no does not exist"):
        BeamShape.from_folder(tmp_path / "no")
    with pytest.raises(ModelError, match=r"config\.json is missing: .* is not a Hugging Face model folder"):
        BeamShape.from_folder(tmp_path)
