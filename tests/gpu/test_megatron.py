"""The learner over Megatron-Core, as a single rank on a GPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from beamline.config import load_config
from beamline.config.policy import Recompute
from beamline.learner.learner import Learner
from beamline.model.layout import DType
from beamline.policy import model
from beamline.records import Experience
from beamline.starter import STARTER
from beamline.transfer.local import LocalChannel
from tests.cluster.learner import one_rank, rank_of, weights_of
from tests.contract.engines import torch_learner
from tests.contract.learning import GRADIENT, batch, of_lengths, snapshot, update, updated_gradient
from tests.gpu.beside_module import assert_as_near_to_float32
from tests.replay import recorded, replayed
from tests.tiny_beam import LARGER, random_beam

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

DEVICE, BACKEND = "cuda", "nccl"
ROWS = 512
UPDATES = 50
SIZES = LARGER | {"max_position_embeddings": 1024}


@contextmanager
def megatron(
    module: nn.Module, dtype: DType, recompute: Recompute = "none", **optimizer: Any
) -> Iterator[Learner[Any]]:
    """A learner with a module's weights."""
    from beamline.learner.megatron.learner import MegatronLearner
    from beamline.learner.megatron.mesh import Mesh
    from beamline.learner.megatron.ranks import Ranks

    with one_rank(BACKEND):
        config: Any = module.config
        rank = rank_of(Mesh(), config, weights_of(module), optimizer, ROWS, dtype, recompute, DEVICE)
        yield MegatronLearner(rank, Ranks(rank, deadline_seconds=60), Mesh(), LocalChannel())


def ragged() -> list[Experience]:
    """Sequences of 2 tokens up to more than a micro-batch, far longer than the window."""
    lengths = [2, 3, 700, *np.random.default_rng(0).integers(4, 400, 20).tolist()]
    return of_lengths(lengths)


@pytest.mark.parametrize("changes", [{"mlp_layer_types": ["dense"] * 3}, {}], ids=["dense", "experts"])
def test_log_probabilities_in_bfloat16_are_those_of_the_hugging_face_module(
    changes: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    module, sequences = random_beam(0, "bfloat16", **SIZES, **changes), ragged()
    with megatron(module, "bfloat16") as learner:
        logprobs = learner.forward(sequences, ["logprobs"]).logprobs
    assert_as_near_to_float32(logprobs, sequences, module, "dense" if changes else "experts", record_property)


def test_gradients_of_the_starter_are_those_of_the_torch_learner(
    record_property: Callable[[str, object], None],
) -> None:
    """In float32, each to 1e-4 of its largest value: what the order of sums makes of them."""
    expected, theirs = updated_gradient(
        torch_learner(model.load(STARTER, "float32"), ROWS, parity=False, **GRADIENT), batch()
    )
    with megatron(model.load(STARTER, "float32"), "float32", **GRADIENT) as learner:
        found, ours = updated_gradient(learner, batch())
    errors = {name: float(np.abs(found[name] - g).max() / max(np.abs(g).max(), 1e-12)) for name, g in expected.items()}
    record_property("largest relative error of a gradient", max(errors.values()))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-7)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    # Of a gradient that is all but 0, what is left of the update that it is read from is rounding.
    told = {name for name, g in expected.items() if np.abs(g).max() > 1e-6}
    assert len(told) > 0.9 * len(expected)
    assert max(errors[name] for name in told) < 1e-4


def test_batches_of_a_run_have_the_same_loss_and_gradient_norm(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """50 updates of the quickstart, one after the other, through both learners."""
    minis = recorded(tmp_path / "run", f"steps={UPDATES}", "evaluation.before_training=false", "policy.parity=false")
    optimizer = load_config(Path("recipes/quickstart.yaml"), []).learner.optimizer
    with megatron(model.load(STARTER, "float32"), "float32", **optimizer.model_dump()) as learner:
        found = replayed(learner, minis)
    expected, ours = np.array([mini.found for mini in minis]), np.array(found)
    assert len(ours) == UPDATES
    errors = np.abs(ours - expected) / np.maximum(np.abs(expected), [0.01, 1e-6])  # losses are sums around 0
    record_property("largest relative error of a loss (of 0.01 at least)", float(errors[:, 0].max()))
    record_property("largest relative error of a gradient norm", float(errors[:, 1].max()))
    assert errors.max() < 1e-3


def test_what_is_computed_again_has_the_same_gradient() -> None:
    """Whole layers by the same kernels, so to the bit; what lies between products by those for no gradient."""
    found: dict[Recompute, dict[str, bytes]] = {}
    norms: dict[Recompute, float | None] = {}
    choices: tuple[Recompute, ...] = ("none", "selective", "full")
    for recompute in choices:
        with megatron(random_beam(0, "bfloat16", **SIZES), "bfloat16", recompute, lr=1e-3) as learner:
            norms[recompute] = update(learner, ragged()).grad_norm
            found[recompute] = snapshot(learner)
    assert found["full"] == found["none"]
    assert norms["selective"] == pytest.approx(norms["none"], rel=1e-2)


def test_sleep_gives_memory_back_and_the_same_bits_come_again() -> None:
    found = []
    for naps in (0, 2):
        with megatron(random_beam(0, "bfloat16", **SIZES), "bfloat16", lr=1e-3) as learner:
            for number in range(3):
                update(learner, ragged()[number:])
                gc.collect()
                awake = torch.cuda.memory_allocated()
                for _ in range(naps):
                    learner.sleep()
                    kept, dropped = learner._rank.optimizer.memory()  # type: ignore[attr-defined]
                    held = sum(tensor.nbytes for tensor in (*kept, *dropped))
                    assert awake - torch.cuda.memory_allocated() >= held
                    learner.wake()
            found.append(snapshot(learner))
    assert found[0] == found[1]
