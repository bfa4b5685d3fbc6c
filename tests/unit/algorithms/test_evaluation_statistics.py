"""The figures of an evaluation against their definitions in docs/metrics.md."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms import evaluation
from beamline.algorithms.evaluation import ProblemResult, interval95, problem_result, set_result
from beamline.records import Finish, Grade, Group
from tests.samples import make_grade, make_group, make_problem, make_rollout

RIGHT, WRONG = make_grade(1.0, correct=True), make_grade(-1.0, well_formed=False)
TIMEOUT, ERROR = make_grade(5.0, correct=True, status="timeout"), make_grade(5.0, correct=True, status="error")


def group_of(*samples: tuple[int, Finish, Grade | None]) -> Group:
    """A group of responses: tokens, finish, grade."""
    rollouts = [make_rollout(response=tokens, finish=finish, grade=grade) for tokens, finish, grade in samples]
    return Group(make_problem(), tuple(rollouts))


def test_an_evaluation_weighs_problems_equally() -> None:
    groups = [make_group(RIGHT, RIGHT), make_group(WRONG, TIMEOUT), make_group(RIGHT, WRONG)]
    metrics = set_result(groups, k=2).metrics
    assert metrics["avg@2"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["pass@2"] == pytest.approx(2 / 3)
    assert metrics["ungraded"] == 1
    assert (metrics["avg@2_low"], metrics["avg@2_high"]) == interval95(np.array([1.0, 0.0, 0.5]))


def test_a_problem_without_any_grade_is_left_out_and_counted() -> None:
    with_it = set_result([make_group(RIGHT, WRONG), make_group(WRONG, WRONG), make_group(ERROR, None)], k=2).metrics
    without = set_result([make_group(RIGHT, WRONG), make_group(WRONG, WRONG)], k=2).metrics
    assert with_it == without | {"ungraded": 2}


def test_lengths_and_cuts_of_an_evaluation_count_every_response() -> None:
    metrics = set_result([group_of((4, "stop", RIGHT), (8, "length", None))], k=2).metrics
    assert (metrics["response_tokens_mean"], metrics["truncated_share"]) == (6.0, 0.5)


def test_one_problem_has_no_interval() -> None:
    assert set(set_result([make_group(RIGHT, WRONG)], k=2).metrics) == {
        "avg@2",
        "pass@2",
        "maj@2",
        "response_tokens_mean",
        "truncated_share",
        "ungraded",
    }


def test_an_evaluation_without_any_grade_has_no_accuracy() -> None:
    metrics = set_result([make_group(TIMEOUT, None), make_group(ERROR)], k=8).metrics
    assert metrics == {"response_tokens_mean": 4.0, "truncated_share": 0.0, "ungraded": 3}


@given(st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.75, 1.0]), min_size=2, max_size=40))
def test_the_interval_holds_the_mean_and_stays_within_what_was_measured(means: list[float]) -> None:
    low, high = interval95(np.array(means))
    assert min(means) <= low <= np.mean(means) + 1e-12
    assert np.mean(means) - 1e-12 <= high <= max(means)


def test_of_many_problems_the_interval_is_that_of_the_normal_distribution() -> None:
    means = np.arange(1000) % 9 / 8
    half = 1.959963984540054 * means.std(ddof=1) / sqrt(1000)
    # The quantiles of 10,000 draws are off by about 2 % of a half width, by 6 % hardly ever.
    assert interval95(means) == pytest.approx((means.mean() - half, means.mean() + half), abs=0.06 * half)


def test_of_two_problems_the_interval_is_known() -> None:
    assert interval95(np.array([0.0, 1.0])) == (0.0, 1.0)  # a quarter of all draws is twice the same problem


def test_draws_in_many_parts_are_the_draws_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    means = np.arange(37) / 36
    whole = interval95(means)
    monkeypatch.setattr(evaluation, "_DRAWN_AT_ONCE", 1000)
    assert interval95(means) == whole


def voters(*votes: tuple[str | None, bool]) -> Group:
    """A group with a grade for each answer and its correctness."""
    return make_group(*(replace(make_grade(0.0, correct=right), parsed=parsed) for parsed, right in votes))


@pytest.mark.parametrize(
    ("votes", "answer", "majority"),
    [
        ([("1", False), ("2", True), ("2", True)], "2", 1.0),
        ([("1", False), ("1", False), ("2", True)], "1", 0.0),
        ([("1", False), ("2", True)], "1", 0.5),
        ([("1", False), ("2", True), ("3", False)], "1", 1 / 3),
        ([("1", False), ("1", False), ("1/2", True), ("0.5", True), ("\\frac12", True)], "1/2", 1.0),
        ([(None, False), (None, False), ("2", True)], "2", 1.0),
        ([(None, False)], None, 0.0),
    ],
)
def test_the_majority_is_what_is_answered_most_often(
    votes: list[tuple[str | None, bool]], answer: str | None, majority: float
) -> None:
    result = problem_result(voters(*votes))
    assert (result.majority_answer, result.majority) == (answer, pytest.approx(majority))


def test_a_response_that_was_not_graded_has_no_vote() -> None:
    group = make_group(*(replace(TIMEOUT, parsed="7") for _ in range(3)), replace(WRONG, parsed="8"))
    assert problem_result(group).majority_answer == "8"


def test_maj_is_the_mean_majority_of_the_problems() -> None:
    groups = [voters(("1", True), ("2", False)), voters(("1", True), ("1", True)), voters(("2", False), ("2", False))]
    assert set_result(groups, k=2).metrics["maj@2"] == pytest.approx((0.5 + 1 + 0) / 3)


def test_a_problem_is_counted_as_it_came_out() -> None:
    group = group_of((4, "stop", replace(RIGHT, parsed="3")), (8, "length", WRONG), (6, "stop", TIMEOUT))
    assert problem_result(group) == ProblemResult(
        group.problem.id, "1+2", "3", graded=2, ungraded=1, right=1, truncated=1, tokens_mean=6.0, majority_answer="3",
        majority=1.0,
    )  # fmt: skip


def test_correctness_of_an_ungraded_response_is_not_looked_at() -> None:
    assert set_result([make_group(replace(RIGHT, status="timeout"), WRONG)], k=2).metrics["pass@2"] == 0.0
