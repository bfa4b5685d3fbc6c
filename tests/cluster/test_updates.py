"""The learner over Megatron-Core, on several meshes, against the torch learner and the Hugging Face module."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamline.checkpoint import ShardReader, ShardWriter
from beamline.config.policy import Recompute
from beamline.learner.learner import Learner, Outputs, StepStats
from beamline.learner.megatron.packed import Packed
from beamline.model.layout import DType
from beamline.records import Experience
from tests.cluster.learner import weights_of, with_learner
from tests.cluster.ranks import on_ranks
from tests.contract.engines import torch_learner
from tests.contract.learning import GRADIENT, batch, gradient, loss_of, update, weights
from tests.tiny_beam import beam_config, random_beam, reference, teacher_forced

MESHES: dict[str, dict[str, int]] = {
    "one rank": {},
    "tensor": {"tensor": 2},
    "tensor and expert": {"tensor": 2, "expert": 2},
    "data": {"data": 2},
    "data and expert": {"data": 2, "expert": 2},
    "tensor, data and expert": {"tensor": 2, "data": 2, "expert": 4},
    "pipeline": {"pipeline": 2},
    "all": {"tensor": 2, "expert": 2, "pipeline": 2},
}
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "eps": 0.1, "warmup_updates": 3}
"""With an epsilon so large that the sign of a gradient which is all but 0 makes no difference."""
ROWS = 40
TOLERANCE = 1e-5
"""Float32: what another order of additions makes of logits as large as these, whose cap bends them."""

Result = dict[str, Any]


def size_of(mesh: dict[str, int]) -> int:
    return mesh.get("tensor", 1) * mesh.get("data", 1) * mesh.get("pipeline", 1)


def run_on(
    mesh: str,
    job: Callable[..., Any],
    *arguments: Any,
    optimizer: dict[str, Any] = OPTIMIZER,
    seed: int = 0,
    dtype: DType = "float32",
    recompute: Recompute = "none",
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """What the job makes of a learner over the ranks of a mesh. ``changes`` are those of the model's shape."""
    sizes, other = MESHES[mesh], changes or {}
    weights = weights_of(random_beam(seed, **other))
    shared = (job, sizes, beam_config(**other), weights, optimizer, ROWS, dtype, recompute, arguments)
    return on_ranks(size_of(sizes), with_learner, *shared)[0]


def scenario(learner: Learner[Any], sequences: list[Experience]) -> Result:
    """Evaluate, update three times, sleep in between, evaluate again."""
    found: Result = {"before": learner.forward(sequences, ["logprobs", "entropy"]), "stats": []}
    for number in range(3):
        found["stats"].append(update(learner, sequences, loss_of(first=number == 0, guard={"mismatch": None})))
        nap(learner)
    off_policy = loss_of(on_policy=False, guard={"mismatch": None}, correction={"weight": {"name": "tis"}})
    found["stats"].append(update(learner, sequences[1:], off_policy))
    found["after"] = learner.forward(sequences[:1], ["logprobs"])
    return found


def nap(learner: Any) -> None:
    """Sleep, which the Megatron learner does without the memory of anything large, and wake."""
    learner.sleep()
    if hasattr(learner, "_rank"):
        kept, dropped = learner._rank.optimizer.memory()
        assert {tensor.untyped_storage().size() for tensor in (*kept, *dropped)} == {0}
    learner.wake()


@cache
def by_torch() -> Result:
    return scenario(torch_learner(random_beam(), ROWS, parity=False, **OPTIMIZER), batch())


