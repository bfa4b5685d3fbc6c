"""Records made up for tests: small, cheap, always the same."""

from typing import Any

import numpy as np

from beamline.records import Experience, Finish, Grade, GradeStatus, Group, Key, Message, Problem, Rollout, Turn


def make_problem(question: str = "1+2", answer: str = "3", **extra: Any) -> Problem:
    return Problem(f"id of {question}", (Message("user", question),), answer, "test", extra)


def make_grade(
    reward: float,
    correct: bool = False,
    status: GradeStatus = "graded",
    well_formed: bool = True,
    overlong: float = 0.0,
) -> Grade:
    return Grade(correct, reward, {"answer": reward - overlong, "overlong": overlong}, status, well_formed)


def make_rollout(
    prompt: int = 3,
    response: int = 4,
    sample: int = 0,
    finish: Finish = "stop",
    grade: Grade | None = None,
    routes: Any = None,
    temperature: float = 1.0,
) -> Rollout:
    """Token ids count from ``100 * sample``; log-probabilities are -1, -2, ... over the response."""
    tokens = prompt + response
    return Rollout(
        key=Key("train", 1, "problem", sample),
        token_ids=np.arange(tokens, dtype=np.int32) + 100 * sample,
        policy_mask=np.arange(tokens) >= prompt,
        logprobs=np.concatenate([np.zeros(prompt), -np.arange(1.0, response + 1)]).astype(np.float32),
        versions=np.where(np.arange(tokens) >= prompt, 0, -1).astype(np.int32),
        routes=routes,
        turns=(Turn("prompt", 0, prompt), Turn("policy", prompt, tokens)),
        finish=finish,
        temperature=temperature,
        grade=grade,
    )


def make_experience(rows: int, response: int = 1, trained: bool = True, finish: Finish = "stop") -> Experience:
    """A sequence that takes ``rows`` rows of a packed batch and has ``response`` response tokens."""
    return Experience(make_rollout(rows + 1 - response, response, finish=finish), advantage=0.5, trained=trained)


def make_group(*grades: Grade | None) -> Group:
    """A group with one rollout for each grade."""
    return Group(make_problem(), tuple(make_rollout(sample=i, grade=grade) for i, grade in enumerate(grades)))
