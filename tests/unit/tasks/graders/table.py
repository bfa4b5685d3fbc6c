"""Rows of the tables: an expected answer, responses that are right, and responses that are wrong."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    truth: str
    right: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def rows(cases: tuple[Case, ...]) -> Iterator[tuple[str, str, bool]]:
    """Every response with the expected answer, and whether a mathematician calls it right."""
    for case in cases:
        for response in case.right:
            yield response, case.truth, True
        for response in case.wrong:
            yield response, case.truth, False