@cache
def by_megatron(mesh: str) -> Result:
    found: Result = run_on(mesh, scenario, batch())
    return found


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def assert_same_tokens(ours: Outputs, theirs: Outputs) -> None:
    for name in ("logprobs", "entropy"):
        if getattr(theirs, name) is not None:
            for one, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
                np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_log_probabilities_are_those_of_the_hugging_face_module(mesh: str) -> None:
    plain = reference(random_beam())
    found = by_megatron(mesh)["before"].logprobs
    for sequence, logprobs in zip(batch(), found, strict=True):
        expected = teacher_forced(plain, sequence.rollout.token_ids, sequence.rollout.temperature)
        np.testing.assert_allclose(logprobs, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_evaluation_is_that_of_the_torch_learner_before_and_after_updates(mesh: str) -> None:
    for when in ("before", "after"):
        assert_same_tokens(by_megatron(mesh)[when], by_torch()[when])


def test_updates_are_those_of_the_torch_learner(mesh: str) -> None:
    ours: list[StepStats]
    theirs: list[StepStats]
    ours, theirs = by_megatron(mesh)["stats"], by_torch()["stats"]
    for one, other in zip(ours, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert (one.lr, one.tokens, one.counted_tokens, one.kept_tokens) == (
            other.lr,
            other.tokens,
            other.counted_tokens,
            other.kept_tokens,
        )
        assert one.learned is not None
        assert other.learned is not None
        np.testing.assert_allclose(
            np.sort(one.learned.logprobs), np.sort(other.learned.logprobs), rtol=TOLERANCE, atol=TOLERANCE
        )


SHAPES: dict[str, dict[str, Any]] = {
    "no layer with a window": {"layer_types": ["full_attention"] * 3},
    "no layer without a window": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 1},
    "no experts": {"mlp_layer_types": ["dense"] * 3},
    "experts in all layers": {"mlp_layer_types": ["sparse"] * 3, "norm_topk_prob": False},
    "all experts for each row": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 16},
    "a layer of two experts": {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["sparse"],
        "num_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
    },
    "odd sizes": {"vocab_size": 66, "hidden_size": 36, "intermediate_size": 50, "moe_intermediate_size": 20},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_other_shapes_learn_what_they_learn_with_the_torch_learner(shape: str) -> None:
    ours = run_on("tensor and expert", scenario, batch(), changes=SHAPES[shape])
    theirs = scenario(torch_learner(random_beam(**SHAPES[shape]), ROWS, parity=False, **OPTIMIZER), batch())
    for when in ("before", "after"):
        assert_same_tokens(ours[when], theirs[when])
    for one, other in zip(ours["stats"], theirs["stats"], strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def gradient_of(learner: Learner[Any], folder: Path) -> dict[str, NDArray[np.float64]]:
    """The gradient of a first update, under checkpoint names, out of what is saved before and after it."""
    learner.save(ShardWriter(folder / "before", 0))
    update(learner, batch())
    learner.save(ShardWriter(folder / "after", 0))
    return gradient(saved(folder / "before"), saved(folder / "after"))


def saved(folder: Path) -> dict[str, NDArray[np.float64]]:
    """Whole tensors out of what any ranks have saved."""
    reader, found = ShardReader(folder), {}
    for part in reader.slices("policy"):
        if part.name not in found:
            whole = replace(part, start=(0,) * len(part.shape), stop=part.shape)
            found[part.name] = reader.read("policy", whole).view(np.float32).astype(np.float64)
    return found


@pytest.mark.parametrize("mesh", ["one rank", "data and expert", "tensor, data and expert", "all"])
def test_each_gradient_is_that_of_the_torch_learner(mesh: str, tmp_path: Path) -> None:
    """To 1e-4 of its largest entry, tensor by tensor: an error that only a small tensor has is seen."""
    ours = run_on(mesh, gradient_of, tmp_path, optimizer=GRADIENT)
    theirs = torch_learner(random_beam(), ROWS, parity=False, **GRADIENT)
    before = weights(theirs)
    update(theirs, batch())
    expected = gradient(before, weights(theirs))
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            ours[name], values, rtol=0, atol=1e-4 * max(np.abs(values).max(), 1e-3), err_msg=name
        )


def gradient_and_calls(learner: Any, folder: Path) -> tuple[dict[str, NDArray[np.float64]], int]:
    """The gradient, and how often the first layer was computed for it."""
    calls: list[int] = []
    learner._rank.stage.model.layers["0"].register_forward_pre_hook(lambda *_: calls.append(1))
    return gradient_of(learner, folder), len(calls)


def test_layers_that_are_computed_again_give_the_same_gradient(tmp_path: Path) -> None:
    kept, once = run_on("one rank", gradient_and_calls, tmp_path / "kept", optimizer=GRADIENT)
    again, calls = run_on("one rank", gradient_and_calls, tmp_path / "again", optimizer=GRADIENT, recompute="full")
    assert calls == 2 * once > 0
    assert all((kept[name] == again[name]).all() for name in kept)


@pytest.mark.parametrize("mesh", ["one rank", "tensor, data and expert", "all"])
def test_what_lies_between_products_may_be_computed_again(mesh: str, tmp_path: Path) -> None:
    kept = run_on(mesh, gradient_of, tmp_path / "kept", optimizer=GRADIENT)
    again = run_on(mesh, gradient_of, tmp_path / "again", optimizer=GRADIENT, recompute="selective")
    for name, values in kept.items():  # in float32, where one sum of three terms is made in another order
        np.testing.assert_allclose(
            again[name], values, rtol=0, atol=2e-6 * max(np.abs(values).max(), 1e-2), err_msg=name
        )


def kept_bytes(learner: Any) -> int:
    """Bytes that a forward pass of the first layer keeps for the backward pass, weights not counted."""
    stage = learner._rank.stage
    weights = {flat.weights.untyped_storage().data_ptr() for flat in stage.flats}
    packed, kept = Packed.of((0, 12, ROWS), stage.beam, torch.device("cpu")), dict[int, torch.UntypedStorage]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    x = torch.randn(ROWS, 1, stage.beam.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = stage.model.layers["1"](x, packed)  # which has experts
    del out
    return sum(each.size() for each in kept.values() if each.data_ptr() not in weights)


def test_a_layer_keeps_little_more_than_what_products_gave() -> None:
    kept, selective = (run_on("one rank", kept_bytes, recompute=each) for each in ("none", "selective"))
    assert selective < 0.7 * kept


def save_after(learner: Learner[Any], folder: Path, updates: int) -> None:
    for number in range(updates):
        update(learner, batch()[number:])
    learner.save(ShardWriter(folder, 0))


def resume(learner: Learner[Any], folder: Path, to: Path) -> float:
    learner.load(ShardReader(folder))
    stats = update(learner, batch())
    learner.save(ShardWriter(to, 0))
    return stats.lr


def test_what_one_mesh_saved_another_resumes(tmp_path: Path) -> None:
    """Forth and back, and by the torch learner: the weights after one more update are the same."""
    run_on("all", save_after, tmp_path / "all", 2)
    rates = {
        "data and expert": run_on("data and expert", resume, tmp_path / "all", tmp_path / "data", seed=1),
        "all": run_on("all", resume, tmp_path / "all", tmp_path / "again", seed=1),
    }
    learner = torch_learner(random_beam(1), ROWS, parity=False, **OPTIMIZER)
    rates["torch"] = resume(learner, tmp_path / "all", tmp_path / "torch")
    assert set(rates.values()) == {1e-2}
    whole = saved(tmp_path / "again")
    for other in ("data", "torch"):
        found = saved(tmp_path / other)
        assert found.keys() == whole.keys()
        for name, values in whole.items():
            np.testing.assert_allclose(found[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def test_what_is_saved_and_loaded_is_the_same_bits(tmp_path: Path) -> None:
    run_on("all", save_after, tmp_path / "all", 1)
    run_on("data and expert", load_and_save, tmp_path / "all", tmp_path / "data", seed=1)
    run_on("all", load_and_save, tmp_path / "data", tmp_path / "again", seed=1)
    assert_same_bits(*(tmp_path / each for each in ("all", "data", "again")))


def test_what_is_saved_in_bfloat16_is_the_same_bits_in_the_torch_learner_and_back(tmp_path: Path) -> None:
    """Both save float32 weights, of which they compute with the rounded ones."""
    run_on("tensor", save_after, tmp_path / "tensor", 1, dtype="bfloat16")
    learner = torch_learner(random_beam(1, "bfloat16"), ROWS, parity=False, **OPTIMIZER)
    load_and_save(learner, tmp_path / "tensor", tmp_path / "torch")
    run_on("tensor", load_and_save, tmp_path / "torch", tmp_path / "again", seed=1, dtype="bfloat16")
    assert_same_bits(*(tmp_path / each for each in ("tensor", "torch", "again")))


def assert_same_bits(*folders: Path) -> None:
    """Weights and moments of checkpoints, whatever meshes saved them."""
    for one, other in pairwise(folders):
        first, second = saved(one), saved(other)
        assert all((first[name] == second[name]).all() for name in first)
        moments = [ShardReader(each) for each in (one, other)]
        for part in {part.name: part for part in moments[0].slices("optimizer")}.values():
            whole = replace(part, start=(0,) * len(part.shape), stop=part.shape)
            assert (moments[0].read("optimizer", whole) == moments[1].read("optimizer", whole)).all()


def load_and_save(learner: Learner[Any], folder: Path, to: Path) -> None:
    learner.load(ShardReader(folder))
    learner.save(ShardWriter(to, 0))


def spoiled(learner: Learner[Any], folder: Path) -> list[str]:
    """A loss that is not finite, a gradient that is not, and what becomes of weights and moments."""
    learner.save(ShardWriter(folder / "before", 0))
    errors = []
    for advantage in (float("inf"), 3e38):  # the second has a finite loss, and squares of its gradient have no end
        sequences = batch()
        sequences[0] = replace(sequences[0], advantage=advantage)
        with pytest.raises(FloatingPointError) as caught:
            update(learner, sequences)
        errors.append(str(caught.value))
    learner.save(ShardWriter(folder / "after", 0))
    return errors


def test_an_update_that_is_not_finite_is_not_made(tmp_path: Path) -> None:
    first, second = run_on("data and expert", spoiled, tmp_path)
    assert first.startswith("the loss is")
    assert second.startswith("the gradient norm is")
    for file in (tmp_path / "before").rglob("*.safetensors"):
        assert (tmp_path / "after" / file.relative_to(tmp_path / "before")).read_bytes() == file.read_bytes()


def lost(learner: Any) -> str:
    """What an update says when the first rank's router holds what is no number."""
    learner._rank.stage.model.layers["1"].mlp.gate.weight.data[3, 0] = float("nan")
    with pytest.raises(FloatingPointError) as caught:
        update(learner, batch())
    return str(caught.value)


@pytest.mark.parametrize("mesh", ["one rank", "data and expert"])
def test_weights_of_one_rank_that_are_not_finite_are_an_update_that_is_not(mesh: str) -> None:
    """Rows still go to experts that there are, and come back: no rank waits for another."""
    assert run_on(mesh, lost) == "the loss is nan; the update was not made"


def nothing(learner: Learner[Any]) -> tuple[StepStats, StepStats]:
    """Fewer sequences than data ranks, and none."""
    silent = [replace(each, trained=False) for each in batch()]
    return update(learner, batch()[:1]), update(learner, silent)


def test_a_rank_without_sequences_waits_for_the_others(tmp_path: Path) -> None:
    one, none = run_on("data and expert", nothing)
    expected = update(torch_learner(random_beam(), ROWS, parity=False, **OPTIMIZER), batch()[:1])
    assert one.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert one.loss == pytest.approx(expected.loss, rel=1e-5)
    assert none.skipped
