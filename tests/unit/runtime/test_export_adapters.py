"""A checkpoint of adapters as a folder: PEFT's files, or merged into the weights of a Hugging Face model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from beamline.checkpoint import CheckpointStore, open_checkpoint
from beamline.config import load_config
from beamline.config.schema import RunConfig
from beamline.model.beam import ModelError
from beamline.policy import model, parity, peft
from beamline.policy.attention import Packing
from beamline.policy.lora import Adapters
from beamline.policy.weights import module_layout, named_tensors, raw
from beamline.runtime.engines import base_fingerprint, load_adapters, load_module, sampler_of
from beamline.runtime.export import export, saved_adapters
from beamline.runtime.subject import find_subject
from tests.contract.sampling import requests, run, sequence
from tests.tiny_beam import VOCAB, evaluate, random_beam, reference, teacher_forced

RANK, ALPHA = 8, 12.0
IDS = np.random.default_rng(0).integers(0, VOCAB, 60)
TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": "{ }", "chat_template.jinja": "hello"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a model whose weights are not float32, with some tokenizer."""
    model.save(random_beam(), tmp_path / "base", "bfloat16")
    for name, text in (TOKENIZER | {"generation_config.json": "{}"}).items():
        (tmp_path / "base" / name).write_text(text)
    return tmp_path / "base"


