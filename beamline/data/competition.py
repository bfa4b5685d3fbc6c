"""Competition-style problems on the path that a real data set takes: raw rows like DAPO's, cleaned, then read."""

from collections.abc import Iterator
from typing import Any

from beamline.data.cleaning import clean
from beamline.data.files import Row, frame_rows, rows_of
from beamline.data.wording import dapo
from beamline.tasks.competition import Exercise, exercises
from beamline.tasks.partition import Pool

_REPEATS = 2  # DAPO-Math-17K has each row a hundred times
_CONTRADICTED = 50  # one problem in so many has a second row with another answer


def raw_rows(seed: int, pool: Pool, problems: int) -> Iterator[Row]:
    """Rows in DAPO's columns and wording, of which ``problems`` distinct ones are left when they are cleaned.

    As in the original, every row is there more than once and some prompts have two answers.

    Raises:
        ValueError: the pool has fewer problems.
    """
    made = exercises(seed, pool, problems + -(-problems // _CONTRADICTED))
    rows = [_row(exercise, exercise.answer) for exercise in made]
    rows += [_row(exercise, exercise.answer + 1) for exercise in made[problems:]]
    numbered = ({**row, "extra_info": {"index": index}} for index, row in enumerate(rows * _REPEATS))
    return rows_of(numbered)


def _row(exercise: Exercise, answer: int) -> dict[str, Any]:
    return {
        "data_source": "competition",
        "prompt": [{"role": "user", "content": dapo(exercise.question)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(answer), "style": "rule"},
    }


def prepared_rows(seed: int, pool: Pool, problems: int) -> Iterator[Row]:
    """The rows that are left after cleaning, as they would be read from the prepared file."""
    cleaned = clean(raw_rows(seed, pool, problems), "competition")
    return frame_rows(cleaned.frame(), range(1, len(cleaned.rows) + 1))
