"""A penalty in the reward for leaving the model that training began with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from beamline.algorithms.kl import estimate
from beamline.config.kl import KlReward
from beamline.learner.learner import Learner
from beamline.records import Experience, Group, Rollout


def with_kl_penalty(groups: Sequence[Group], learner: Learner[Any], config: KlReward) -> list[Group]:
    """The groups with a part ``kl`` in the reward of each graded rollout, ``-coefficient * sum_t k_t``.

    ``k_t`` estimates KL(mu || pi_ref) at the response token t, from the sampler's log-probability and the reference's.
    """
    graded = [rollout for group in groups for rollout in group.rollouts if rollout.verdict is not None]
    reference = learner.forward([Experience(rollout, 0.0) for rollout in graded], ["logprobs"], "reference").logprobs
    assert reference is not None
    penalties = {
        rollout.key: 0.0 - config.coefficient * _divergence(rollout, logprobs, config)
        for rollout, logprobs in zip(graded, reference, strict=True)
    }
    return [
        replace(group, rollouts=tuple(_penalized(r, penalties.get(r.key)) for r in group.rollouts)) for group in groups
    ]


def _divergence(rollout: Rollout, reference_logprobs: Any, config: KlReward) -> float:
    log_ratio = rollout.response_logprobs.astype("float64") - reference_logprobs[rollout.policy_mask[1:]]
    return float(estimate(torch.from_numpy(log_ratio), config.estimator).sum())


def _penalized(rollout: Rollout, penalty: float | None) -> Rollout:
    if penalty is None or rollout.grade is None:
        return rollout
    parts = rollout.grade.parts | {"kl": penalty}
    return replace(rollout, grade=replace(rollout.grade, reward=rollout.grade.reward + penalty, parts=parts))
