from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.loss import LossConfig
from beamline.config.algorithm import AlgorithmConfig
from beamline.learner.planning import Plan, evaluated, kept, micro_batches, plan
from beamline.records import Experience
from tests.samples import make_experience

STOPPED = make_experience(rows=5, response=3)
CUT = make_experience(rows=9, response=8, finish="length")
ABORTED = make_experience(rows=4, response=2, finish="abort")
UNGRADED = make_experience(rows=6, response=5, trained=False)
BATCH = [STOPPED, CUT, ABORTED, UNGRADED]
ROWS = st.lists(st.integers(1, 40), max_size=30)


def loss(on_policy: bool = True, **algorithm: Any) -> LossConfig:
    settings = {"prompts_per_update": 16} | algorithm  # of a step of 32, so that no loss is without a use
    return LossConfig(AlgorithmConfig.model_validate(settings), response_limit=10, seed=0, on_policy=on_policy)


def planned(batch: list[Experience], loss: LossConfig, ratio: float | None = None) -> Plan:
    """A plan where the learner finds ``ratio`` times the probabilities of the sampler; None = it was not asked."""
    indices = evaluated(batch, loss)
    mu = [batch[i].rollout.logprobs[batch[i].rollout.policy_mask] for i in indices]
    old = None if ratio is None else [logprobs + np.float32(np.log(ratio)) for logprobs in mu]
    return plan(batch, indices, old, None, loss)


def test_sequences_without_a_grade_are_never_kept() -> None:
    assert kept(BATCH, loss()) == [0, 1, 2]


def test_masking_keeps_only_responses_that_stopped() -> None:
    assert kept(BATCH, loss(mask_truncated=True)) == [0]


def test_sequences_without_a_response_are_never_kept() -> None:
    assert kept([make_experience(rows=3, response=0), STOPPED], loss()) == [1]


def test_nothing_may_be_kept() -> None:
    made = planned([CUT, UNGRADED], loss(mask_truncated=True))
    assert (made.sequences, made.counted_tokens, made.kept_tokens) == ((), 8, 0)


@pytest.mark.parametrize(
    ("mask_truncated", "renormalize", "denominator"),
    [(False, False, 13), (True, False, 13), (True, True, 3)],
)
def test_masked_tokens_leave_the_denominator_only_when_asked(
    mask_truncated: bool, renormalize: bool, denominator: int
) -> None:
    made = planned(BATCH, loss(mask_truncated=mask_truncated, renormalize_after_mask=renormalize))
    assert {p.weight for p in made.sequences} == {1 / denominator}
    assert (made.counted_tokens, made.kept_tokens) == (13, 3 if mask_truncated else 13)


def test_the_denominator_counts_response_tokens_not_rows() -> None:
    assert planned([make_experience(rows=50, response=2)], loss()).sequences[0].weight == 1 / 2


SILENT = replace(STOPPED, advantage=0.0)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, [1]),
        ({"kl": {"place": "loss"}}, [0, 1]),
        ({"kl": {"place": "reward"}}, [1]),
        ({"correction": {"veto": {"name": "outlier"}}}, [1]),
        ({"correction": {"veto": {"name": "outlier"}}, "renormalize_after_mask": True}, [0, 1]),
    ],
    ids=["plain", "kl loss", "kl reward", "correction", "correction in the denominator"],
)
def test_a_sequence_without_advantage_is_evaluated_only_where_it_is_needed(settings: Any, needed: list[int]) -> None:
    assert evaluated([SILENT, CUT], loss(**settings)) == needed


def test_a_sequence_without_advantage_has_no_gradient_unless_the_loss_has_a_kl_part() -> None:
    corrected = loss(correction={"weight": {"name": "mis"}}, renormalize_after_mask=True)
    assert [p.experience for p in planned([SILENT, CUT], corrected, 1.0).sequences] == [CUT]
    assert len(planned([SILENT, CUT], loss(kl={"place": "loss"})).sequences) == 2


