import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.chat import Channels
from beamline.config.schema import OverlongConfig, RewardConfig
from beamline.tasks.grading import grade, is_integer, overlong_penalty

OVERLONG = RewardConfig(overlong=OverlongConfig(buffer_tokens=4, factor=0.5))


def channels(final: str | None, analysis: str | None = "") -> Channels:
    return Channels(analysis, final, well_formed=final is not None)


@pytest.mark.parametrize("text", ["7", "+7", "-7", "007", "1" * 100])
def test_integers_are_decimal_digits_with_a_sign_at_most(text: str) -> None:
    assert is_integer(text)


@pytest.mark.parametrize(
    "text", ["", "-", "7.0", "1e3", "0x7", "7 ", "7\n", "1_000", "1,000", "٧", "²", "--7", "1" * 101]
)
def test_everything_else_is_no_integer(text: str) -> None:
    assert not is_integer(text)


@pytest.mark.parametrize("final", ["12", " 12\n", "+12", "0012"])
def test_the_expected_integer_in_the_final_channel_is_right(final: str) -> None:
    verdict = grade(channels(final), "12", 5, 10, RewardConfig())
    assert (verdict.correct, verdict.reward, verdict.parsed) == (True, 1.0, final.strip())


@pytest.mark.parametrize("final", ["13", "-12", "12.", "the answer is 12", "12 12", "1 2", ""])
def test_anything_else_in_the_final_channel_is_wrong(final: str) -> None:
    verdict = grade(channels(final), "12", 5, 10, RewardConfig())
    assert (verdict.correct, verdict.reward, verdict.status) == (False, -1.0, "graded")


def test_what_stands_in_the_analysis_channel_does_not_count() -> None:
    assert not grade(channels("13", analysis="12"), "12", 5, 10, RewardConfig()).correct
    assert grade(channels("12", analysis="13"), "12", 5, 10, RewardConfig()).correct


def test_without_a_closed_final_channel_an_answer_is_wrong_but_graded() -> None:
    verdict = grade(channels(None, analysis="12"), "12", 5, 10, RewardConfig())
    assert (verdict.correct, verdict.status, verdict.parsed, verdict.well_formed) == (False, "graded", None, False)


def test_only_integers_are_reported_as_parsed() -> None:
    assert grade(channels("twelve"), "12", 5, 10, RewardConfig()).parsed is None
    assert grade(channels(" 13 "), "12", 5, 10, RewardConfig()).parsed == "13"


def test_answers_are_compared_as_numbers() -> None:
    assert grade(channels("-0"), "+00", 5, 10, RewardConfig()).correct


def test_rewards_of_right_and_wrong_are_those_of_the_recipe() -> None:
    config = RewardConfig(right=3.0, wrong=0.25)
    assert [grade(channels(final), "1", 5, 10, config).reward for final in ("1", "2")] == [3.0, 0.25]


def test_an_endless_number_is_no_answer_and_takes_no_time() -> None:
    assert not grade(channels("9" * 1_000_000), "9", 5, 10, RewardConfig()).correct


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
    verdict = grade(channels(final), "1", tokens, 10, OVERLONG)
    assert set(verdict.parts) == {"answer", "overlong"}
    assert sum(verdict.parts.values()) == verdict.reward
    assert verdict.parts["overlong"] == overlong_penalty(tokens, 10, 4, 0.5)


def test_the_penalty_does_not_make_a_right_answer_wrong() -> None:
    verdict = grade(channels("1"), "1", 10, 10, OVERLONG)
    assert (verdict.correct, verdict.reward) == (True, 0.5)


def test_without_a_buffer_there_is_no_overlong_part() -> None:
    assert grade(channels("1"), "1", 10, 10, RewardConfig()).parts == {"answer": 1.0}
