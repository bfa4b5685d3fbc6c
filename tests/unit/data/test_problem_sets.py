import pytest

from beamline.config.schema import ArithmeticSource
from beamline.data import DataError, Excluded, ProblemSet, check_disjoint, load, within_limit
from beamline.records import Problem
from tests.samples import make_problem


def tokens(problem: Problem) -> int:
    return len(problem.text)


def test_a_prompt_at_the_limit_stays_and_one_above_is_left_out_with_its_length() -> None:
    before = Excluded("line 3", "not JSON")
    problems = ProblemSet("set", (make_problem("123"), make_problem("1234"), make_problem("12")), (before,))
    kept = within_limit(problems, tokens, 3)
    assert [p.text for p in kept.problems] == ["123", "12"]
    reason = "prompt of 4 tokens; rollout.max_prompt_tokens is 3"
    assert kept.excluded == (before, Excluded("id of 1234", reason))


def test_no_prompt_within_the_limit_is_an_error_with_the_shortest() -> None:
    with pytest.raises(DataError, match=r"'set': every one of 2 prompts .*max_prompt_tokens=3 \(shortest: 4\)"):
        within_limit(ProblemSet("set", (make_problem("12345"), make_problem("1234"))), tokens, 3)


def test_sets_that_share_nothing_pass() -> None:
    check_disjoint(ProblemSet("train", (make_problem("1+2"),)), ProblemSet("eval", (make_problem("2+1"),)))


@pytest.mark.parametrize("question", ["add 1+2", "ADD 1+2", "  Add1 +\n2\t", "add\u00a01+2"])
def test_a_shared_question_is_an_error_whatever_its_spacing_and_case(question: str) -> None:
    train = ProblemSet("train", (make_problem("Add 1+2"),))
    evaluation = ProblemSet("aime", (make_problem("add 3+4"), make_problem(question)))
    with pytest.raises(DataError, match=r"1 of 2 problems of evaluation set 'aime' .*problem 'id of Add 1\+2'"):
        check_disjoint(train, evaluation)


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
