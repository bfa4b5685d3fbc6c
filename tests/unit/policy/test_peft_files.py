"""Adapter files: names and bytes, what is recovered from them, and everything in them that cannot be used."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from beamline.model.beam import ModelError, tensors
from beamline.model.lora import ExpertAdapters, LoraShape
from beamline.policy import peft
from beamline.policy.lora import Adapters
from beamline.policy.weights import named_tensors
from tests.faults import Crash, failing_operation
from tests.tiny_beam import beam_shape, random_beam

RANK, ALPHA, EXPERTS = 8, 12.0, 16
Tensors = dict[str, Tensor]


def lora(targets: tuple[str, ...] | None = None, experts: ExpertAdapters = "per_expert", **changes: Any) -> LoraShape:
    return LoraShape(**{"rank": RANK, "alpha": ALPHA} | changes, targets=targets, experts=experts)


SHAPES = {
    "all": lora(),
    "shared by experts": lora(experts="shared_per_layer"),
    "no experts": lora(experts="none"),
    "parts of sites": lora(("k_proj", "self_attn.gate_proj", "experts.up_proj", "mlp.down_proj")),
    "one site": lora(("o_proj",)),
    "fraction": lora(alpha=0.3),
}


def new_adapters(shape: LoraShape) -> Adapters:
    """As training begins: B is 0."""
    return Adapters(beam_shape(), shape, "kaiming", 1)


@torch.no_grad()
def random_adapters(shape: LoraShape, seed: int = 0) -> Adapters:
    """Trained ones: nothing is 0 but the B of what is not adapted."""
    adapters = new_adapters(shape)
    generator = torch.Generator().manual_seed(seed)
    for tensor in named_tensors(adapters).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return adapters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of adapters on every linear layer."""
    peft.save(random_adapters(SHAPES["all"]), tmp_path / "adapter", "starter", "0a1b")
    return tmp_path / "adapter"


