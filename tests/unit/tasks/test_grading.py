import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.chat import Channels
from beamline.config.schema import OverlongConfig, RewardConfig
from beamline.records import GradeStatus
from beamline.tasks.graders.verdict import Verdict
from beamline.tasks.grading import grade, grading_task, open_pool, overlong_penalty
from beamline.tasks.pool import GradingTask, Outcome

OVERLONG = RewardConfig(overlong=OverlongConfig(buffer_tokens=4, factor=0.5))


def channels(final: str | None, analysis: str | None = "") -> Channels:
    return Channels(analysis, final, well_formed=final is not None)


def outcome_of(final: str | None) -> Outcome | None:
    """What grading against ``1`` comes to."""
    return None if final is None else Outcome("graded", Verdict(final == "1", final), 0.1, None)


def test_the_final_channel_is_what_is_graded_and_nothing_else() -> None:
    task = grading_task(channels("13", analysis="Answer: 12"), "12", RewardConfig(grader="exact"))
    assert task == GradingTask("exact", "13", "12")


def test_without_a_closed_final_channel_there_is_nothing_to_grade() -> None:
    assert grading_task(channels(None, analysis="Answer: 12"), "12", RewardConfig()) is None


def test_a_response_without_an_answer_is_wrong_but_graded() -> None:
    made = grade(channels(None, analysis="12"), None, 5, 10, RewardConfig())
    assert (made.correct, made.reward, made.status, made.parsed) == (False, -1.0, "graded", None)
    assert not made.well_formed


@pytest.mark.parametrize("status", ["timeout", "error"])
def test_what_could_not_be_graded_has_no_reward_and_says_why(status: GradeStatus) -> None:
    made = grade(channels("1"), Outcome(status, None, 5.0, "took too long"), 10, 10, OVERLONG)
    assert (made.status, made.correct, made.reward, made.parts) == (status, False, 0.0, {})
    assert (made.error, made.well_formed) == ("took too long", True)


def test_a_grade_keeps_the_answer_that_was_read() -> None:
    made = grade(channels("Answer: 13"), Outcome("graded", Verdict(False, "13"), 0.1, None), 5, 10, RewardConfig())
    assert (made.parsed, made.correct, made.well_formed, made.error) == ("13", False, True, None)


def test_rewards_of_right_and_wrong_are_those_of_the_recipe() -> None:
    config = RewardConfig(right=3.0, wrong=0.25)
    assert [grade(channels(t), outcome_of(t), 5, 10, config).reward for t in ("1", "2", None)] == [3.0, 0.25, 0.25]


@pytest.mark.parametrize("grader", ["math", "integer", "dapo_strict", "exact"])
def test_every_grader_of_the_configuration_grades_in_the_pool(grader: str) -> None:
    config = RewardConfig.model_validate({"grader": grader, "grading": {"workers": 1, "deadline_seconds": 60}})
    finals = ["Answer: 12", "Answer: 13"] if grader != "exact" else ["12", "13"]
    tasks = [grading_task(channels(final), "12", config) for final in finals]
    with open_pool(config) as pool:
        outcomes = pool.grade_all([task for task in tasks if task is not None])
    assert [o.verdict for o in outcomes] == [Verdict(True, "12"), Verdict(False, "13")]


@given(limit=st.integers(2, 200), share=st.floats(0.01, 0.99), tokens=st.integers(0, 250), factor=st.floats(0, 5))
def test_the_overlong_penalty_is_the_written_formula(limit: int, share: float, tokens: int, factor: float) -> None:
    buffer = max(1, int(share * limit))
    free = limit - buffer
    if tokens <= free:
        expected = 0.0
    elif tokens < limit:
        expected = -factor * (tokens - free) / buffer
    else:
        expected = -factor
    assert overlong_penalty(tokens, limit, buffer, factor) == pytest.approx(expected, abs=1e-12)


def test_the_overlong_penalty_at_its_corners() -> None:
    penalties = [overlong_penalty(tokens, 10, 4, 0.5) for tokens in (0, 6, 7, 9, 10, 11)]
    assert penalties == [0.0, 0.0, -0.125, -0.375, -0.5, -0.5]


@pytest.mark.parametrize("tokens", [3, 8, 10])
@pytest.mark.parametrize("final", ["1", "2", None])
def test_parts_add_up_to_the_reward(tokens: int, final: str | None) -> None:
    verdict = grade(channels(final), outcome_of(final), tokens, 10, OVERLONG)
    assert set(verdict.parts) == {"answer", "overlong"}
    assert sum(verdict.parts.values()) == verdict.reward
    assert verdict.parts["overlong"] == overlong_penalty(tokens, 10, 4, 0.5)


def test_the_penalty_does_not_make_a_right_answer_wrong() -> None:
    verdict = grade(channels("1"), outcome_of("1"), 10, 10, OVERLONG)
    assert (verdict.correct, verdict.reward) == (True, 0.5)


def test_without_a_buffer_there_is_no_overlong_part() -> None:
    assert grade(channels("1"), outcome_of("1"), 10, 10, RewardConfig()).parts == {"answer": 1.0}
