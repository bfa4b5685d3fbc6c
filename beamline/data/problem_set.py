"""A set of problems, what was left out of it, and which of them a step trains on."""

from dataclasses import dataclass

from beamline.data.order import Part, mixed_indices, problem_indices
from beamline.records import Problem


@dataclass(frozen=True, slots=True)
class Excluded:
    """A row or problem that was left out: where (a line number or an id), and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The problems of one set, and what was left out of it; a mixture has the problems of its ``parts`` in turn."""

    name: str
    problems: tuple[Problem, ...]
    excluded: tuple[Excluded, ...] = ()
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.problems)

    def of_step(self, seed: int, step: int, count: int) -> list[Problem]:
        """The problems that a step trains on: a function of seed and step alone."""
        if self.parts:
            chosen = mixed_indices(seed, step, count, self.parts)
        else:
            chosen = problem_indices(seed, step, count, len(self))
        return [self.problems[index] for index in chosen]
