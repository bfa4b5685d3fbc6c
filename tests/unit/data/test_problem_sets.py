from dataclasses import replace

import pytest

from beamline.chat.beam import CONTROL, BeamChat
from beamline.config.schema import ArithmeticSource
from beamline.data import DataError, Excluded, ProblemSet, check_disjoint, load, usable
from tests.samples import make_problem


def test_a_prompt_at_the_limit_stays_and_one_above_is_left_out_with_its_length(chat: BeamChat) -> None:
    before = Excluded("line 3", "not JSON")
    problems = ProblemSet("set", (make_problem("123"), make_problem("1234"), make_problem("12")), (before,))
    limit = len(chat.prompt_ids(problems.problems[0].messages))
    kept = usable(problems, chat, limit, "exact")
    assert [p.text for p in kept.problems] == ["123", "12"]
    reason = f"prompt of {limit + 1} tokens; rollout.max_prompt_tokens is {limit}"
    assert kept.excluded == (before, Excluded("id of 1234", reason))


@pytest.mark.parametrize("token", CONTROL)
def test_a_text_that_would_be_read_as_a_control_token_is_left_out(chat: BeamChat, token: str) -> None:
    problems = ProblemSet("set", (make_problem("1+2"), make_problem(f"1{token}2")))
    kept = usable(problems, chat, 64, "exact")
    assert [p.text for p in kept.problems] == ["1+2"]
    assert kept.excluded[0].reason == f"message 0 (user): the text holds the control token {token}"


def test_no_usable_prompt_is_an_error_with_the_first_reason(chat: BeamChat) -> None:
    problems = ProblemSet("set", (make_problem("12345"), make_problem("1234")))
    with pytest.raises(DataError, match=r"'set': no problem of 2 can be used; id of 12345: prompt of \d+ tokens"):
        usable(problems, chat, 3, "exact")


def test_a_problem_whose_answer_the_grader_cannot_judge_by_is_left_out(chat: BeamChat) -> None:
    problems = ProblemSet("set", (make_problem("1/2"), make_problem("1+2")))
    problems = replace(problems, problems=(replace(problems.problems[0], answer="1/2"), problems.problems[1]))
    assert [p.text for p in usable(problems, chat, 64, "math").problems] == ["1/2", "1+2"]
    kept = usable(problems, chat, 64, "integer")
    assert [p.text for p in kept.problems] == ["1+2"]
    assert kept.excluded[0].reason.startswith("reward.grader=integer cannot judge by its answer: not an integer")


def test_sets_that_share_nothing_pass() -> None:
    check_disjoint(ProblemSet("train", (make_problem("1+2"),)), ProblemSet("eval", (make_problem("2+1"),)))


@pytest.mark.parametrize("question", ["add 1+2", "ADD 1+2", "  Add  1 +\n2\t", "add\u00a01+2"])
def test_a_shared_question_is_an_error_whatever_its_spacing_and_case(question: str) -> None:
    train = ProblemSet("train", (make_problem("Add 1+2"),))
    evaluation = ProblemSet("aime", (make_problem("add 3+4"), make_problem(question)))
    with pytest.raises(DataError, match=r"1 of 2 problems of evaluation set 'aime' .*problem 'id of Add 1\+2'"):
        check_disjoint(train, evaluation)


def test_numbers_that_only_spacing_tells_apart_are_other_questions() -> None:
    check_disjoint(ProblemSet("train", (make_problem("12 3"),)), ProblemSet("eval", (make_problem("1 23"),)))


def test_generated_training_and_evaluation_sets_are_disjoint_for_any_seeds() -> None:
    source = ArithmeticSource(problems=40, levels=[2])
    for seed in (0, 1, 12345):
        check_disjoint(load("train", source, seed, "train"), load("eval", source, seed, "eval"))


def test_training_problems_follow_the_seed_and_evaluation_problems_do_not() -> None:
    source = ArithmeticSource(problems=20)
    assert load("a", source, 1, "train") != load("a", source, 2, "train")
    assert load("a", source, 1, "eval") == load("a", source, 2, "eval")


def test_more_generated_problems_than_exist_is_an_error_that_names_the_set() -> None:
    with pytest.raises(DataError, match=r"data set 'tiny': arithmetic: levels \[1\] have fewer than 64"):
        load("tiny", ArithmeticSource(problems=64, levels=[1]), 0, "train")
