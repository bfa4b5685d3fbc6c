"""A set of problems, what was left out of it, and which of them are drawn when."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from beamline.data.errors import DataError
from beamline.data.order import Part, mixed_indices, problem_indices
from beamline.records import Problem


@dataclass(frozen=True, slots=True)
class Excluded:
    """A row or problem that was left out: where (a line number or an id), and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The problems of one set, and what was left out of it; a mixture has the problems of its ``parts`` in turn.

    ``difficulties`` has a number for each problem where a pass begins with the easy ones, and none where it is random.
    """

    name: str
    problems: tuple[Problem, ...]
    excluded: tuple[Excluded, ...] = ()
    parts: tuple[Part, ...] = ()
    difficulties: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, seed: int, first: int, count: int) -> list[Problem]:
        """The next ``count`` problems of a run that has drawn ``first`` before: a function of these three alone."""
        if self.parts:
            chosen = mixed_indices(seed, first, count, self.parts, self.difficulties)
        else:
            chosen = problem_indices(seed, first, count, len(self), self.difficulties)
        return [self.problems[index] for index in chosen]

    def easy_first(self) -> "ProblemSet":
        """The same set, of which every pass (in a mixture, through each part) begins with the smallest difficulty.

        Raises:
            DataError: a problem has no difficulty, or one that is not a finite number.
        """
        return replace(self, difficulties=tuple(self._difficulty(problem) for problem in self.problems))

    def _difficulty(self, problem: Problem) -> float:
        value = _column(problem, "difficulty")
        number = _finite(value)
        if number is None:
            found = "no difficulty" if value is None else f"the difficulty {value!r:.100}, which is not a finite number"
            raise DataError(
                f"data set {self.name!r}: problem {problem.id!r} has {found}; data.order=easy_first needs a number in "
                "the column 'difficulty' (or 'extra_info.difficulty') of every problem (generated arithmetic has it): "
                "add it, or use data.order=random"
            )
        return number


def _column(problem: Problem, name: str) -> Any:
    """A column beside problem and answer; preparing a file moves them into ``extra_info``."""
    return problem.extra.get(name, in_extra_info(problem.extra, name))


def in_extra_info(extra: Mapping[str, Any], name: str) -> Any:
    """What stands under a name in the column ``extra_info``; None where there is no such thing."""
    info = extra.get("extra_info")
    return info.get(name) if isinstance(info, dict) else None


def _finite(value: Any) -> float | None:
    """A number, or text that is one as in a CSV file, if it is finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
