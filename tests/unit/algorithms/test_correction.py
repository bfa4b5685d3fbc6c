"""The rules of a correction against their formulas in plain probabilities, one sequence and one token at a time."""

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from beamline.algorithms.correction import Correction, correct
from beamline.config.correction import (
    CorrectionConfig,
    GeometricMask,
    IcepopWeight,
    MaskedWeight,
    NoMask,
    NoWeight,
    OutlierVeto,
    ProductMask,
    TruncatedWeight,
)

Pair = tuple[float, float]  # pi_old and mu of a token, as probabilities
Sequences = list[list[Pair]]

WEIGHTS: list[Any] = [
    TruncatedWeight(),
    TruncatedWeight(level="sequence", cap=1.5),
    MaskedWeight(),
    MaskedWeight(level="sequence", cap=1.5),
    IcepopWeight(),
    IcepopWeight(low=0.9, high=1.2),
]
MASKS: list[Any] = [GeometricMask(), GeometricMask(low=0.7, high=1.3), ProductMask(), ProductMask(low=0.9, high=1.1)]
VETOES: list[Any] = [OutlierVeto(), OutlierVeto(low=0.5, high=2.0)]
ALONE: list[CorrectionConfig] = [
    *(CorrectionConfig(weight=weight) for weight in WEIGHTS),
    *(CorrectionConfig(sequence_mask=mask) for mask in MASKS),
    *(CorrectionConfig(veto=veto) for veto in VETOES),
]
CONFIGS = st.builds(
    CorrectionConfig,
    weight=st.sampled_from([NoWeight(), *WEIGHTS]),
    sequence_mask=st.sampled_from([NoMask(), *MASKS]),
    veto=st.sampled_from([NoMask(), *VETOES]),
)
# Ratios near 1, where the bounds are, and far from it.
PAIRS = st.one_of(
    st.floats(0.05, 0.5).flatmap(lambda mu: st.floats(0.8, 1.25).map(lambda rho: (mu * rho, mu))),
    st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)),
    st.floats(1e-6, 1.0).map(lambda p: (p, p)),
)
SEQUENCES = st.lists(st.lists(PAIRS, max_size=6), max_size=6)


def corrected(sequences: Sequence[Sequence[Pair]], config: CorrectionConfig) -> Correction:
    pairs = [pair for sequence in sequences for pair in sequence]
    old_T, sampler_T = (np.array([log(pair[side]) for pair in pairs], dtype=np.float64) for side in (0, 1))
    return correct(old_T, sampler_T, np.array([len(s) for s in sequences], dtype=np.int64), config)


def by_sequence(values: np.ndarray, sequences: Sequence[Sequence[Pair]]) -> list[list[Any]]:
    borders = np.cumsum([0, *(len(s) for s in sequences)])
    return [values[a:b].tolist() for a, b in pairwise(borders)]


class Reference:
    """The formulas, with the nearest that anything came to a bound."""

    def __init__(self, config: CorrectionConfig) -> None:
        self.config, self.margin = config, 1.0

    def inside(self, value: float, low: float, high: float) -> bool:
        self.margin = min(self.margin, abs(value / low - 1) if low else 1.0, abs(value / high - 1))
        return low <= value <= high

    def sequence(self, pairs: Sequence[Pair]) -> tuple[dict[str, list[bool]], list[bool], list[float]]:
        """What each rule leaves out, what is kept, and what it weighs."""
        veto, mask, weight = self.config.veto, self.config.sequence_mask, self.config.weight
        rho = [old / mu for old, mu in pairs]
        masked: dict[str, list[bool]] = {}
        if isinstance(veto, OutlierVeto):
            outliers = [r for r in rho if not self.inside(r, veto.low, veto.high)]
            masked["veto"] = [bool(outliers)] * len(rho)
        if isinstance(mask, GeometricMask):
            mean = prod(rho) ** (1 / max(len(rho), 1))
            masked["sequence_mask"] = [not self.inside(mean, mask.low, mask.high)] * len(rho)
        if isinstance(mask, ProductMask):
            masked["sequence_mask"] = [not self.inside(prod(rho), mask.low, mask.high)] * len(rho)
        weights = [1.0] * len(rho)
        if isinstance(weight, IcepopWeight):
            masked["weight"] = [not self.inside(r, weight.low, weight.high) for r in rho]
            weights = rho
        if isinstance(weight, TruncatedWeight | MaskedWeight):
            weights = rho if weight.level == "token" else [prod(rho)] * len(rho)
        if isinstance(weight, MaskedWeight):
            masked["weight"] = [not self.inside(w, 0.0, weight.cap) for w in weights]
        if isinstance(weight, TruncatedWeight):
            weights = [min(w, weight.cap) for w in weights]
        kept = [not any(masked[rule][t] for rule in masked) for t in range(len(rho))]
        return masked, kept, [w if k else 0.0 for w, k in zip(weights, kept, strict=True)]


