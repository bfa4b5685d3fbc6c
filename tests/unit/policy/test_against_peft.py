"""PEFT reads our files and computes what we do, and we read PEFT's: for every kind of linear layer of a Beam."""

import json
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from beamline.model.beam import ModelError
from beamline.model.lora import ExpertAdapters, LoraShape
from beamline.policy import model, parity, peft
from beamline.policy.attention import Packing
from beamline.policy.lora import Adapters
from tests.adapters import random_adapters
from tests.tiny_beam import VOCAB, beam_shape, random_beam, reference

RANK, ALPHA = 8, 12.0
IDS = np.random.default_rng(0).integers(0, VOCAB, 40)
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}
"""Two paths in float32: logits reach 30, where one unit in the last place is 2e-6. Without adapters they are 1 off."""

SHAPES: dict[str, tuple[tuple[str, ...] | None, ExpertAdapters]] = {
    "all": (None, "per_expert"),
    "shared by experts": (None, "shared_per_layer"),
    "no experts": (None, "none"),
    "q, k, v, o": (("q_proj", "k_proj", "v_proj", "o_proj"), "none"),
    "output gate": (("self_attn.gate_proj",), "none"),
    "dense": (("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), "none"),
    "dense up": (("mlp.up_proj",), "none"),
    "experts": (("experts.gate_proj", "experts.up_proj", "experts.down_proj"), "per_expert"),
    "experts, down": (("experts.down_proj",), "per_expert"),
    "mixed": (("k_proj", "self_attn.gate_proj", "mlp.down_proj", "experts.down_proj"), "shared_per_layer"),
}


def adapters_of(targets: tuple[str, ...] | None, experts: ExpertAdapters, **changes: Any) -> Adapters:
    """Large enough for logits to be others altogether."""
    return random_adapters(beam_shape(**changes), LoraShape(RANK, ALPHA, targets, experts), b=0.4)


def read_by_peft(folder: Path, module: nn.Module) -> tuple[nn.Module, list[str]]:
    """The Hugging Face module with PEFT's adapters, and what it warned of: what it did not find, and what it ignores.

    It also warns of patterns that it made for experts itself, and then does not find among modules: these are left out.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = PeftModel.from_pretrained(reference(module), folder).eval()
    return read, [str(w.message) for w in caught if "pattern keys did not match" not in str(w.message)]


@torch.no_grad()
def logits_of(peft_model: nn.Module) -> Tensor:
    return cast(Tensor, peft_model(torch.from_numpy(IDS)[None], use_cache=False).logits[0])


@torch.no_grad()
def our_logits(module: nn.Module, adapters: Adapters | None, path: Any = parity) -> Tensor:
    """Those of a learner's pass, in which nothing is merged."""
    ids, positions = torch.from_numpy(IDS), torch.arange(len(IDS))
    hidden = path.hidden_states(module, ids, positions, Packing.of([0, len(IDS)]), adapters)
    cap = cast(Any, module).config.final_logit_softcapping
    return cast(Tensor, cap * torch.tanh(hidden @ cast(Any, module).lm_head.weight.T / cap))


@pytest.mark.parametrize(("targets", "experts"), SHAPES.values(), ids=SHAPES)
def test_peft_gives_our_logits(tmp_path: Path, targets: tuple[str, ...] | None, experts: ExpertAdapters) -> None:
    module, adapters = random_beam(), adapters_of(targets, experts)
    peft.save(adapters, tmp_path, "starter")
    read, warned = read_by_peft(tmp_path, module)
    assert warned == []
    for path in (parity, model):
        torch.testing.assert_close(our_logits(module, adapters, path), logits_of(read), **TOLERANCE)
    assert (logits_of(read) - our_logits(module, None)).abs().max() > 1.0


def test_peft_gives_our_logits_without_dense_layers(tmp_path: Path) -> None:
    sparse = {"mlp_layer_types": ["sparse"] * 3}
    module, adapters = random_beam(**sparse), adapters_of(None, "per_expert", **sparse)
    peft.save(adapters, tmp_path, "starter")
    read, _ = read_by_peft(tmp_path, module)
    torch.testing.assert_close(our_logits(module, adapters), logits_of(read), **TOLERANCE)


def test_peft_gives_our_logits_with_an_adapter_on_gate_and_up_of_experts_alone(tmp_path: Path) -> None:
    """It has one on down too then, which adds nothing, and warns that the file does not fill it."""
    module, adapters = random_beam(), adapters_of(("experts.gate_proj", "experts.up_proj"), "per_expert")
    peft.save(adapters, tmp_path, "starter")
    read, (warned,) = read_by_peft(tmp_path, module)
    assert "missing adapter keys" in warned
    assert "mlp.experts.base_layer" not in warned  # where gate and up are
    torch.testing.assert_close(our_logits(module, adapters), logits_of(read), **TOLERANCE)


def test_peft_refuses_an_adapter_on_one_of_gate_and_up_of_experts(tmp_path: Path) -> None:
    """It holds both as one matrix. Nothing is computed wrongly, so that such adapters can be saved all the same."""
    peft.save(adapters_of(("q_proj", "experts.up_proj"), "per_expert"), tmp_path, "starter")
    with pytest.raises(ValueError, match="without also targeting gate_proj"):
        PeftModel.from_pretrained(reference(random_beam()), tmp_path)


def test_without_parameters_in_the_configuration_peft_would_leave_adapters_out(tmp_path: Path) -> None:
    """Without a word of warning: this is why the configuration names them. It may go when PEFT finds them itself."""
    adapters = adapters_of(("q_proj", "self_attn.gate_proj", "experts.gate_proj", "experts.up_proj"), "per_expert")
    peft.save(adapters, tmp_path, "starter")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": None}))
    module = random_beam()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = logits_of(PeftModel.from_pretrained(reference(module), tmp_path).eval())
    assert (theirs - our_logits(module, adapters)).abs().max() > 1.0


def made_by_peft(folder: Path, **settings: Any) -> nn.Module:
    """Have PEFT make an adapter on a random Beam, save it, and return its model."""
    torch.manual_seed(0)
    made = get_peft_model(reference(random_beam()), LoraConfig(r=RANK, lora_alpha=12, **settings)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    made.save_pretrained(folder)
    return made


def test_an_adapter_that_peft_has_made_is_read(tmp_path: Path) -> None:
    """With all fields that it writes; one projection of each input, because it gives each an A of its own."""
    made = made_by_peft(tmp_path, target_modules=["v_proj", "o_proj"], lora_dropout=0.1)
    adapters = Adapters(beam_shape(), LoraShape(RANK, ALPHA, ("v_proj", "o_proj"), "none"), "kaiming", 0)
    peft.load(adapters, tmp_path)
    torch.testing.assert_close(our_logits(random_beam(), adapters), logits_of(made), **TOLERANCE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "k_proj"]}, "k_proj.lora_A.weight differs from .*q_proj.lora_A.weight"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora=True"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"k_proj": 4}}, "rank_pattern="),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"target_modules": ["gate_proj", "up_proj", "down_proj"]}, "rank_pattern="),
    ],
    ids=["an A each", "dora", "ranks", "head", "experts in its own form"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_peft_makes_and_we_have_not_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    made_by_peft(tmp_path, **settings)
    adapters = Adapters(beam_shape(), LoraShape(RANK, ALPHA, ("q_proj", "k_proj"), "none"), "kaiming", 0)
    with pytest.raises(ModelError, match=message):
        peft.load(adapters, tmp_path)
