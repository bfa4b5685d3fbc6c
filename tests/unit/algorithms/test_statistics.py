"""The figures of a step against their definitions in docs/metrics.md."""

from dataclasses import replace
from math import sqrt

import pytest

from beamline.algorithms.statistics import sampling_statistics
from beamline.records import Finish, Grade, Group
from tests.samples import make_grade, make_group, make_problem, make_rollout

RIGHT, WRONG = make_grade(1.0, correct=True), make_grade(-1.0, well_formed=False)
TIMEOUT, ERROR = make_grade(5.0, correct=True, status="timeout"), make_grade(5.0, correct=True, status="error")


def group_of(*samples: tuple[int, Finish, Grade | None]) -> Group:
    """A group of responses: tokens, finish, grade."""
    rollouts = [make_rollout(response=tokens, finish=finish, grade=grade) for tokens, finish, grade in samples]
    return Group(make_problem(), tuple(rollouts))


def test_a_step_with_every_kind_of_response() -> None:
    late = make_grade(0.5, correct=True, overlong=-0.5)
    groups = [
        group_of((4, "stop", RIGHT), (8, "length", WRONG), (6, "stop", late)),
        group_of((2, "stop", TIMEOUT), (2, "abort", None), (8, "length", WRONG)),
    ]
    rewards = [1.0, -1.0, 0.5, -1.0]
    mean = sum(rewards) / 4
    assert sampling_statistics(groups) == pytest.approx(
        {
            "train/graded": 4,
            "train/ungraded": 2,
            "train/grading_timeouts": 1,
            "train/grading_errors": 0,
            "train/reward_mean": mean,
            "train/reward_std": sqrt(sum((r - mean) ** 2 for r in rewards) / 3),
            "train/accuracy": 2 / 4,
            "train/well_formed_share": 2 / 4,
            "train/overlong_penalty_mean": -0.5 / 4,
            "train/response_tokens_mean": 30 / 6,
            "train/response_tokens_max": 8,
            "train/truncated_share": 2 / 6,
            "train/tokens": 30,
        },
        abs=1e-12,
    )


def test_means_of_grades_are_absent_when_nothing_was_graded() -> None:
    assert set(sampling_statistics([make_group(TIMEOUT, None)])) == {
        "train/graded",
        "train/ungraded",
        "train/grading_timeouts",
        "train/grading_errors",
        "train/response_tokens_mean",
        "train/response_tokens_max",
        "train/truncated_share",
        "train/tokens",
    }


def test_the_spread_of_rewards_is_absent_for_a_single_grade() -> None:
    metrics = sampling_statistics([make_group(RIGHT, ERROR)])
    assert metrics["train/reward_mean"] == 1.0
    assert "train/reward_std" not in metrics


def test_a_kl_penalty_is_reported_where_rewards_have_one() -> None:
    penalized = [make_grade(0.75, correct=True), make_grade(-1.5)]
    penalized = [replace(g, parts=g.parts | {"kl": kl}) for g, kl in zip(penalized, (-0.25, -0.5), strict=True)]
    left_out = make_group(RIGHT, WRONG)  # and so not penalized
    assert sampling_statistics([make_group(*penalized), left_out])["train/kl_penalty_mean"] == pytest.approx(-0.375)
    assert "train/kl_penalty_mean" not in sampling_statistics([make_group(RIGHT, WRONG)])
