"""Routes of packed sequences stand on the rows of their tokens, or the sequences are not packed."""

import re

import numpy as np
import pytest

from beamline.records import Experience, pack
from tests.samples import make_rollout


def sequences(*shapes: tuple[int, ...]) -> list[Experience]:
    """Sequences of 6 rows with routes of some shapes."""
    return [Experience(make_rollout(sample=i, routes=np.zeros(s, np.uint8)), 1.0) for i, s in enumerate(shapes)]


def test_lengths_that_only_add_up_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=re.escape("sample=0, attempt=0) has routes of shape (7, 2, 3), expected (6, 2")
    ):
        pack(sequences((7, 2, 3), (5, 2, 3)))


@pytest.mark.parametrize("other", [(6, 1, 3), (6, 2, 4), (6, 6)])
def test_sequences_of_different_models_are_an_error(other: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"sample=1, attempt=0) has routes of shape {other}, expected (6, 2")
    ):
        pack(sequences((6, 2, 3), other))
