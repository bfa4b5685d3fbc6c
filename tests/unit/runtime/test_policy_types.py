"""A policy in bfloat16: what is exported and evaluated of it. One on a GPU: what is said where there is none."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from beamline.checkpoint import CheckpointStore
from beamline.config import ConfigError, load_config
from beamline.config.schema import RunConfig
from beamline.learner.torch import TorchLearner
from beamline.model.beam import ModelError
from beamline.policy import model
from beamline.policy.weights import named_tensors
from beamline.runtime import engines
from beamline.runtime.engines import check_model, load_module
from beamline.runtime.export import export
from beamline.runtime.subject import find_subject
from beamline.transfer.local import LocalChannel
from tests.contract.learning import batch, update
from tests.tiny_beam import beam_config, random_beam

IN_BFLOAT16 = ("policy.dtype=bfloat16", "policy.parity=false")
ON_A_GPU = ("policy.device=cuda", "policy.parity=false")


@pytest.fixture
def trained(tmp_path: Path) -> tuple[RunConfig, TorchLearner, Path]:
    """A learner of a run in bfloat16 after an update, and its checkpoint."""
    model.save(random_beam(), tmp_path / "base", "bfloat16")
    limits = ("rollout.max_prompt_tokens=32", "rollout.max_response_tokens=48")
    config = load_config(None, [f"model.path={tmp_path / 'base'}", "learner.optimizer.lr=1e-3", *limits, *IN_BFLOAT16])
    learner = TorchLearner(load_module(config), config.policy, config.learner, LocalChannel())
    update(learner, batch())
    state = {"updates": 1, "skipped_updates": 0, "problems_drawn": 4, "environment": {}, "problems": {}}
    state |= {"base": "", "config": config.model_dump(mode="json")}
    return config, learner, CheckpointStore(tmp_path / "checkpoints", keep=0).save(1, state, learner.save)


def test_what_is_exported_of_a_run_in_bfloat16_is_not_rounded(
    trained: tuple[RunConfig, TorchLearner, Path], tmp_path: Path
) -> None:
    config, learner, checkpoint = trained
    export(config, checkpoint, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    masters = learner._optimizer.named_weights()
    assert all(torch.equal(written[name], master) for name, master in masters.items())
    assert any((master != master.bfloat16().float()).any() for master in masters.values())


def test_what_is_evaluated_of_a_run_in_bfloat16_is_what_the_learner_computes_with(
    trained: tuple[RunConfig, TorchLearner, Path],
) -> None:
    _, learner, checkpoint = trained
    found, own = named_tensors(find_subject(str(checkpoint), ()).weights().module), named_tensors(learner._module)
    assert all(found[name].dtype == own[name].dtype and torch.equal(found[name], own[name]) for name in own)


@pytest.mark.parametrize("odd", ["hidden_size", "moe_intermediate_size"])
def test_experts_that_cannot_be_multiplied_in_bfloat16_are_refused_before_anything_is_loaded(
    odd: str, tmp_path: Path
) -> None:
    beam_config(**{odd: 36}).save_pretrained(tmp_path)
    settings = [f"model.path={tmp_path}", "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=48"]
    assert check_model(load_config(None, settings)).moe_layers
    with pytest.raises(ModelError, match=rf"policy.dtype=bfloat16 .* multiples of 8, and .* has {odd}=36: use"):
        check_model(load_config(None, [*settings, *IN_BFLOAT16]))


def test_a_model_without_experts_has_none_that_cannot_be_multiplied_in_bfloat16(tmp_path: Path) -> None:
    beam_config(hidden_size=36, mlp_layer_types=["dense"] * 3).save_pretrained(tmp_path)
    limits = ("rollout.max_prompt_tokens=32", "rollout.max_response_tokens=48")
    assert not check_model(load_config(None, [f"model.path={tmp_path}", *limits, *IN_BFLOAT16])).moe_layers


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_no_gpu")
def test_a_gpu_that_is_not_there_is_an_error_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(config: RunConfig) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(engines, "load_module", loaded)
    with pytest.raises(ConfigError, match="torch finds no NVIDIA GPU here: use cpu") as caught:
        engines.load_models(load_config(None, ON_A_GPU))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("policy.device", "cuda")]
