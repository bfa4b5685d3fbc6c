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
    except (BeamlineError, RuntimeError, OSError) as raised:
        found = [type(raised).__name__, str(raised)]
    found.append(ranks.call("work", None))
    ranks.stop()
    return found


def test_a_call_gives_what_each_rank_gives() -> None:
    assert on_ranks(2, called, None)[0] == [[0, 1], [0, 1]]


def test_what_a_rank_raises_is_raised_on_the_first_and_they_go_on() -> None:
    name, text, after = on_ranks(2, called, BeamlineError("a file is missing"))[0]
    assert (name, text, after) == ("BeamlineError", "a file is missing", [0, 1])
    full = OSError(28, "cannot write rank_00001.safetensors: No space left on device; free some")
    name, text, after = on_ranks(2, called, full)[0]
    assert (name, text, after) == ("OSError", str(full), [0, 1])
    name, text, after = on_ranks(2, called, ZeroDivisionError("by nothing"))[0]
    assert name == "RankFailedError"
    assert "rank 1 of the learner" in text
    assert "by nothing" in text
    assert after == [0, 1]


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