def agree_with_the_formulas(sequences: Sequences, config: CorrectionConfig) -> None:
    made, reference = corrected(sequences, config), Reference(config)
    expected = [reference.sequence(pairs) for pairs in sequences]
    assume(reference.margin > 1e-9)  # where a value lies at a bound rounding decides, and has tests of its own
    assert by_sequence(made.keep_T, sequences) == [kept for _, kept, _ in expected]
    for rule, masked_T in made.masked.items():
        assert by_sequence(masked_T, sequences) == [masked[rule] for masked, _, _ in expected]
    weights = [weight for _, _, row in expected for weight in row]
    assert made.weights_T.tolist() == pytest.approx(weights, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("config", ALONE, ids=lambda c: repr([r.name for r in (c.weight, c.sequence_mask, c.veto)]))
@given(sequences=SEQUENCES)
def test_each_rule_alone_does_what_its_formula_says(config: CorrectionConfig, sequences: Sequences) -> None:
    agree_with_the_formulas(sequences, config)


@given(sequences=SEQUENCES, config=CONFIGS)
def test_rules_together_keep_what_all_of_them_keep(sequences: Sequences, config: CorrectionConfig) -> None:
    agree_with_the_formulas(sequences, config)


@given(sequences=SEQUENCES, config=CONFIGS)
def test_a_rule_judges_the_whole_response_whatever_others_say_of_it(
    sequences: Sequences, config: CorrectionConfig
) -> None:
    """So rules have no order: each leaves out alone what it leaves out among others, and their union is left out."""
    made = corrected(sequences, config)
    alone = {
        "veto": corrected(sequences, CorrectionConfig(veto=config.veto)),
        "sequence_mask": corrected(sequences, CorrectionConfig(sequence_mask=config.sequence_mask)),
        "weight": corrected(sequences, CorrectionConfig(weight=config.weight)),
    }
    for rule, masked_T in made.masked.items():
        assert np.array_equal(masked_T, alone[rule].masked[rule])
    keep_T = np.logical_and.reduce([each.keep_T for each in alone.values()])
    assert np.array_equal(made.keep_T, keep_T)
    assert np.array_equal(made.weights_T, np.where(keep_T, alone["weight"].weights_T, 0.0))


@given(sequences=SEQUENCES, config=CONFIGS)
def test_a_rule_has_a_row_if_it_is_on_and_may_leave_tokens_out(sequences: Sequences, config: CorrectionConfig) -> None:
    on = {
        "veto": not isinstance(config.veto, NoMask),
        "sequence_mask": not isinstance(config.sequence_mask, NoMask),
        "weight": isinstance(config.weight, MaskedWeight | IcepopWeight),
    }
    assert set(corrected(sequences, config).masked) == {rule for rule in on if on[rule]}


@given(sequences=SEQUENCES)
def test_without_rules_all_is_kept_and_weighs_one(sequences: Sequences) -> None:
    made = corrected(sequences, CorrectionConfig())
    assert made.keep_T.all()
    assert (made.weights_T == 1).all()
    assert made.masked == {}


@given(sequences=SEQUENCES, config=CONFIGS, seed=st.integers(0, 99))
def test_sequences_in_another_order_are_judged_the_same(
    sequences: Sequences, config: CorrectionConfig, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(sequences))
    shuffled = [sequences[i] for i in order]
    made, moved = corrected(sequences, config), corrected(shuffled, config)
    for one, other in ((made.keep_T, moved.keep_T), (made.weights_T, moved.weights_T)):
        parts = by_sequence(one, sequences)
        assert by_sequence(other, shuffled) == [parts[i] for i in order]


@given(sequences=SEQUENCES, further=st.lists(PAIRS, max_size=6), config=CONFIGS)
def test_a_further_sequence_changes_nothing_for_the_others(
    sequences: Sequences, further: list[Pair], config: CorrectionConfig
) -> None:
    made, more = corrected(sequences, config), corrected([*sequences, further], config)
    tokens = len(made.keep_T)
    assert np.array_equal(more.keep_T[:tokens], made.keep_T)
    assert np.array_equal(more.weights_T[:tokens], made.weights_T)


def judged(log_ratios: list[float], config: CorrectionConfig) -> Correction:
    """One sequence whose log-ratios are exactly these."""
    return correct(np.array(log_ratios), np.zeros(len(log_ratios)), np.array([len(log_ratios)]), config)


LOW, HIGH = np.log(0.75), np.log(1.5)
AT_BOUNDS = [
    CorrectionConfig(weight=IcepopWeight(low=0.75, high=1.5)),
    CorrectionConfig(sequence_mask=GeometricMask(low=0.75, high=1.5)),
    CorrectionConfig(sequence_mask=ProductMask(low=0.75, high=1.5)),
    CorrectionConfig(veto=OutlierVeto(low=0.75, high=1.5)),
]


@pytest.mark.parametrize("config", AT_BOUNDS, ids=["icepop", "geometric", "product", "outlier"])
def test_bounds_belong_to_what_is_kept(config: CorrectionConfig) -> None:
    for bound, outside in ((LOW, -np.inf), (HIGH, np.inf)):
        assert judged([bound], config).keep_T.all()
        assert not judged([np.nextafter(bound, outside)], config).keep_T.any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_cap_belongs_to_what_is_kept(level: Any) -> None:
    config = CorrectionConfig(weight=MaskedWeight(level=level, cap=1.5))
    assert judged([HIGH], config).weights_T == pytest.approx(1.5, rel=1e-15)
    assert judged([np.nextafter(HIGH, 1)], config).weights_T == 0


def test_masked_weights_have_no_lower_bound() -> None:
    made = judged([-30.0], CorrectionConfig(weight=MaskedWeight()))
    assert made.keep_T.all()
    assert made.weights_T == pytest.approx(exp(-30), rel=1e-12)


@pytest.mark.parametrize(("mean", "kept"), [(0.00995, True), (0.00996, False), (-0.01005, True), (-0.01006, False)])
def test_the_usual_geometric_mask_leaves_out_means_over_a_hundredth(mean: float, kept: bool) -> None:
    """log 1.01 = 0.009950, log 0.99 = -0.010050: the tokens may differ by more, and the sum by much more."""
    spread = [mean + 0.5, mean - 0.5] * 50
    assert judged(spread, CorrectionConfig(sequence_mask=GeometricMask())).keep_T.tolist() == [kept] * 100


def test_a_single_outlier_vetoes_its_sequence_and_no_other() -> None:
    fine, outlier = (0.5, 0.5), (0.5, 0.001)
    made = corrected([[fine, fine], [fine, outlier, fine], [fine]], CorrectionConfig(veto=OutlierVeto()))
    assert made.keep_T.tolist() == [True, True, False, False, False, True]


def test_a_weight_of_a_sequence_is_that_of_all_its_tokens() -> None:
    made = corrected(
        [[(0.6, 0.5), (0.5, 0.4)], [(0.1, 0.2)]], CorrectionConfig(weight=TruncatedWeight(level="sequence"))
    )
    assert made.weights_T == pytest.approx([1.5, 1.5, 0.5], rel=1e-12)


@pytest.mark.parametrize("config", ALONE[2:], ids=repr)
def test_that_nothing_is_kept_is_valid(config: CorrectionConfig) -> None:
    made = corrected([[(0.9, 0.001)] * 2, [(0.9, 0.001)] * 3], config)
    assert not made.keep_T.any()
    assert not made.weights_T.any()


@pytest.mark.parametrize("config", [*ALONE, CorrectionConfig()], ids=repr)
def test_no_sequences_are_valid(config: CorrectionConfig) -> None:
    made = corrected([], config)
    assert made.keep_T.shape == made.weights_T.shape == (0,)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("config", ALONE, ids=repr)
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0], ids=str)
def test_absurd_ratios_neither_overflow_nor_warn(config: CorrectionConfig, log_ratio: float) -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        made = judged([log_ratio, 0.0, log_ratio], config)
    assert np.isfinite(made.weights_T).all()
    assert made.weights_T.max() <= 2.0 + 1e-12


