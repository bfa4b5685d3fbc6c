from collections import Counter

from beamline.config.schema import CompetitionSource
from beamline.data import load
from beamline.data.competition import raw_rows
from beamline.data.wording import AFTER, BEFORE, bare
from beamline.tasks.competition import exercises

SOURCE = CompetitionSource(problems=100)


def test_raw_rows_are_in_the_columns_of_dapo_repeated_and_contradicted() -> None:
    rows = [row.value for row in raw_rows(0, "train", 100)]
    assert {tuple(row) for row in rows} == {("data_source", "prompt", "ability", "reward_model", "extra_info")}
    assert len({row["extra_info"]["index"] for row in rows}) == len(rows)
    answers = Counter((row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows)
    assert set(answers.values()) == {2}
    assert Counter(Counter(prompt for prompt, _ in answers).values()) == {1: 100, 2: 2}


def test_what_is_left_are_the_problems_that_were_asked_for_in_their_order() -> None:
    problems = load("set", SOURCE, 0, "train").problems
    assert [(bare(p.text), p.answer) for p in problems] == [
        (e.question, str(e.answer)) for e in exercises(0, "train", 100)
    ]


def test_problems_have_the_wording_of_dapo() -> None:
    for problem in load("set", SOURCE, 0, "train").problems:
        assert problem.text.startswith(BEFORE)
        assert problem.text.endswith(AFTER)


def test_what_was_planted_to_be_cleaned_is_not_told_of_as_left_out() -> None:
    assert load("set", SOURCE, 0, "train").excluded == ()


def test_evaluation_problems_do_not_depend_on_the_seed_of_the_run() -> None:
    assert load("set", SOURCE, 1, "eval").problems == load("set", SOURCE, 2, "eval").problems
    assert load("set", SOURCE, 1, "train").problems != load("set", SOURCE, 2, "train").problems
