"""Reading and writing model folders: ours and that of transformers are one format, and what is damaged is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from beamline.checkpoint import CheckpointError, ShardReader, ShardWriter
from beamline.model.beam import BeamShape, ModelError
from beamline.model.lora import LoraShape
from beamline.policy import model
from beamline.policy.lora import Adapters
from beamline.policy.weights import module_layout, named_tensors, raw
from tests.tiny_beam import VOCAB, evaluate, random_beam, reference

NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.2.mlp.experts.11.down_proj.weight"
IDS = np.random.default_rng(0).integers(0, VOCAB, 40)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save(random_beam(), folder, "float32")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(folder: Path) -> list[Path]:
    """Cut the one file into two and an index, as large models come."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    paths = []
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        paths.append(folder / f"model-0000{i}-of-00002.safetensors")
        save_file({name: tensors[name] for name in part}, paths[-1])
        weight_map.update(dict.fromkeys(part, paths[-1].name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return paths


def assert_same_tensors(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = named_tensors(one), named_tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


# Round trips


def test_what_was_saved_is_loaded(saved: Path) -> None:
    assert_same_tensors(model.load(saved, "float32"), random_beam())


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_the_router_keeps_its_precision_on_the_way(tmp_path: Path, stored: Any, held: Any) -> None:
    module = random_beam()
    model.save(module, tmp_path, stored)
    loaded = named_tensors(model.load(tmp_path, held))
    for name, tensor in named_tensors(module).items():
        expected = tensor if ".mlp.gate." in name else tensor.to(getattr(torch, stored)).to(getattr(torch, held))
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected), name


def test_shards_with_an_index_are_loaded(folder: Path) -> None:
    shard(folder)
    assert_same_tensors(model.load(folder, "float32"), random_beam())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_what_we_save(tmp_path: Path, dtype: Any) -> None:
    model.save(random_beam(), tmp_path, dtype)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.config.architectures == ["BeamForCausalLM"]
    assert loaded.model.layers[1].mlp.gate.weight.dtype == torch.float32
    ours = reference(model.load(tmp_path, dtype))
    assert torch.equal(evaluate(loaded.eval(), IDS).logits_SV, evaluate(ours, IDS).logits_SV)


def test_we_load_what_transformers_saves(tmp_path: Path) -> None:
    reference(random_beam()).save_pretrained(tmp_path)
    assert_same_tensors(model.load(tmp_path, "float32"), random_beam())


def written(module: nn.Module, folder: Path) -> ShardReader:
    """A checkpoint of a module's weights as they are."""
    buffers = (raw(tensor).numpy() for tensor in named_tensors(module).values())
    ShardWriter(folder, 0).write("policy", module_layout(module).ranks[0], buffers)
    return ShardReader(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_module_is_restored_from_a_checkpoint_rounded_to_its_type(tmp_path: Path, dtype: Any) -> None:
    other = random_beam(1, dtype)
    model.restore(named_tensors(other), written(random_beam(0), tmp_path))
    assert_same_tensors(other, random_beam(0, dtype))


def test_a_checkpoint_that_is_not_in_float32_is_an_error(tmp_path: Path) -> None:
    reader = written(random_beam(0, "bfloat16"), tmp_path)
    with pytest.raises(CheckpointError, match=r"expected float32 .*, found bfloat16"):
        model.restore(named_tensors(random_beam()), reader)


# Damage


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        model.load(tmp_path / "nowhere", "float32")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_an_error(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name} is missing"):
        model.load(folder, "float32")


def test_a_missing_shard_is_an_error(folder: Path) -> None:
    shard(folder)[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        model.load(folder, "float32")


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}', '{"weight_map": {"lm_head.weight": 1}}'])
def test_an_index_that_is_none_is_an_error(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="is not an index of safetensors"):
        model.load(folder, "float32")


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-100], lambda data: data[:20], lambda data: b"", lambda data: b"\xff" * 8 + data[8:]],
    ids=["truncated", "truncated in the header", "empty", "header size"],
)
def test_a_damaged_file_is_an_error(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors is corrupt"):
        model.load(folder, "float32")


def _set(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), f"lacks 1 of .*, first {EXPERT}"),
        (lambda t: t.update({"model.norm.bias": torch.zeros(3)}), "holds model.norm.bias, which this model"),
        (lambda t: t.update({NORM: torch.zeros(31)}), rf"{NORM} has shape \(31,\), expected \(32,\)"),
        (lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}), rf"{EXPERT} has shape \(16, 32\)"),
        (_set(NORM, float("nan")), f"{NORM} holds values that are not finite"),
        (_set(EXPERT, float("inf")), f"{EXPERT} holds values that are not finite"),
    ],
    ids=["missing", "unknown", "misshapen", "transposed", "nan", "inf"],
)
def test_a_wrong_tensor_is_an_error(folder: Path, change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        model.load(folder, "float32")


SLIDING = {"rope_type": "default", "rope_theta": 100.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 but 2 groups hold 8 experts"),
        ({"num_hidden_layers": 4}, "layer_types has 3 entries for 4 layers"),
        ({"n_group": 16, "topk_group": 8}, "n_group=16 leaves 1 of 16 experts to a group"),
        ({"hidden_size": "32"}, "hidden_size='32': not a positive number"),
        ({"head_dim": 0, "rms_norm_eps": -1e-6}, "head_dim=0, rms_norm_eps=-1e-06: not a positive number"),
        ({"final_logit_softcapping": None}, "lacks final_logit_softcapping"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: Beam has 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"rope_parameters": {"sliding_attention": SLIDING, "full_attention": SLIDING}}, "rope_parameters=.*null"),
        (
            {"rope_parameters": {"sliding_attention": SLIDING | {"rope_type": "yarn", "factor": 4.0}}},
            "rope_parameters=.*yarn",
        ),
    ],
)
def test_a_configuration_that_is_not_a_beam_is_an_error(folder: Path, changes: dict[str, Any], message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(ModelError, match=f"config.json: .*{message}"):
        model.load(folder, "float32")


def test_a_configuration_of_another_size_is_an_error(folder: Path) -> None:
    configure(folder, hidden_size=64)
    with pytest.raises(ModelError, match=r"has shape .*, expected"):
        model.load(folder, "float32")


# What a model is known by


def test_a_fingerprint_does_not_depend_on_files(folder: Path) -> None:
    before = model.fingerprint(folder)
    save_file({"unused": torch.zeros(2)}, folder / "extra.safetensors")
    assert model.fingerprint(folder) == before
    shard(folder)
    assert model.fingerprint(folder) == before


@pytest.mark.parametrize("change", [{"num_experts_per_tok": 2}, {"routed_scaling_factor": 2.0}])
def test_a_fingerprint_depends_on_what_is_computed(folder: Path, change: dict[str, Any]) -> None:
    before = model.fingerprint(folder)
    configure(folder, **change)
    assert model.fingerprint(folder) != before


def test_a_fingerprint_depends_on_every_weight(folder: Path) -> None:
    before = model.fingerprint(folder)
    rewrite(folder, lambda tensors: tensors[EXPERT].view(-1)[-1:].add_(1e-3))
    assert model.fingerprint(folder) != before


def test_adapters_are_not_restored_in_part(tmp_path: Path) -> None:
    module = random_beam()
    shape, lora = BeamShape.from_config(module.config.to_dict()), LoraShape(8, 8.0)
    adapters = Adapters(shape, lora, "kaiming", 0)
    reader = written(adapters, tmp_path)
    fewer = Adapters(shape, LoraShape(8, 8.0, ("q_proj",)), "kaiming", 0)
    for other in (fewer, module):
        with pytest.raises(CheckpointError, match=r"holds an adapter: \d+ tensors, of which \d+ have no place"):
            model.restore(named_tensors(other), reader)


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 40])
def test_weights_in_several_files_are_those_in_one(tmp_path: Path, shard_bytes: int) -> None:
    """No file holds more than it may, but for a tensor that is larger; transformers finds them by the index, too."""
    module = random_beam()
    own = named_tensors(module)
    model.write(module.config, own.__getitem__, tmp_path, "float32", shard_bytes)  # type: ignore[arg-type]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes == 1 << 40)
    for file in files:
        stored = load_file(file)
        assert len(stored) == 1 or sum(tensor.nbytes for tensor in stored.values()) <= shard_bytes
    loaded = named_tensors(model.load(tmp_path, "float32"))
    assert all(torch.equal(loaded[name], own[name]) for name in own)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, own["lm_head.weight"])
