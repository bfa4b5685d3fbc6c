"""What every learner keeps and hands over: resume to the byte, and weights for the sampler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beamline.checkpoint import CheckpointError, ShardReader, ShardWriter
from beamline.records import Completion, Experience, Request
from beamline.rollout.collect import to_rollout
from tests.contract.engines import LearnerFactory, PairFactory
from tests.contract.learning import batch, metrics, snapshot, update
from tests.contract.sampling import assert_same_bits, requests, run
from tests.tiny_beam import random_beam

OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "warmup_updates": 6}


@pytest.mark.parametrize("saved_after", [0, 2])
def test_a_resumed_learner_ends_with_the_same_bytes(
    learner_factory: LearnerFactory, tmp_path: Path, saved_after: int
) -> None:
    whole = learner_factory(random_beam(0), **OPTIMIZER)
    for step in range(4):
        if step == saved_after:
            whole.save(ShardWriter(tmp_path, 0))
        update(whole, batch()[step:])
    resumed = learner_factory(random_beam(1), **OPTIMIZER)
    update(resumed, batch())  # whatever it did before is forgotten
    resumed.load(ShardReader(tmp_path))
    for step in range(saved_after, 4):
        update(resumed, batch()[step:])
    assert snapshot(resumed) == snapshot(whole)


def test_loading_gives_what_was_saved(learner_factory: LearnerFactory, tmp_path: Path) -> None:
    learner = learner_factory(random_beam(0), **OPTIMIZER)
    update(learner, batch())
    learner.save(ShardWriter(tmp_path, 0))
    other = learner_factory(random_beam(1), **OPTIMIZER)
    other.load(ShardReader(tmp_path))
    assert snapshot(other) == snapshot(learner)


def test_a_checkpoint_of_another_shape_is_refused(learner_factory: LearnerFactory, tmp_path: Path) -> None:
    learner_factory(random_beam(vocab_size=65)).save(ShardWriter(tmp_path, 0))
    with pytest.raises(CheckpointError, match=r"embed_tokens.*\[64, 32\].*\[65, 32\]"):
        learner_factory(random_beam()).load(ShardReader(tmp_path))


def test_a_checkpoint_without_a_tensor_is_refused(learner_factory: LearnerFactory, tmp_path: Path) -> None:
    shallow = random_beam(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse"]
    )
    learner_factory(shallow).save(ShardWriter(tmp_path, 0))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\."):
        learner_factory(random_beam()).load(ShardReader(tmp_path))


def test_sleep_changes_nothing(learner_factory: LearnerFactory) -> None:
    learner, sleepless = (learner_factory(random_beam(), **OPTIMIZER) for _ in range(2))
    for each in (learner, sleepless):
        update(each, batch())
    learner.sleep()
    learner.wake()
    for each in (learner, sleepless):
        update(each, batch())
    assert snapshot(learner) == snapshot(sleepless)


# With a sampler


def trained_on(asked: Request, completion: Completion) -> Experience:
    return Experience(to_rollout(asked, completion), advantage=1.0 if len(asked.prefix_ids) % 2 else -1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_the_sampler_draws_from_the_policy_of_the_learner(pair_factory: PairFactory, temperature: float) -> None:
    pair = pair_factory(random_beam(), lr=1e-3)
    for version in range(3):
        pair.sync(version)
        asked = requests(temperature=temperature)
        completions = run(pair.sampler, asked)
        sequences = [trained_on(*both) for both in zip(asked, completions, strict=True)]
        logprobs = pair.learner.forward(sequences, ["logprobs"]).logprobs
        assert logprobs is not None
        for sequence, completion, values in zip(sequences, completions, logprobs, strict=True):
            ours = values[sequence.rollout.policy_mask[1:]]
            np.testing.assert_allclose(completion.logprobs, ours, rtol=1e-5, atol=1e-5)
            assert set(completion.versions.tolist()) == {version}
        found = metrics(update(pair.learner, sequences))
        assert found["mismatch/logprob_abs_diff_max"] < 2e-5
        assert found["mismatch/ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_the_sampler_keeps_its_weights_until_the_next_transfer(pair_factory: PairFactory) -> None:
    pair = pair_factory(random_beam(), lr=1e-2)
    pair.sync(1)
    before = run(pair.sampler, requests())
    update(pair.learner, batch())
    assert_same_bits(before, run(pair.sampler, requests()))
    pair.sync(2)
    after = run(pair.sampler, requests())
    assert any(one.token_ids.tolist() != other.token_ids.tolist() for one, other in zip(before, after, strict=True))
