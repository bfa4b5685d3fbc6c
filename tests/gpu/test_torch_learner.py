"""The torch learner on a GPU: against the Hugging Face module in bfloat16, against itself on the CPU in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from beamline.checkpoint import ShardReader, ShardWriter
from beamline.learner.torch import TorchLearner
from beamline.model.lora import LoraShape
from beamline.policy.weights import named_tensors
from beamline.records import Experience
from tests.adapters import PER_EXPERT
from tests.contract.engines import torch_learner
from tests.contract.learning import assert_only_experts_with_rows_change, batch, of_lengths, snapshot, update
from tests.gpu.beside_module import assert_as_near_to_float32
from tests.tiny_beam import CONTEXT, random_beam

DEVICE: Literal["cpu", "cuda"] = "cuda"
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "warmup_updates": 3}
ROWS = 200
DENSE = {"mlp_layer_types": ["dense"] * 3}


def learner_of(module: nn.Module, **settings: Any) -> TorchLearner:
    return torch_learner(module, ROWS, parity=False, device=DEVICE, **settings)


def ragged() -> list[Experience]:
    """Sequences of 2 tokens up to all that the model takes, far longer than the window."""
    lengths = [2, CONTEXT, *np.random.default_rng(0).integers(3, CONTEXT, 22).tolist()]
    return of_lengths(lengths)


def after(learner: TorchLearner, updates: int) -> TorchLearner:
    for number in range(updates):
        update(learner, batch()[number:])
    return learner


@pytest.mark.parametrize("changes", [DENSE, {}], ids=["dense", "experts"])
def test_log_probabilities_in_bfloat16_are_those_of_the_hugging_face_module(
    changes: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    module, sequences = random_beam(0, "bfloat16", **changes), ragged()
    logprobs = learner_of(module).forward(sequences, ["logprobs"]).logprobs
    assert_as_near_to_float32(logprobs, sequences, module, "dense" if changes else "experts", record_property)


@pytest.mark.parametrize("lora", [None, PER_EXPERT], ids=["every weight", "adapters"])
def test_in_float32_it_finds_what_it_finds_on_the_cpu(
    lora: LoraShape | None, record_property: Callable[[str, object], None]
) -> None:
    settings: dict[str, Any] = {"lora": lora, "b": 0.1, "dropout": 0.1 if lora else 0.0, **OPTIMIZER}
    ours, theirs = learner_of(random_beam(), **settings), torch_learner(random_beam(), ROWS, parity=False, **settings)
    pairs = [each.forward(ragged(), ["logprobs", "entropy"]) for each in (ours, theirs)]
    for name in ("logprobs", "entropy"):
        one, other = (np.concatenate(getattr(each, name)) for each in pairs)
        record_property(f"{name}, adapters {lora is not None}: largest difference", float(np.abs(one - other).max()))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    one, other = (update(each, batch()) for each in (ours, theirs))
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_layers_that_are_computed_again_give_the_same_bits() -> None:
    kept, again = (learner_of(random_beam(0, "bfloat16"), recompute=each, **OPTIMIZER) for each in (False, True))
    assert snapshot(after(again, 2)) == snapshot(after(kept, 2))


def test_an_expert_without_rows_is_not_changed() -> None:
    module = random_beam(0, "bfloat16")
    assert_only_experts_with_rows_change(learner_of(module, lr=1e-2, weight_decay=0.0), module, batch()[2])


def test_in_bfloat16_a_resumed_learner_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = after(learner_of(random_beam(0, "bfloat16"), **OPTIMIZER), 2)
    whole.save(ShardWriter(tmp_path, 0))
    resumed = after(learner_of(random_beam(1, "bfloat16"), **OPTIMIZER), 1)  # whatever it did before is forgotten
    resumed.load(ShardReader(tmp_path))
    for learner in (whole, resumed):
        update(learner, batch())
    assert snapshot(resumed) == snapshot(whole)
    one, other = named_tensors(whole._module), named_tensors(resumed._module)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sleep_gives_memory_back_and_the_same_bits_come_again() -> None:
    learner, sleepless = (after(learner_of(random_beam(0, "bfloat16"), **OPTIMIZER), 1) for _ in range(2))
    held = sum(tensor.nbytes for tensor in (*named_tensors(learner._module).values(), *learner._optimizer.memory()))
    before = torch.cuda.memory_allocated()
    learner.sleep()
    assert before - torch.cuda.memory_allocated() >= held
    learner.wake()
    assert torch.cuda.memory_allocated() <= before  # without what matrix products take for themselves
    for each in (learner, sleepless):
        update(each, batch())
    assert snapshot(learner) == snapshot(sleepless)
