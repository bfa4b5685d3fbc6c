from itertools import combinations
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.records import random
from beamline.records.random import stream, uniforms

PURPOSE = ("train", 3, "problem", 5, 0)


def test_equal_keys_give_equal_numbers_in_any_order_of_calls() -> None:
    first = uniforms(7, PURPOSE, 0, 20)
    uniforms(8, PURPOSE, 0, 100)
    assert np.array_equal(uniforms(7, PURPOSE, 0, 20), first)


@given(start=st.integers(0, 64), length=st.integers(0, 64))
def test_a_slice_is_that_part_of_the_whole(start: int, length: int) -> None:
    whole = uniforms(7, PURPOSE, 0, 128)
    assert np.array_equal(uniforms(7, PURPOSE, start, start + length), whole[start : start + length])


def test_any_difference_in_seed_or_purpose_gives_other_numbers() -> None:
    keys: list[tuple[int, tuple[str | int, ...]]] = [
        (7, PURPOSE),
        (8, PURPOSE),
        (7, ("eval", *PURPOSE[1:])),
        (7, ("train", 4, "problem", 5, 0)),
        (7, ("train", 3, "other", 5, 0)),
        (7, ("train", 3, "problem", 6, 0)),
        (7, ("train", 3, "problem", 5, 1)),
        (7, PURPOSE[:-1]),
        (73, PURPOSE[1:]),
        (7, ("train3", *PURPOSE[2:])),
    ]
    drawn = [uniforms(seed, purpose, 0, 4).tolist() for seed, purpose in keys]
    assert all(not set(a) & set(b) for a, b in combinations(drawn, 2))


def test_numbers_are_uniform_in_the_half_open_interval() -> None:
    drawn = uniforms(0, ("uniform",), 0, 20_000)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 5 * 1000**0.5


def test_the_largest_draw_stays_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = Mock(random_raw=lambda n: np.full(n, 2**64 - 1, np.uint64))
    monkeypatch.setattr(random, "stream", Mock(return_value=largest))
    assert uniforms(0, (), 0, 1).tolist() == [1 - 2.0**-53]


def test_numbers_never_change_between_releases() -> None:
    assert uniforms(0, ("golden", 1), 2, 5).tolist() == [0.9481083323409043, 0.765641060986798, 0.22118484874866917]
    assert stream(0, "golden", 1).random_raw(2).tolist() == [383385232051636226, 269041415851000821]


def test_a_stream_serves_a_generator() -> None:
    one, other = (np.random.Generator(stream(5, "shuffle")).permutation(50) for _ in range(2))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_every_seed_of_a_recipe_has_a_stream(seed: int) -> None:
    assert len(uniforms(seed, (), 0, 3)) == 3