def config_of(base: Path, *overrides: str, **lora: Any) -> RunConfig:
    settings = {"rank": RANK, "alpha": ALPHA} | lora
    limits = ("rollout.max_prompt_tokens=32", "rollout.max_response_tokens=48", "rollout.slots=3", *overrides)
    lora_settings = [f"policy.lora.{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(None, [f"model.path={base}", *limits, *lora_settings])


@torch.no_grad()
def trained(config: RunConfig) -> nn.Module:
    """What a run would train, with other weights than those it begins with: for adapters, B is not 0."""
    module = load_adapters(config) or load_module(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in named_tensors(module).values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return module


def checkpoint_of(config: RunConfig, module: nn.Module, folder: Path) -> Path:
    """A checkpoint as the learner writes it."""
    state = {"updates": 1, "skipped_updates": 0, "problems_drawn": 4, "environment": {}, "problems": {}}
    state |= {"base": base_fingerprint(config), "config": config.model_dump(mode="json")}
    buffers = [raw(tensor).numpy() for tensor in named_tensors(module).values()]
    store = CheckpointStore(folder, keep=0)
    return store.save(3, state, lambda writer: writer.write("policy", module_layout(module).ranks[0], buffers))


@pytest.fixture(params=["per_expert", "shared_per_layer", "none"])
def config(base: Path, request: pytest.FixtureRequest) -> RunConfig:
    return config_of(base, experts=request.param)


@pytest.fixture
def saved(config: RunConfig, tmp_path: Path) -> Path:
    """A checkpoint of adapters."""
    return checkpoint_of(config, trained(config), tmp_path / "checkpoints")


def merged(config: RunConfig, saved: Path, tmp_path: Path) -> nn.Module:
    export(config, saved, tmp_path / "merged", merge=True)
    return model.load(tmp_path / "merged", "float32")


# The adapter


def test_adapters_are_exported_in_peft_format_with_the_tokenizer(
    config: RunConfig, saved: Path, tmp_path: Path
) -> None:
    export(config, saved, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {peft.CONFIG, peft.WEIGHTS, *TOKENIZER}
    assert [(tmp_path / "out" / name).read_text() for name in TOKENIZER] == list(TOKENIZER.values())
    found = peft.describe(tmp_path / "out")
    assert (found.base, found.base_sha256) == (config.model.path, base_fingerprint(config))
    adapters = load_adapters(config)
    assert adapters is not None
    peft.load(adapters, tmp_path / "out")
    for name, tensor in named_tensors(trained(config)).items():
        assert torch.equal(named_tensors(adapters)[name], tensor), name


def test_the_adapter_that_a_run_began_from_is_not_needed_any_more(base: Path, tmp_path: Path) -> None:
    config = config_of(base)
    saved = checkpoint_of(config, trained(config), tmp_path / "checkpoints")
    began = config_of(base, adapter_path=f"{tmp_path / 'gone'}")
    export(began, saved, tmp_path / "out")
    assert peft.is_adapter(tmp_path / "out")


# Merged


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_merged_weights_are_base_plus_scaled_product(base: Path, tmp_path: Path, held: str) -> None:
    """From the files alone, in double precision: one rounding to float32 each of product, scale and sum.

    So it is too where the run holds its model in bfloat16.
    """
    config = config_of(base, f"policy.dtype={held}", "policy.parity=false")
    saved = checkpoint_of(config, trained(config), tmp_path / "checkpoints")
    export(config, saved, tmp_path / "adapter")
    export(config, saved, tmp_path / "merged", merge=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    pairs = load_file(tmp_path / "adapter" / peft.WEIGHTS)
    assert before.keys() == after.keys()
    for name, weight in after.items():
        stem = f"base_model.model.{name.removesuffix('weight')}"
        expected = before[name].double()
        if f"{stem}lora_A.weight" in pairs:
            a, b = (pairs.pop(f"{stem}lora_{m}.weight").double() for m in "AB")
            expected = expected + ALPHA / RANK * b @ a
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)
    assert not pairs


def logprobs(module: nn.Module, adapters: Adapters | None, path: Any) -> Tensor:
    """Log-probabilities ``[S - 1]`` of IDS in a learner's pass."""
    ids, positions = torch.from_numpy(IDS[:-1]), torch.arange(len(IDS) - 1)
    hidden = path.hidden_states(module, ids, positions, Packing.of([0, len(ids)]), adapters)
    typed: Any = module
    cap = typed.config.final_logit_softcapping
    every = torch.log_softmax(cap * torch.tanh(hidden @ typed.lm_head.weight.T / cap), dim=-1)
    return every[torch.arange(len(ids)), torch.from_numpy(IDS[1:])]


@pytest.mark.parametrize("path", [model, parity], ids=["Hugging Face module", "kernels"])
@torch.no_grad()
def test_merged_and_unmerged_logprobs_agree(config: RunConfig, saved: Path, tmp_path: Path, path: Any) -> None:
    adapters = saved_adapters(config, open_checkpoint(saved))
    one, other = logprobs(load_module(config), adapters, path), logprobs(merged(config, saved, tmp_path), None, path)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert (one - logprobs(load_module(config), None, path)).abs().max() > 0.1


def test_merged_and_unmerged_logprobs_agree_in_the_sampler(config: RunConfig, saved: Path, tmp_path: Path) -> None:
    """Each is held against the merged model in the Hugging Face module, so that tokens need not be the same."""
    adapters = saved_adapters(config, open_checkpoint(saved))
    whole = merged(config, saved, tmp_path)
    plain = reference(whole)
    asked = requests()
    samplers = sampler_of(config, load_module(config), 3, adapters), sampler_of(config_of_merged(config), whole, 3)
    for sampler in samplers:
        for wanted, completion in zip(asked, run(sampler, asked), strict=True):
            expected: NDArray[np.float32] = teacher_forced(plain, sequence(wanted, completion))
            new = expected[len(wanted.prefix_ids) - 1 :]
            np.testing.assert_allclose(completion.logprobs, new, rtol=1e-5, atol=1e-5)


def config_of_merged(config: RunConfig) -> RunConfig:
    return config_of(Path(config.model.path), rank=0, alpha=None)


def test_transformers_reads_the_merged_model(config: RunConfig, saved: Path, tmp_path: Path) -> None:
    export(config, saved, tmp_path / "merged", merge=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    assert loaded.dtype == torch.float32
    loaded.set_experts_implementation("eager")
    ours = reference(model.load(tmp_path / "merged", "float32"))
    assert torch.equal(evaluate(loaded.eval(), IDS).logits_SV, evaluate(ours, IDS).logits_SV)
    assert (tmp_path / "merged" / "generation_config.json").exists()
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_every_weight_trained_leaves_nothing_to_merge(base: Path, tmp_path: Path) -> None:
    config = config_of(base, rank=0, alpha=None)
    saved = checkpoint_of(config, trained(config), tmp_path / "checkpoints")
    with pytest.raises(ModelError, match="holds every weight and no adapter to merge: export it without --merge"):
        export(config, saved, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("merge", [False, True])
def test_a_base_that_has_changed_is_an_error(base: Path, tmp_path: Path, merge: bool) -> None:
    config = config_of(base)
    saved = checkpoint_of(config, trained(config), tmp_path / "checkpoints")
    model.save(random_beam(1), base, "bfloat16")
    with pytest.raises(ModelError, match=rf"global_step_3 was trained beside another model than the one in {base} now"):
        export(config, saved, tmp_path / "out", merge)
    assert not (tmp_path / "out").exists()


def test_a_base_that_has_changed_is_no_error_where_every_weight_was_trained(base: Path, tmp_path: Path) -> None:
    config = config_of(base, rank=0, alpha=None)
    weights = trained(config)
    saved = checkpoint_of(config, weights, tmp_path / "checkpoints")
    model.save(random_beam(1), base, "bfloat16")
    export(config, saved, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in named_tensors(weights).items())


# Whole or not at all


def left(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, hidden or not."""
    return {f"{p.relative_to(folder)}": p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def exported(base: Path, tmp_path: Path) -> tuple[RunConfig, Path, Path]:
    """A configuration, its checkpoint, and what an earlier version has exported of it."""
    config = config_of(base)
    saved = checkpoint_of(config, trained(config), tmp_path / "checkpoints")
    out = tmp_path / "export" / "out"
    export(config, saved, out)
    (out / "old").touch()
    return config, saved, out


def test_an_export_takes_the_place_of_an_earlier_one(exported: tuple[RunConfig, Path, Path]) -> None:
    config, saved, out = exported
    export(config, saved, out)
    assert not (out / "old").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_the_earlier_one(
    exported: tuple[RunConfig, Path, Path], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, saved, out = exported
    before = left(out.parent)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(type(error)):
        export(config, saved, out)
    assert left(out.parent) == before


@pytest.mark.parametrize("stopped", ["while writing", "between the names", "before the old one was removed"])
def test_an_export_goes_on_after_a_crash(exported: tuple[RunConfig, Path, Path], stopped: str) -> None:
    config, saved, out = exported
    (out / "old").unlink()
    whole = left(out.parent)
    staging, old = out.with_name(".out.beamline-staging"), out.with_name(".out.beamline-old")
    if stopped == "while writing":
        staging.mkdir()
        (staging / "half").touch()
    elif stopped == "between the names":
        out.rename(old)
    else:
        shutil.copytree(out, old)
    export(config, saved, out)
    assert left(out.parent) == whole


def test_a_run_that_goes_on_does_not_need_the_adapter_that_it_began_from(base: Path, tmp_path: Path) -> None:
    began = config_of(base, adapter_path=f"{tmp_path / 'gone'}")
    assert load_adapters(began, begins=False) is not None
    with pytest.raises(ModelError, match="gone"):
        load_adapters(began)


def test_what_is_too_large_to_be_merged_is_not_exported(base: Path, tmp_path: Path) -> None:
    config = config_of(base)
    module = trained(config)
    for parameter in module.parameters():
        parameter.data.fill_(1e30)
    saved = checkpoint_of(config, module, tmp_path / "checkpoints")
    with pytest.raises(ModelError, match=r"q_proj.weight would hold values that are not finite"):
        export(config, saved, tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


def test_the_type_of_the_base_goes_with_its_adapter(base: Path, tmp_path: Path) -> None:
    config = config_of(base, "policy.dtype=bfloat16", "policy.parity=false")
    saved = checkpoint_of(config, trained(config), tmp_path / "checkpoints")
    export(config, saved, tmp_path / "out")
    assert peft.describe(tmp_path / "out").base_dtype == "bfloat16"
    subject = find_subject(str(tmp_path / "out"), ["rollout.max_response_tokens=32"])
    assert (subject.config.policy.dtype, subject.config.policy.parity) == ("bfloat16", False)


@pytest.mark.parametrize("other", ["policy.lora.targets=[q_proj]", "policy.lora.alpha=32", "policy.lora.experts=none"])
def test_adapters_of_a_checkpoint_are_not_taken_for_others(base: Path, tmp_path: Path, other: str) -> None:
    config = config_of(base)
    saved = checkpoint_of(config, trained(config), tmp_path / "checkpoints")
    with pytest.raises(ModelError, match="which no other settings can change"):
        find_subject(str(saved), [other])
