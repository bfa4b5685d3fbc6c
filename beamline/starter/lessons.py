"""What a starter is taught: problems with worked steps, in the words and with the answers that it will be asked for."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamline.data.wording import dapo
from beamline.records import Message, Problem
from beamline.tasks.arithmetic import generate, worked_steps
from beamline.tasks.competition import exercises

LEVEL = 3  # of the sums


@dataclass(frozen=True, slots=True)
class Lesson:
    """A problem, the steps to think and the text of the final channel."""

    problem: Problem
    steps: str
    final: str


@dataclass(frozen=True, slots=True)
class Course:
    """What a starter learns, and what its tokenizer and chat template are given for it."""

    lessons: Callable[[int, int], Sequence[Lesson]]
    """Distinct lessons: of a seed, so many."""
    words: tuple[str, ...] = ()
    """Words that are tokens of their own; all else is bytes."""
    template_arguments: tuple[tuple[str, str], ...] = ()


def _sums(seed: int, lessons: int) -> list[Lesson]:
    problems = generate(seed, "warmup", lessons, [LEVEL])
    return [Lesson(problem, worked_steps(problem.extra["terms"]), problem.answer) for problem in problems]


def _competition(seed: int, lessons: int) -> list[Lesson]:
    return [
        Lesson(
            Problem(e.question, (Message("user", dapo(e.question)),), str(e.answer), "competition"),
            e.steps,
            f"Answer: {e.answer}",
        )
        for e in exercises(seed, "warmup", lessons)
    ]


def _words(texts: Sequence[str]) -> tuple[str, ...]:
    """Words of two letters and more, each with the space before it."""
    return tuple(sorted({word for text in texts for word in re.findall(r" ?[A-Za-z]{2,}", text)}))


COURSES = {
    "starter": Course(_sums),
    "starter-math": Course(
        _competition,
        words=_words([lesson.problem.text for lesson in _competition(0, 70)] + ["Reasoning: minimal", "Answer:"]),
        template_arguments=(("reasoning_effort", "minimal"),),
    ),
}