def test_a_renormalized_denominator_has_the_kept_tokens_of_sequences_without_advantage_too() -> None:
    rule = {"correction": {"sequence_mask": {"name": "geometric"}}, "renormalize_after_mask": True}
    assert planned([SILENT, CUT], loss(**rule), 1.0).sequences[0].weight == 1 / 11
    everything = planned([SILENT, CUT], loss(**rule), 2.0)
    assert (everything.sequences, everything.kept_tokens) == ((), 0)


def test_without_a_correction_a_comparison_changes_nothing() -> None:
    alone, compared = planned(BATCH, loss()), planned(BATCH, loss(), 2.0)
    assert alone.compared is None
    assert compared.compared is not None
    assert compared.compared.kept is None
    assert [p.weight for p in alone.sequences] == [p.weight for p in compared.sequences]
    assert all(p.keep_R.all() and (p.correction_R == 1).all() for p in compared.sequences)


def test_a_kl_loss_does_not_change_what_is_selected() -> None:
    settings, silent = {"name": "kl_cov", "share": 0.3}, replace(make_experience(rows=9, response=8), advantage=0.0)
    batch = [replace(make_experience(rows=9, response=8), advantage=a) for a in (1.0, -0.5)]
    alone = planned([silent, *batch], loss(loss=settings), 1.1).sequences
    with_kl = planned([silent, *batch], loss(loss=settings, kl={"place": "loss"}), 1.1).sequences
    assert with_kl[0].selected_R is not None
    assert not with_kl[0].selected_R.any()
    for one, other in zip(alone, with_kl[1:], strict=True):
        assert one.selected_R is not None
        assert one.selected_R.tolist() == (other.selected_R.tolist() if other.selected_R is not None else None)


def test_selections_depend_on_neither_order_nor_neighbours_that_are_left_out() -> None:
    settings = {"name": "kl_cov", "share": 0.3}
    rng = np.random.default_rng(0)
    batch = [replace(make_experience(rows=9, response=8), advantage=float(a)) for a in rng.normal(size=4)]
    keyed = [replace(e, rollout=replace(e.rollout, key=replace(e.rollout.key, sample=i))) for i, e in enumerate(batch)]
    made = planned(keyed, loss(loss=settings), 1.1)
    turned = planned([UNGRADED, *keyed[::-1]], loss(loss=settings), 1.1)
    chosen = [p.selected_R for p in made.sequences]
    assert 0 < sum(int(s.sum()) for s in chosen if s is not None) < 32
    for one, other in zip(chosen, reversed([p.selected_R for p in turned.sequences]), strict=True):
        assert one is not None
        assert other is not None
        assert (one == other).all()


@given(rows=ROWS, budget=st.integers(1, 50))
def test_every_sequence_is_in_exactly_one_micro_batch(rows: list[int], budget: int) -> None:
    cuts = micro_batches(rows, budget)
    assert Counter(chain.from_iterable(cuts)) == Counter(range(len(rows)))
    assert all(cuts)


@given(rows=ROWS, budget=st.integers(1, 50))
def test_only_a_single_long_sequence_is_larger_than_the_budget(rows: list[int], budget: int) -> None:
    for cut in micro_batches(rows, budget):
        assert sum(rows[i] for i in cut) <= budget or len(cut) == 1


@given(rows=ROWS, budget=st.integers(1, 50))
def test_no_two_micro_batches_would_fit_into_one(rows: list[int], budget: int) -> None:
    sizes = sorted(sum(rows[i] for i in cut) for cut in micro_batches(rows, budget))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > budget


def test_the_cut_depends_on_lengths_alone_and_ties_keep_their_order() -> None:
    lengths = [4, 9, 4, 2, 7, 4]
    expected = [[1], [4, 3], [0, 2], [5]]
    assert micro_batches(lengths, 9) == expected


def test_nothing_makes_no_micro_batches() -> None:
    assert micro_batches([], 10) == []
