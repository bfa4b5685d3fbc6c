"""The part of a difference that routing causes and R3 removes, and how sure it is."""

from pathlib import Path

import numpy as np
import pytest

from beamline.mismatch.routing import removed_by_replay, routing
from beamline.mismatch.setup import learner_setup
from tests.unit.mismatch.cases import MANY_EXPERTS, config_of, evaluator, frozen, weights_of

SEQUENCES = np.array([3, 1, 6, 4] * 25)
RNG = np.random.default_rng(0)
LEVEL, ROUTING = 1e-3 * RNG.random(SEQUENCES.sum()), 1e-2 * (RNG.random(SEQUENCES.sum()) < 0.2)


def test_replay_that_removes_all_of_it_has_a_share_of_1_and_no_doubt() -> None:
    assert removed_by_replay(LEVEL + ROUTING, LEVEL, LEVEL, SEQUENCES) == (1.0, 1.0, 1.0)


def test_replay_that_removes_half_of_it_has_a_share_of_one_half() -> None:
    removed, low, high = removed_by_replay(LEVEL + ROUTING, LEVEL + ROUTING / 2, LEVEL, SEQUENCES)
    assert removed == pytest.approx(0.5)
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(0.5)


def test_the_interval_covers_what_sequences_happen_to_be_there() -> None:
    """Replay helps in every second sequence alone; drawn again, there are more or less of these."""
    helped = np.repeat(np.arange(len(SEQUENCES)) % 2, SEQUENCES)
    removed, low, high = removed_by_replay(LEVEL + ROUTING, LEVEL + ROUTING * (1 - helped), LEVEL, SEQUENCES)
    assert removed is not None
    assert low is not None
    assert high is not None
    expected = (ROUTING * helped).sum() / ROUTING.sum()
    assert removed == pytest.approx(expected)
    assert low < removed - 0.05
    assert high > removed + 0.05


def test_a_share_of_nothing_is_not_given() -> None:
    assert removed_by_replay(LEVEL, LEVEL, LEVEL, SEQUENCES) == (None, None, None)


def test_what_may_be_chance_is_not_given() -> None:
    """One token of one sequence: drawn again it is often not there."""
    once = np.zeros_like(LEVEL)
    once[0] = 1.0
    assert removed_by_replay(LEVEL + once, LEVEL, LEVEL, SEQUENCES) == (None, None, None)


def test_figures_are_those_of_the_observed_difference(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rollout.dtype=bfloat16", **MANY_EXPERTS)
    weights = weights_of(config, **MANY_EXPERTS)
    batch = frozen(config, weights)
    evaluate = evaluator(config, batch, weights)
    found = routing(config, evaluate)
    assert found is not None
    assert found.free == np.abs(evaluate(learner_setup(config)) - batch.logprobs).mean()
    assert found.rows == sum(len(rollout.token_ids) - 1 for rollout in batch.rollouts)
    own, recorded = evaluate.routes("own"), evaluate.routes("recorded")
    counts, rows = np.zeros(2), 0
    for mine, theirs in zip(own, recorded, strict=True):
        for row in range(len(mine)):
            differs = [set(mine[row, layer]) != set(theirs[row, layer]) for layer in range(2)]
            counts += differs
            rows += any(differs)
    assert [layer.layer for layer in found.layers] == [1, 2]
    np.testing.assert_allclose([layer.share for layer in found.layers], counts / found.rows)
    assert found.any_layer == pytest.approx(rows / found.rows)
    assert found.any_layer > 0.1


def test_replay_removes_what_routing_causes(tmp_path: Path) -> None:
    """At least 90 % on a random model with many experts, of which rounding changes many."""
    config = config_of(tmp_path, "rollout.dtype=bfloat16", **MANY_EXPERTS)
    weights = weights_of(config, **MANY_EXPERTS)
    found = routing(config, evaluator(config, frozen(config, weights), weights))
    assert found is not None
    assert found.removed is not None
    assert found.removed >= 0.9
