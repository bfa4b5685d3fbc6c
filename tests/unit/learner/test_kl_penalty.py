from collections.abc import Sequence
from math import exp
from typing import Any, cast

import numpy as np
import pytest

from beamline.config.kl import Estimator, KlReward
from beamline.learner.learner import Learner, Outputs
from beamline.learner.penalty import with_kl_penalty
from beamline.records import Experience, Group
from tests.samples import make_grade, make_group

RIGHT, WRONG, TIMEOUT = make_grade(1.0, correct=True), make_grade(-1.0), make_grade(0.0, status="timeout")


class Reference:
    """A learner whose reference finds every token of the prompt at -9, and those of a response at -1.5."""

    def __init__(self) -> None:
        self.asked: list[Experience] = []

    def forward(self, batch: Sequence[Experience], outputs: Any, weights: str) -> Outputs:
        assert (outputs, weights) == (["logprobs"], "reference")
        self.asked += batch
        return Outputs(logprobs=[np.where(e.rollout.policy_mask[1:], -1.5, -9.0).astype(np.float32) for e in batch])


def penalized(groups: list[Group], estimator: Estimator = "k1", coefficient: float = 0.1) -> list[Group]:
    config = KlReward(coefficient=coefficient, estimator=estimator)
    return with_kl_penalty(groups, cast(Learner[Any], Reference()), config)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_is_minus_the_sum_of_the_estimates_over_the_response(estimator: Estimator) -> None:
    log_ratios = [mu - -1.5 for mu in (-1.0, -2.0, -3.0, -4.0)]  # what the sampler wrote down
    k = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: exp(-d) - 1 + d}[estimator]
    expected = -0.1 * sum(map(k, log_ratios))
    (group,) = penalized([make_group(RIGHT, WRONG)], estimator)
    grades = [rollout.grade for rollout in group.rollouts]
    assert [grade.parts["kl"] for grade in grades if grade] == pytest.approx([expected] * 2)
    assert [grade.reward for grade in grades if grade] == pytest.approx([1.0 + expected, -1.0 + expected])


def test_other_parts_and_the_verdict_stay() -> None:
    (group,) = penalized([make_group(RIGHT)])
    grade = group.rollouts[0].grade
    assert grade is not None
    assert (grade.correct, grade.parts["answer"], set(grade.parts)) == (True, 1.0, {"answer", "overlong", "kl"})
    assert grade.reward == pytest.approx(sum(grade.parts.values()))


def test_what_was_not_graded_is_not_evaluated_and_stays_as_it_is() -> None:
    reference, group = Reference(), make_group(TIMEOUT, RIGHT, None)
    (made,) = with_kl_penalty([group], cast(Learner[Any], reference), KlReward())
    assert [e.rollout for e in reference.asked] == [group.rollouts[1]]
    assert (made.rollouts[0], made.rollouts[2]) == (group.rollouts[0], group.rollouts[2])


def test_no_groups_are_no_trouble() -> None:
    assert penalized([]) == []
