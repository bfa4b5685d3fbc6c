from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.data import problem_indices


def taken(seed: int, steps: int, per_step: int, problems: int) -> list[int]:
    return list(chain.from_iterable(problem_indices(seed, s, per_step, problems).tolist() for s in range(1, steps + 1)))


@given(seed=st.integers(0, 2**63 - 1), per_step=st.integers(1, 12), problems=st.integers(1, 30))
def test_every_epoch_is_a_permutation(seed: int, per_step: int, problems: int) -> None:
    order = taken(seed, -(-3 * problems // per_step), per_step, problems)
    for epoch in range(3):
        assert sorted(order[epoch * problems : (epoch + 1) * problems]) == list(range(problems))


def test_epochs_differ_and_so_do_seeds() -> None:
    order = taken(seed=1, steps=3, per_step=50, problems=50)
    assert order[:50] != order[50:100] != order[100:]
    assert order[:50] != taken(seed=2, steps=1, per_step=50, problems=50)


def test_a_step_across_the_border_takes_the_rest_and_the_beginning() -> None:
    one_by_one = taken(seed=3, steps=12, per_step=1, problems=6)
    assert problem_indices(3, 2, 4, 6).tolist() == one_by_one[4:8]
    assert sorted(one_by_one[:6]) == sorted(one_by_one[6:]) == list(range(6))


def test_a_step_larger_than_the_set_goes_through_it_more_than_once() -> None:
    order = problem_indices(0, 1, 10, 4).tolist()
    assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]
    assert len(order) == 10


def test_a_step_needs_no_step_before_it() -> None:
    late = problem_indices(5, 1000, 8, 30)
    problem_indices(5, 1, 8, 30)
    assert np.array_equal(problem_indices(5, 1000, 8, 30), late)


def test_the_order_is_one_whatever_the_size_of_a_step() -> None:
    assert taken(seed=4, steps=6, per_step=5, problems=7) == taken(seed=4, steps=3, per_step=10, problems=7)


@pytest.mark.parametrize(("step", "expected"), [(1, [5, 3, 1, 4]), (2, [0, 2, 3, 2]), (3, [0, 5, 1, 4])])
def test_the_order_never_changes_between_releases(step: int, expected: list[int]) -> None:
    assert problem_indices(7, step, 4, 6).tolist() == expected
