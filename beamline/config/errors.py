"""What is wrong with a configuration: every problem at once, one line each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from beamline.errors import BeamlineError


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: ``value`` is what ``key`` was given, as text; ``where`` names the file and line, or the override."""

    reason: str
    key: str = ""
    value: str | None = None
    where: str = ""

    def __str__(self) -> str:
        setting = self.key if self.value is None else f"{self.key}={self.value}"
        return ": ".join(part for part in (self.where, setting, self.reason) if part)


class ConfigError(BeamlineError, ValueError):
    """A configuration that cannot be used; ``problems`` has one entry for each mistake that was found."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def shown(value: Any) -> str:
    """A value as one short line; text is quoted, so that ``"50"`` and ``50`` differ."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
