"""Dropout in the learner: what adapters read in an update, and nowhere else."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from beamline.algorithms.guards import GuardError
from beamline.algorithms.loss import LossConfig
from beamline.model.lora import LoraShape
from beamline.policy.dropout import Dropout
from beamline.records import Experience
from tests.adapters import PER_EXPERT, loras
from tests.contract.engines import LearnerFactory
from tests.contract.explicit import SIZE, doubles, gradients_of, logits_of_masked, logprobs_of
from tests.contract.learning import (
    GRADIENT,
    LOSS,
    assert_gradients_equal,
    batch,
    loss_of,
    metrics,
    update,
    updated_gradient,
    written_loss,
)
from tests.tiny_beam import random_beam, reference

SHARE = 0.3
OLD = loss_of(on_policy=False)
TOKENS = sum(e.rollout.response_tokens for e in batch())


@loras
def test_dropout_leaves_out_inputs_of_adapters_alone(learner_factory: LearnerFactory, lora: LoraShape) -> None:
    learner = learner_factory(random_beam(), 40, lora=lora, b=SIZE, dropout=SHARE, **GRADIENT)
    plain, stored, following = reference(random_beam().double()), doubles(learner), iter(batch())

    def logits_of(ids: Tensor) -> Tensor:
        masks = Dropout(SHARE, LOSS.seed, 0, (next(following).rollout.key,), (len(ids),))
        return logits_of_masked(plain, stored, lora.scale, masks, ids)

    loss = written_loss(logits_of, batch(), TOKENS)
    loss.backward()
    gradient, stats = updated_gradient(learner, batch())
    assert_gradients_equal(gradient, gradients_of(stored), 1e-5)
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)


def dropped(
    learner_factory: LearnerFactory, sequences: Sequence[Experience], tokens: int, loss: LossConfig = LOSS
) -> dict[str, NDArray[np.float64]]:
    learner = learner_factory(random_beam(), tokens, lora=PER_EXPERT, b=SIZE, dropout=SHARE, **GRADIENT)
    return updated_gradient(learner, sequences, loss)[0]


def test_neither_cut_nor_order_change_what_is_dropped(learner_factory: LearnerFactory) -> None:
    expected = dropped(learner_factory, batch(), 4096)
    assert_gradients_equal(dropped(learner_factory, batch(), 1), expected, 2e-6)
    assert_gradients_equal(dropped(learner_factory, batch()[::-1], 40), expected, 2e-6)


def test_every_seed_and_every_update_drops_something_else(learner_factory: LearnerFactory) -> None:
    """At a rate of 0 the second update has the weights of the first."""

    def norms(*seeds: int) -> list[float | None]:
        learner = learner_factory(random_beam(), lora=PER_EXPERT, b=SIZE, dropout=SHARE, lr=0.0)
        return [update(learner, batch(), replace(LOSS, seed=seed)).grad_norm for seed in seeds]

    first, second = norms(0, 0)
    assert norms(0, 1)[0] == first
    assert len({first, second, *norms(1, 1)}) == 4


def test_nothing_is_dropped_outside_of_an_update(learner_factory: LearnerFactory) -> None:
    dropping, keeping = (learner_factory(random_beam(), lora=PER_EXPERT, b=SIZE, dropout=p) for p in (SHARE, 0.0))
    for which in ("policy", "reference"):
        for found, same in zip(logprobs_of(dropping, which), logprobs_of(keeping, which), strict=True):
            np.testing.assert_array_equal(found, same)
    compared = [update(learner, batch(), OLD).compared for learner in (dropping, keeping)]
    assert all(found is not None for found in compared)
    np.testing.assert_array_equal(*(found.old_logprobs for found in compared if found is not None))


def test_the_guard_of_the_first_ratio_sees_what_the_update_drops(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), 40, lora=PER_EXPERT, b=SIZE, dropout=SHARE)
    assert not update(learner, batch(), loss_of(first=True, guard={"ratio": True, "mismatch": None})).skipped


def test_the_log_probabilities_of_an_update_with_dropout_are_not_compared_with_the_sampler(
    learner_factory: LearnerFactory,
) -> None:
    stats = update(learner_factory(random_beam(), lora=PER_EXPERT, dropout=SHARE), batch())
    assert stats.compared is None
    assert not any(name.startswith("mismatch/") for name in metrics(stats))


def test_the_guard_of_the_mismatch_sees_the_policy_without_dropout(learner_factory: LearnerFactory) -> None:
    settings = {"lora": PER_EXPERT, "b": SIZE}
    plain, dropping = (learner_factory(random_beam(), dropout=p, **settings) for p in (0.0, SHARE))
    expected = update(plain, batch()).compared
    assert expected is not None
    difference = np.abs(expected.old_logprobs.astype(np.float64) - expected.sampler_logprobs).mean()
    for limit, passes in ((difference * 1.001, True), (difference * 0.999, False)):
        loss = loss_of(first=True, guard={"mismatch": limit})
        with nullcontext() if passes else pytest.raises(GuardError, match=f"{difference:.3g} nats"):
            update(dropping, batch(), loss)


def test_where_a_process_began_does_not_show_in_the_figures(learner_factory: LearnerFactory) -> None:
    """The guard's look at the policy without dropout is for the guard alone."""
    first, later = (
        metrics(update(learner_factory(random_beam(), lora=PER_EXPERT, b=SIZE, dropout=SHARE), batch(), loss))
        for loss in (loss_of(first=True, guard={"ratio": True, "mismatch": 1e6}), loss_of(first=False))
    )
    assert first == later
