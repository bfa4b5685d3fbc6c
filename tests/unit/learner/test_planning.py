from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.loss import LossConfig
from beamline.learner.planning import denominator, kept, micro_batches
from tests.samples import make_experience

STOPPED = make_experience(rows=5, response=3)
CUT = make_experience(rows=9, response=8, finish="length")
ABORTED = make_experience(rows=4, response=2, finish="abort")
UNGRADED = make_experience(rows=6, response=5, trained=False)
BATCH = [STOPPED, CUT, ABORTED, UNGRADED]
ROWS = st.lists(st.integers(1, 40), max_size=30)


def loss(mask_truncated: bool = False, renormalize_after_mask: bool = False) -> LossConfig:
    return LossConfig(0.2, 0.28, mask_truncated, renormalize_after_mask, on_policy=True)


def test_sequences_without_a_grade_are_never_kept() -> None:
    assert kept(BATCH, loss()) == [STOPPED, CUT, ABORTED]


def test_masking_keeps_only_responses_that_stopped() -> None:
    assert kept(BATCH, loss(mask_truncated=True)) == [STOPPED]


def test_sequences_without_a_response_are_never_kept() -> None:
    assert kept([make_experience(rows=3, response=0), STOPPED], loss()) == [STOPPED]


def test_nothing_may_be_kept() -> None:
    assert kept([CUT, UNGRADED], loss(mask_truncated=True)) == []


@pytest.mark.parametrize(
    ("mask_truncated", "renormalize", "expected"),
    [(False, False, 13), (False, True, 13), (True, False, 13), (True, True, 3)],
)
def test_masked_tokens_leave_the_denominator_only_when_asked(
    mask_truncated: bool, renormalize: bool, expected: int
) -> None:
    assert denominator(BATCH, loss(mask_truncated, renormalize)) == expected


def test_the_denominator_counts_response_tokens_not_rows() -> None:
    assert denominator([make_experience(rows=50, response=2)], loss()) == 2


@given(rows=ROWS, budget=st.integers(1, 50))
def test_every_sequence_is_in_exactly_one_micro_batch(rows: list[int], budget: int) -> None:
    cuts = micro_batches([make_experience(n) for n in rows], budget)
    assert Counter(chain.from_iterable(cuts)) == Counter(range(len(rows)))
    assert all(cuts)


@given(rows=ROWS, budget=st.integers(1, 50))
def test_only_a_single_long_sequence_is_larger_than_the_budget(rows: list[int], budget: int) -> None:
    for cut in micro_batches([make_experience(n) for n in rows], budget):
        assert sum(rows[i] for i in cut) <= budget or len(cut) == 1


@given(rows=ROWS, budget=st.integers(1, 50))
def test_no_two_micro_batches_would_fit_into_one(rows: list[int], budget: int) -> None:
    sizes = sorted(sum(rows[i] for i in cut) for cut in micro_batches([make_experience(n) for n in rows], budget))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > budget


def test_the_cut_depends_on_lengths_alone_and_ties_keep_their_order() -> None:
    lengths = [4, 9, 4, 2, 7, 4]
    expected = [[1], [4, 3], [0, 2], [5]]
    assert micro_batches([make_experience(n) for n in lengths], 9) == expected
    assert micro_batches([make_experience(n, trained=False, finish="length") for n in lengths], 9) == expected


def test_nothing_makes_no_micro_batches() -> None:
    assert micro_batches([], 10) == []
