from collections.abc import Iterator

import numpy as np
import pytest

from beamline.chat import BeamChat
from beamline.config.schema import OverlongConfig, RewardConfig
from beamline.records import Completion, Grade, Group, Key, Problem, SamplingParams
from beamline.rollout.collect import Job, requests, to_rollout
from beamline.rollout.grading import Grading
from beamline.tasks.pool import GradingPool
from tests.samples import make_problem

CONFIG = RewardConfig(grader="exact", overlong=OverlongConfig(buffer_tokens=10, factor=1.0))
LIMIT = 100


@pytest.fixture(scope="module")
def pool() -> Iterator[GradingPool]:
    with GradingPool(workers=1, deadline_seconds=60, memory_mb=512) as opened:
        yield opened


def completed(key: Key, ids: list[int]) -> Completion:
    count = len(ids)
    zeros, versions = np.zeros(count, np.float32), np.zeros(count, np.int32)
    return Completion(key, np.array(ids, np.int32), zeros, versions, None, "stop")


def grades(
    pool: GradingPool, chat: BeamChat, problems: list[Problem], responses: list[list[str]], finished: list[int]
) -> list[list[Grade | None]]:
    """Grades of responses (of each problem) that finish in the given order."""
    job = Job("train", 1, problems, len(responses[0]), SamplingParams(LIMIT))
    asked = requests(job, chat)
    texts = [text for group in responses for text in group]
    done = [
        completed(request.key, chat.encode(text))
        for request, text in zip([r for group in asked for r in group], texts, strict=True)
    ]
    grading = Grading(pool, job, chat, CONFIG)
    for place in finished:
        grading.add(done[place])
    by_key = {completion.key: completion for completion in done}
    drawn = [
        Group(problem, tuple(to_rollout(request, by_key[request.key]) for request in group))
        for problem, group in zip(problems, asked, strict=True)
    ]
    return [[rollout.grade for rollout in group.rollouts] for group in grading.finish(drawn)]


def answer(text: str) -> str:
    return f"<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"


def test_each_response_is_graded_against_its_problem_whatever_finishes_first(pool: GradingPool, chat: BeamChat) -> None:
    problems = [make_problem("1+2", "3"), make_problem("2+2", "4")]
    made = grades(pool, chat, problems, [[answer("3"), answer("4")], [answer("3"), answer("4")]], [3, 0, 2, 1])
    assert [[grade.correct for grade in group if grade] for group in made] == [[True, False], [False, True]]


def test_a_response_without_a_final_answer_is_wrong(pool: GradingPool, chat: BeamChat) -> None:
    cut = "<|channel|>analysis<|message|>3<|end|><|start|>assistant<|channel|>final<|message|>3"
    ((grade,),) = grades(pool, chat, [make_problem("1+2", "3")], [[cut]], [0])
    assert grade is not None
    assert (grade.status, grade.correct, grade.parsed) == ("graded", False, None)


def test_the_length_that_is_penalized_is_that_of_the_response(pool: GradingPool, chat: BeamChat) -> None:
    text = answer("3")
    filler = LIMIT - 5 - len(chat.encode(text))
    long = text.replace(">x<", ">x" + "y" * filler + "<")
    ((grade,),) = grades(pool, chat, [make_problem("1+2", "3")], [[long]], [0])
    assert grade is not None
    assert grade.parts == {"answer": 1.0, "overlong": -0.5}


def test_a_problem_that_occurs_twice_has_its_samples_graded_apart(pool: GradingPool, chat: BeamChat) -> None:
    problem = make_problem("1+2", "3")
    made = grades(pool, chat, [problem, problem], [[answer("3")], [answer("4")]], [1, 0])
    assert [[grade.correct for grade in group if grade] for group in made] == [[True], [False]]
