"""Adapters in the learner: the gradient of an explicit ``W + scale * B A``, beside a model that stays as it is."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from beamline.checkpoint import ShardReader, ShardWriter
from beamline.model.lora import LoraShape, adapter_tensors
from beamline.policy.lora import Adapters
from beamline.policy.weights import raw
from tests.adapters import PER_EXPERT, loras
from tests.contract.engines import LearnerFactory, torch_learner
from tests.contract.explicit import SIZE, doubles, gradients_of, logits_of_merged, logprobs_of, merged
from tests.contract.forcing import routed_batch
from tests.contract.learning import (
    GRADIENT,
    LOSS,
    assert_gradients_equal,
    batch,
    snapshot,
    update,
    updated_gradient,
    weights,
    written_loss,
)
from tests.tiny_beam import beam_shape, random_beam, reference, teacher_forced

TOKENS = sum(e.rollout.response_tokens for e in batch())
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "warmup_updates": 6}


def digest(module: nn.Module) -> str:
    """A hash of every tensor of a model."""
    made = sha256()
    for name, tensor in sorted(module.state_dict().items()):
        made.update(name.encode() + raw(tensor).numpy().tobytes())
    return made.hexdigest()


@loras
def test_gradients_are_those_of_an_explicit_model(learner_factory: LearnerFactory, lora: LoraShape) -> None:
    """The explicit model is in double precision but for norms and routers, ours in float32."""
    learner = learner_factory(random_beam(), lora=lora, b=SIZE, **GRADIENT)
    stored = doubles(learner)
    loss = written_loss(logits_of_merged(random_beam().double(), stored, lora.scale), batch(), TOKENS)
    loss.backward()
    expected = gradients_of(stored)
    gradient, stats = updated_gradient(learner, batch())
    assert gradient.keys() == expected.keys() == {spec.name for spec in adapter_tensors(beam_shape(), lora)}
    assert_gradients_equal(gradient, expected, 1e-5)
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)


@loras
@torch.no_grad()
def test_logprobs_are_those_of_an_explicit_model(learner_factory: LearnerFactory, lora: LoraShape) -> None:
    learner = learner_factory(random_beam(), lora=lora, b=SIZE)
    plain = reference(random_beam())
    plain.load_state_dict(merged(plain, {n: t.float() for n, t in doubles(learner).items()}, lora.scale), strict=False)
    for sequence, found in zip(batch(), logprobs_of(learner), strict=True):
        expected = teacher_forced(plain, sequence.rollout.token_ids, sequence.rollout.temperature)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


# The model beside it


@loras
def test_only_adapters_change_in_training(learner_factory: LearnerFactory, lora: LoraShape) -> None:
    module = random_beam()
    learner = learner_factory(module, lora=lora, lr=1e-2)
    model, before = digest(module), weights(learner)
    for _ in range(3):
        update(learner, batch())
    assert digest(module) == model
    after = weights(learner)
    assert all((after[name] != before[name]).any() for name in before)


def test_the_model_has_no_gradients_and_no_state_of_an_optimizer(
    learner_factory: LearnerFactory, tmp_path: Path
) -> None:
    module = random_beam()
    learner = learner_factory(module, lora=PER_EXPERT)
    learner.step(learner.prepare(batch(), LOSS))
    assert not any(p.requires_grad or p.grad is not None for p in module.parameters())
    learner.save(ShardWriter(tmp_path, 0))
    reader = ShardReader(tmp_path)
    adapters = {spec.name for spec in adapter_tensors(beam_shape(), PER_EXPERT)}
    assert {part.name for part in reader.slices("policy")} == adapters
    assert {part.name.rpartition("/")[0] for part in reader.slices("optimizer")} == adapters


def test_the_reference_is_the_model_without_adapters(learner_factory: LearnerFactory) -> None:
    learner, full = learner_factory(random_beam(), lora=PER_EXPERT, b=SIZE, lr=1e-2), learner_factory(random_beam())
    update(learner, batch())
    for found, same, other in zip(
        logprobs_of(learner, "reference"), logprobs_of(full), logprobs_of(learner), strict=True
    ):
        np.testing.assert_array_equal(found, same)
        assert np.abs(found - other).max() > 0.01


def test_adapters_begin_as_nothing(learner_factory: LearnerFactory) -> None:
    learners = [learner_factory(random_beam(), lora=lora) for lora in (PER_EXPERT, None)]
    for found, same in zip(*map(logprobs_of, learners), strict=True):
        np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_nothing(learner_factory: LearnerFactory, dropout: float) -> None:
    settings = {"lora": PER_EXPERT, "b": SIZE, "dropout": dropout, **GRADIENT}
    found = [
        updated_gradient(learner_factory(random_beam(), recompute=recompute, **settings), batch())[0]
        for recompute in (False, True)
    ]
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


@loras
def test_a_model_in_bfloat16_trains_adapters_in_float32(lora: LoraShape) -> None:
    """Routes are given, or routers would choose others; what is left is that activations have 8 bits."""
    module = random_beam(dtype="bfloat16")
    rounded = random_beam()
    rounded.load_state_dict(module.state_dict())
    settings = {"parity": False, "lora": lora, "b": SIZE, "r3": True, **GRADIENT}
    coarse, fine = (updated_gradient(torch_learner(m, **settings), routed_batch())[0] for m in (module, rounded))
    for name in fine:
        assert np.linalg.norm(coarse[name] - fine[name]) < 0.1 * np.linalg.norm(fine[name]), name


# What is kept


def test_a_resumed_learner_makes_the_same_updates_in_other_micro_batches(
    learner_factory: LearnerFactory, tmp_path: Path
) -> None:
    """Gradients are then summed in another order, and AdamW divides them by their size."""
    whole = learner_factory(random_beam(), lora=PER_EXPERT, **OPTIMIZER)
    for _ in range(2):
        update(whole, batch())
    whole.save(ShardWriter(tmp_path, 0))
    resumed, cut = (learner_factory(random_beam(), tokens, lora=PER_EXPERT, **OPTIMIZER) for tokens in (4096, 40))
    for learner in (resumed, cut):
        learner.load(ShardReader(tmp_path))
    expected = update(whole, batch())
    assert [update(learner, batch()).lr for learner in (resumed, cut)] == [expected.lr] * 2
    assert snapshot(resumed) == snapshot(whole)
    after = weights(whole)
    for name, found in weights(cut).items():
        np.testing.assert_allclose(found, after[name], rtol=0, atol=3e-3 * expected.lr, err_msg=name)


def test_an_adapter_that_is_not_used_stops_the_update(
    learner_factory: LearnerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_factory(random_beam(), lora=PER_EXPERT, lr=1e-2)
    before, at = snapshot(learner), Adapters.at
    missing = "model.layers.1.self_attn", "o_proj"
    monkeypatch.setattr(Adapters, "at", lambda self, *names: None if names[:2] == missing else at(self, *names))
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.self_attn\.o_proj"):
        update(learner, batch())
    assert snapshot(learner) == before
    monkeypatch.undo()
    assert not update(learner, batch()).skipped