def stored(folder: Path) -> Tensors:
    return dict(load_file(folder / "adapter_model.safetensors"))


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change tensors; as after any other program, the metadata is gone."""
    tensors = stored(folder)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def at(layer: int, linear: str, matrix: str) -> str:
    return f"base_model.model.model.layers.{layer}.{linear}.lora_{matrix}.weight"


def assert_equal(adapters: Adapters, others: Adapters) -> None:
    ours, theirs = named_tensors(adapters), named_tensors(others)
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


# Round trips


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_was_saved_is_loaded(tmp_path: Path, shape: LoraShape) -> None:
    adapters, others = random_adapters(shape), new_adapters(shape)
    peft.save(adapters, tmp_path, "starter")
    peft.load(others, tmp_path)
    assert_equal(others, adapters)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_folder_describes_an_adapter_with_the_same_tensors(tmp_path: Path, shape: LoraShape) -> None:
    adapters = random_adapters(shape)
    peft.save(adapters, tmp_path, "models/beam", "0a1b")
    found = peft.describe(tmp_path)
    assert (found.base, found.base_sha256) == ("models/beam", "0a1b")
    assert (found.lora.rank, found.lora.alpha) == (shape.rank, shape.alpha)
    others = new_adapters(found.lora)
    peft.load(others, tmp_path)
    assert_equal(others, adapters)


def test_every_linear_layer_has_a_pair_under_its_own_name(folder: Path) -> None:
    linears = [spec.name for spec in tensors(beam_shape()) if re.search(r"(_proj)\.weight$", spec.name)]
    assert len(linears) == 3 * 5 + 3 + 2 * EXPERTS * 3
    names = {f"base_model.model.{n.removesuffix('weight')}lora_{m}.weight" for n in linears for m in "AB"}
    assert stored(folder).keys() == names


@pytest.mark.parametrize("experts", ["per_expert", "shared_per_layer"])
def test_pairs_are_what_each_weight_is_changed_by(tmp_path: Path, experts: ExpertAdapters) -> None:
    """From the file alone, with the formula in double precision; what is compared is rounded to float32 thrice."""
    adapters = random_adapters(lora(experts=experts))
    peft.save(adapters, tmp_path, "starter")
    before, after = named_tensors(random_beam()), named_tensors(random_beam())
    adapters.merge_into(after)
    pairs = stored(tmp_path)
    for name, weight in before.items():
        a, b = (pairs.get(f"base_model.model.{name.removesuffix('weight')}lora_{m}.weight") for m in "AB")
        if a is None or b is None:
            assert torch.equal(after[name], weight), name
        else:
            changed = weight.double() + ALPHA / RANK * b.double() @ a.double()
            torch.testing.assert_close(after[name].double(), changed, rtol=1e-6, atol=1e-5)


def test_what_shares_an_input_repeats_its_a(folder: Path) -> None:
    pairs = stored(folder)
    for layer in range(3):
        q, k, v, gate = (pairs[at(layer, f"self_attn.{p}_proj", "A")] for p in ("q", "k", "v", "gate"))
        assert torch.equal(q, k)
        assert torch.equal(q, v)
        assert torch.equal(q, gate)
    for linear in ("mlp.experts.0", "mlp.experts.15"):
        gate, up = (pairs[at(2, f"{linear}.{p}_proj", "A")] for p in ("gate", "up"))
        assert torch.equal(gate, up)


def test_an_adapter_that_experts_share_stands_under_each(tmp_path: Path) -> None:
    peft.save(random_adapters(lora(experts="shared_per_layer")), tmp_path, "starter")
    pairs = stored(tmp_path)
    for expert in range(1, EXPERTS):
        for projection, matrix in (("gate_proj", "A"), ("up_proj", "B"), ("down_proj", "A"), ("down_proj", "B")):
            first, other = (pairs[at(1, f"mlp.experts.{e}.{projection}", matrix)] for e in (0, expert))
            assert torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_half_precision_are_cast(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    adapters, others = random_adapters(SHAPES["all"]), new_adapters(SHAPES["all"])
    peft.load(others, folder)
    for name, tensor in named_tensors(others).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, named_tensors(adapters)[name].to(dtype).float())


def test_a_folder_that_does_not_say_how_experts_share_is_read_as_one_adapter_an_expert(tmp_path: Path) -> None:
    shared = random_adapters(lora(experts="shared_per_layer"))
    peft.save(shared, tmp_path, "starter")
    assert peft.describe(tmp_path).lora.experts == "shared_per_layer"
    rewrite(tmp_path, lambda _: None)
    found = peft.describe(tmp_path)
    assert (found.lora.experts, found.base_sha256) == ("per_expert", "")
    own = new_adapters(found.lora)
    peft.load(own, tmp_path)
    one, other = named_tensors(random_beam()), named_tensors(random_beam())
    shared.merge_into(one)
    own.merge_into(other)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_the_folder_holds_two_files_of_which_none_is_a_pickle(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == len(stored(folder))


def test_equal_adapters_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    """Not so where the library of safetensors writes several entries of metadata."""
    for other in ("a", "b", "c"):
        peft.save(random_adapters(SHAPES["all"]), tmp_path / other, "starter", "0a1b")
        for path in folder.iterdir():
            assert (tmp_path / other / path.name).read_bytes() == path.read_bytes()


def test_a_folder_is_an_adapter_whole_or_not_at_all_whenever_the_machine_stops(tmp_path: Path) -> None:
    shape = SHAPES["one site"]
    earlier, adapters = random_adapters(shape, 1), random_adapters(shape, 2)
    for n in count(1):
        folder = tmp_path / f"{n}"
        peft.save(earlier, folder, "earlier")
        with suppress(Crash), failing_operation(n) as disk:
            peft.save(adapters, folder, "starter")
        if peft.is_adapter(folder):
            found = new_adapters(shape)
            peft.load(found, folder)
            assert_equal(found, earlier if peft.describe(folder).base == "earlier" else adapters)
        if disk.performed < n:
            break
    assert n > 5
    assert peft.describe(folder).base == "starter"


# What cannot be used


def refused(folder: Path, shape: LoraShape = SHAPES["all"]) -> str:
    with pytest.raises(ModelError) as error:
        peft.load(new_adapters(shape), folder)
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_an_error(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"{name} is missing" in refused(folder)


@pytest.mark.parametrize("content", ["{", "", "\xff\xfe"])
def test_a_configuration_that_is_no_json_is_an_error(folder: Path, content: str) -> None:
    (folder / "adapter_config.json").write_bytes(content.encode("latin-1"))
    assert "adapter_config.json is not JSON" in refused(folder)


def test_a_configuration_that_is_no_object_is_an_error(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")
    assert "holds a list, not an object" in refused(folder)


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"", lambda data: b"\xff" * 8 + data[8:]])
def test_a_damaged_file_is_an_error(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert "adapter_model.safetensors is corrupt" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 16}, "r=16, but policy.lora.rank=8"),
        ({"lora_alpha": 8}, "lora_alpha=8, but policy.lora.alpha=12"),
        ({"r": None}, "r is no number above 0 and up to 1,000,000"),
        ({"r": True}, "r is no number"),
        ({"r": 8.0}, "r is no number"),
        ({"lora_alpha": "12"}, "lora_alpha is no number"),
        ({"lora_alpha": 0}, "lora_alpha is no number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is no number"),
        ({"lora_alpha": 10**400}, "lora_alpha is no number"),
        ({"r": 4}, "r=4, and ranks are multiples of 8 here"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern="),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=[1]"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=[1]"),
        ({"of_a_later_version": {"on": True}}, "of_a_later_version={'on': True}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_kind_of_adapter_is_an_error(folder: Path, changes: dict[str, Any], message: str) -> None:
    configure(folder, **changes)
    assert message in refused(folder)


def test_fields_without_effect_are_no_error(folder: Path) -> None:
    configure(folder, lora_dropout=0.1, target_modules="all-linear", revision="main", init_lora_weights=False)
    peft.load(new_adapters(SHAPES["all"]), folder)


UP = at(1, "mlp.experts.3.up_proj", "B")
Q, OUTPUT = at(0, "self_attn.q_proj", "A"), at(0, "self_attn.o_proj", "A")


def _set(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), f"1 of 228 tensors of adapters are not in it: {UP}"),
        (lambda t: t.update({"lm_head.lora_A.weight": t[Q]}), "1 of its 229 tensors belong to no adapter: lm_head."),
        (lambda t: t.update({UP: t[UP].T.contiguous()}), rf"{UP} has shape (8, 16), expected (16, 8)"),
        (lambda t: t.update({Q: t[Q][:4]}), f"{Q} has shape (4, 32), expected (8, 32)"),
        (lambda t: t.update({UP: t[UP].double()}), f"{UP} is of type torch.float64"),
        (lambda t: t.update({UP: t[UP].int()}), f"{UP} is of type torch.int32"),
        (_set(UP, float("nan")), f"{UP} holds values that are not finite"),
        (_set(OUTPUT, float("-inf")), f"{OUTPUT} holds values that are not finite"),
    ],
    ids=["missing", "unknown", "transposed", "cut", "double", "int", "nan", "inf"],
)
def test_a_wrong_tensor_is_an_error(folder: Path, change: Callable[[Tensors], Any], message: str) -> None:
    rewrite(folder, change)
    assert message in refused(folder)


@pytest.mark.parametrize("name", [Q, at(0, "self_attn.gate_proj", "A"), at(2, "mlp.experts.9.up_proj", "A")])
def test_an_a_that_differs_from_those_of_the_same_input_is_an_error(folder: Path, name: str) -> None:
    rewrite(folder, _set(name, 0.5))
    assert "_proj.lora_A.weight differs from base_model." in refused(folder)


@pytest.mark.parametrize(("matrix", "projection"), [("A", "down_proj"), ("B", "up_proj")])
def test_experts_that_differ_cannot_share_an_adapter(tmp_path: Path, matrix: str, projection: str) -> None:
    shape = lora(experts="shared_per_layer")
    peft.save(random_adapters(shape), tmp_path, "starter")
    first, changed = (at(2, f"mlp.experts.{expert}.{projection}", matrix) for expert in (0, 7))
    rewrite(tmp_path, _set(changed, 0.5))
    message = refused(tmp_path, shape)
    assert f"{changed} differs from {first}" in message
    assert "all experts of a layer one adapter (policy.lora.experts=shared_per_layer)" in message


def test_an_adapter_on_fewer_linears_than_asked_for_is_an_error(tmp_path: Path) -> None:
    peft.save(random_adapters(SHAPES["no experts"]), tmp_path, "starter")
    message = refused(tmp_path)
    assert "does not fit policy.lora.targets=all-linear and policy.lora.experts=per_expert" in message
    assert "192 of 228 tensors of adapters are not in it" in message
    first = [at(1, f"mlp.experts.0.{name}", matrix) for name, matrix in (("gate_proj", "A"), ("gate_proj", "B"))]
    assert f"{first[0]}, {first[1]}, " in message
    assert message.endswith(", ...")


def test_an_adapter_on_more_linears_than_asked_for_is_an_error(folder: Path) -> None:
    message = refused(folder, lora(("q_proj", "v_proj"), experts="none"))
    assert "policy.lora.targets=q_proj,v_proj" in message
    assert "216 of its 228 tensors belong to no adapter" in message


def test_names_of_another_model_are_an_error(folder: Path) -> None:
    rewrite(folder, lambda t: [t.update({name.replace("layers.2", "layers.3"): t.pop(name)}) for name in [*t]])
    message = refused(folder)
    assert "belong to no adapter: base_model.model.model.layers.3." in message
    assert "are not in it: base_model.model.model.layers.2." in message


@pytest.mark.parametrize("base", [None, "", 3])
def test_an_adapter_of_no_model_cannot_be_described(folder: Path, base: Any) -> None:
    configure(folder, base_model_name_or_path=base)
    with pytest.raises(ModelError, match=r"adapter_config.json: base_model_name_or_path=.* does not name the model"):
        peft.describe(folder)


def test_a_folder_without_a_configuration_is_no_adapter(folder: Path, tmp_path: Path) -> None:
    assert peft.is_adapter(folder)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "adapter_config.json").unlink()
    assert not peft.is_adapter(other)
    assert not peft.is_adapter(tmp_path / "nowhere")
