"""The torch learner with every weight in bfloat16: what it finds, follows, saves, resumes and sends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from beamline.checkpoint import ShardReader, ShardWriter
from beamline.learner.torch import TorchLearner
from beamline.policy.weights import named_tensors
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from tests.contract.engines import torch_learner
from tests.contract.learning import (
    GRADIENT,
    assert_only_experts_with_rows_change,
    batch,
    experience,
    snapshot,
    update,
    updated_gradient,
    weights,
)
from tests.tiny_beam import random_beam, reference, teacher_forced

OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "warmup_updates": 3}


def learner_of(module: nn.Module, micro_batch_tokens: int = 40, **optimizer: Any) -> TorchLearner:
    return torch_learner(module, micro_batch_tokens, parity=False, **optimizer)


def in_bfloat16(seed: int = 0) -> nn.Module:
    return random_beam(seed, "bfloat16")


def in_float32(seed: int = 0) -> nn.Module:
    """The same weights in float32."""
    module = random_beam(seed)
    module.load_state_dict(in_bfloat16(seed).state_dict())
    return module


def after(learner: TorchLearner, updates: int) -> TorchLearner:
    for number in range(updates):
        update(learner, batch()[number:])
    return learner


def saved(learner: TorchLearner, folder: Path) -> ShardReader:
    learner.save(ShardWriter(folder, 0))
    return ShardReader(folder)


def test_log_probabilities_are_as_near_to_float32_as_those_of_the_hugging_face_module() -> None:
    """In the middle: where rounding turns over a router's choice, a token's is another one altogether."""
    sequences = [experience(5, 60 + seed, seed, advantage=1.0) for seed in range(8)]
    found = learner_of(in_bfloat16()).forward(sequences, ["logprobs"]).logprobs
    assert found is not None
    exact, theirs = reference(in_float32()), reference(in_bfloat16())
    ids = [sequence.rollout.token_ids for sequence in sequences]
    one, two = (np.concatenate([teacher_forced(each, i) for i in ids]) for each in (exact, theirs))
    ours = np.concatenate(found)
    assert np.median(np.abs(ours - one)) < 1.1 * np.median(np.abs(two - one))
    assert np.median(np.abs(ours - two)) < 1.5 * np.median(np.abs(two - one))


def test_the_gradient_is_that_of_float32_but_for_rounding() -> None:
    ours, stats = updated_gradient(learner_of(in_bfloat16(), **GRADIENT), batch())
    theirs, expected = updated_gradient(learner_of(in_float32(), **GRADIENT), batch())
    one, other = (np.concatenate([each[name].ravel() for name in theirs]) for each in (ours, theirs))
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.97
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


def test_an_expert_without_rows_is_not_changed() -> None:
    module = in_bfloat16()
    assert_only_experts_with_rows_change(learner_of(module, lr=1e-2, weight_decay=0.0), module, batch()[2])


def test_a_resumed_learner_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = after(learner_of(in_bfloat16(), **OPTIMIZER), 2)
    resumed = after(learner_of(in_bfloat16(1), **OPTIMIZER), 1)  # whatever it did before is forgotten
    resumed.load(saved(whole, tmp_path))
    for learner in (whole, resumed):
        update(learner, batch())
    assert snapshot(resumed) == snapshot(whole)
    one, other = named_tensors(whole._module), named_tensors(resumed._module)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_are_exchanged_with_a_learner_in_float32(tmp_path: Path) -> None:
    """It goes on with the float32 weights, and what it saves is gone on with again: not a bit is lost on the way."""
    ours = after(learner_of(in_bfloat16(), **OPTIMIZER), 2)
    theirs = learner_of(in_float32(1), **OPTIMIZER)
    theirs.load(saved(ours, tmp_path / "ours"))
    assert snapshot(theirs) == snapshot(ours)
    back = learner_of(in_bfloat16(1), **OPTIMIZER)
    back.load(saved(theirs, tmp_path / "theirs"))
    for learner in (ours, back):
        update(learner, batch())
    assert snapshot(back) == snapshot(ours)


def test_it_sends_the_weights_that_it_computes_with(tmp_path: Path) -> None:
    channel = LocalChannel()
    learner = after(torch_learner(in_bfloat16(), channel=channel, parity=False, **OPTIMIZER), 1)
    layout = learner.layout("full")
    router = ".mlp.gate."
    assert {p.dtype for p in layout.ranks[0] if router not in p.name} == {"bfloat16"}
    assert {p.dtype for p in layout.ranks[0] if router in p.name} == {"float32"}
    received = named_tensors(random_beam(1))
    moves = plan(layout, layout)
    learner.send(moves)
    channel.receive(moves, received)
    masters = weights(learner)
    assert masters.keys() == received.keys()
    for name, tensor in received.items():
        master = torch.from_numpy(masters[name]).float()
        assert torch.equal(tensor, master if router in name else master.bfloat16().float()), name


def test_memory_that_was_given_back_comes_again_with_the_same_bits() -> None:
    """As a GPU's does; the memory of a CPU stays where it is."""
    learner, sleepless = (after(learner_of(in_bfloat16(), **OPTIMIZER), 1) for _ in range(2))
    tensors = [*learner._saved.values(), *named_tensors(learner._module).values()]
    learner._offload.sleep()
    assert {tensor.untyped_storage().size() for tensor in tensors} == {0}
    learner.wake()
    for each in (learner, sleepless):
        update(each, batch())
    assert snapshot(learner) == snapshot(sleepless)
