"""Ranks that fail, experts without rows, and checkpoints of another model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from beamline.checkpoint import CheckpointError, ShardReader, ShardWriter
from beamline.errors import BeamlineError
from beamline.learner.learner import Learner
from tests.cluster.ranks import on_ranks
from tests.cluster.test_updates import run_on


class Target:
    """Fails on the second rank alone."""

    def work(self, error: Exception | None) -> int:
        rank = torch.distributed.get_rank()
        if rank == 1 and error is not None:
            raise error
        return rank


def called(error: Exception | None) -> list[Any]:
    """What a call gives on two ranks, and another one after it."""
    from beamline.learner.megatron.ranks import Ranks

    ranks = Ranks(Target(), deadline_seconds=60)
    if torch.distributed.get_rank():
        ranks.serve()
        return []
    try:
        found: list[Any] = [ranks.call("work", error)]
    except (BeamlineError, RuntimeError) as raised:
        found = [type(raised).__name__, str(raised)]
    found.append(ranks.call("work", None))
    ranks.stop()
    return found


def test_a_call_gives_what_each_rank_gives() -> None:
    assert on_ranks(2, called, None)[0] == [[0, 1], [0, 1]]


def test_what_a_rank_raises_is_raised_on_the_first_and_they_go_on() -> None:
    name, text, after = on_ranks(2, called, BeamlineError("a file is missing"))[0]
    assert (name, text, after) == ("BeamlineError", "a file is missing", [0, 1])
    name, text, after = on_ranks(2, called, ZeroDivisionError("by nothing"))[0]
    assert name == "RankFailedError"
    assert "rank 1 of the learner" in text
    assert "by nothing" in text
    assert after == [0, 1]


def gradients() -> tuple[Any, ...]:
    """Of two experts and the rows, where the second has none; of no rows at all; and what torch finds for the first."""
    from beamline.learner.megatron.experts import _linear

    weight = torch.randn(2, 8, 4, requires_grad=True)
    found = []
    for counts in ([3, 0], [0, 0]):
        rows = torch.randn(sum(counts), 4, requires_grad=True)
        out = _linear(rows, weight, torch.tensor(counts), torch.tensor(counts).cumsum(0, dtype=torch.int32))
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        assert weight.grad is not None
        expected = torch.arange(out.numel(), dtype=torch.float32).view_as(out).T @ rows.detach()
        found += [weight.grad.clone(), expected, rows.grad]
        weight.grad = None
    return tuple(found)


def test_an_expert_without_rows_has_the_gradient_0() -> None:
    some, expected, rows, none, _, no_rows = on_ranks(1, gradients)[0]
    torch.testing.assert_close(some[0], expected)
    assert not some[1].any()
    assert rows.any()
    assert not none.any()
    assert no_rows.shape == (0, 4)


def with_more(learner: Learner[Any], folder: Path) -> str:
    """Load what another model has saved, which has a layer more."""
    from beamline.policy.weights import module_layout, named_tensors, raw
    from tests.tiny_beam import random_beam

    types = {"layer_types": ["sliding_attention"] * 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
    other = random_beam(num_hidden_layers=4, **types)
    writer = ShardWriter(folder, 0)
    writer.write("policy", module_layout(other).ranks[0], (raw(x).numpy() for x in named_tensors(other).values()))
    writer.write_state("learner", {"updates": 0})
    with pytest.raises(CheckpointError) as caught:
        learner.load(ShardReader(folder))
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    assert "have no place" in run_on("data", with_more, tmp_path)