@pytest.mark.parametrize("wrong", [np.nan, -np.inf, np.inf], ids=str)
@pytest.mark.parametrize("engine", ["learner", "sampler"])
def test_a_log_probability_that_is_missing_is_an_error_that_says_whose(engine: str, wrong: float) -> None:
    right, broken = np.array([-1.0, -2.0, -3.0]), np.array([-1.0, wrong, wrong])
    given_T = (broken, right) if engine == "learner" else (right, broken)
    with pytest.raises(ValueError, match=rf"2 of 3 from the {engine} .*\(the first: {wrong}\)"):
        correct(*given_T, np.array([3]), CorrectionConfig(veto=OutlierVeto()))


def test_a_missing_log_probability_is_an_error_without_rules_too() -> None:
    with pytest.raises(ValueError, match="not finite"):
        correct(np.array([np.nan]), np.array([-1.0]), np.array([1]), CorrectionConfig())


def test_tokens_whose_weight_the_cap_lowered_are_marked_for_truncated_weights_alone() -> None:
    old, sampler = np.log([0.5, 0.5, 0.5]), np.log([0.5, 0.2, 0.25])  # ratios 1, 2.5, 2
    token = correct(old, sampler, np.array([3]), CorrectionConfig(weight=TruncatedWeight(cap=2.1)))
    assert token.capped_T is not None
    assert token.capped_T.tolist() == [False, True, False]
    sequence = correct(old, sampler, np.array([1, 2]), CorrectionConfig(weight=TruncatedWeight(level="sequence")))
    assert sequence.capped_T is not None
    assert sequence.capped_T.tolist() == [False, True, True]  # 2.5 x 2 is over the cap of 2
    assert correct(old, sampler, np.array([3]), CorrectionConfig(weight=MaskedWeight())).capped_T is None
