"""Every figure of a step's tokens against its definition, with loops over tokens and sequences."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import exp, isfinite, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.diagnostics import Compared, Learned, joined, mismatch_statistics, policy_statistics

LIMIT = 8
Figures = dict[str, float]
SEEDS, COUNTS = st.integers(0, 10_000), st.lists(st.integers(1, LIMIT), min_size=1, max_size=6)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def held(log_ratio: float) -> float:
    return max(-20.0, min(20.0, log_ratio))


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest of the sorted values."""
    ordered, place = sorted(values), q * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def mismatch_by_hand(compared: Compared) -> Figures:
    old, sampler = compared.old_logprobs.tolist(), compared.sampler_logprobs.tolist()
    logs = [o - s for o, s in zip(old, sampler, strict=True)]
    rho = [exp(held(d)) for d in logs]
    size = [abs(d) for d in logs]
    by_sequence = [logs[a:b] for a, b in pairwise(np.cumsum([0, *compared.tokens_B]))]
    figures = {
        "mismatch/logprob_abs_diff_mean": mean(size),
        "mismatch/logprob_abs_diff_std": sqrt(mean([(x - mean(size)) ** 2 for x in size])),
        "mismatch/logprob_abs_diff_p50": quantile(size, 0.5),
        "mismatch/logprob_abs_diff_p99": quantile(size, 0.99),
        "mismatch/logprob_abs_diff_max": max(size),
        "mismatch/ratio_mean": mean(rho),
        "mismatch/kl_k1": mean([s - o for o, s in zip(old, sampler, strict=True)]),
        "mismatch/kl_k3": mean([r - 1 - d for r, d in zip(rho, logs, strict=True)]),
        "mismatch/perplexity_ratio": mean([exp(held(-mean(part))) for part in by_sequence]),
        "mismatch/chi2_token": mean([r**2 for r in rho]) - 1,
        "mismatch/chi2_sequence": mean([exp(held(sum(part))) ** 2 for part in by_sequence]) - 1,
        "mismatch/log_perplexity_abs_diff": mean([abs(mean(part)) for part in by_sequence]),
        "mismatch/effective_sample_share": sum(rho) ** 2 / (len(rho) * sum(r**2 for r in rho)),
    }
    x, y = [exp(o) for o in old], [exp(s) for s in sampler]
    if len(set(x)) > 1 and len(set(y)) > 1:
        covariance = sum((a - mean(x)) * (b - mean(y)) for a, b in zip(x, y, strict=True))
        scale = sqrt(sum((a - mean(x)) ** 2 for a in x)) * sqrt(sum((b - mean(y)) ** 2 for b in y))
        figures["mismatch/probability_pearson"] = covariance / scale
    return figures


def correction_by_hand(compared: Compared, limit: int) -> Figures:
    assert compared.kept is not None
    assert compared.weights is not None
    kept, tokens = compared.kept.tolist(), len(compared.kept)
    figures = {f"correction/dropped_share_{rule}": sum(row.tolist()) / tokens for rule, row in compared.masked.items()}
    figures["correction/kept_share"] = sum(kept) / tokens
    of_quarter: dict[int, list[bool]] = {}
    for a, b in pairwise(np.cumsum([0, *compared.tokens_B])):
        quarter = min(4 * (b - a) // limit + 1, 4)
        of_quarter.setdefault(quarter, []).extend(kept[a:b])
    for quarter, flags in of_quarter.items():
        figures[f"correction/kept_share_length_q{quarter}"] = sum(flags) / len(flags)
    weights = [w for w, k in zip(compared.weights.tolist(), kept, strict=True) if k]
    if weights:
        figures["correction/weight_mean"] = mean(weights)
        figures["correction/weight_max"] = max(weights)
    return figures


def policy_by_hand(learned: Learned) -> Figures:
    logprobs, anchor = learned.logprobs.tolist(), learned.anchor_logprobs.tolist()
    entropy, clipped = learned.entropy.tolist(), learned.clipped.tolist()
    figures = {
        "policy/entropy": mean(entropy),
        "policy/clip_share_low": mean([c == -1 for c in clipped]),
        "policy/clip_share_high": mean([c == 1 for c in clipped]),
        "policy/kl_old": mean([a - p for a, p in zip(anchor, logprobs, strict=True)]),
    }
    for quarter, (low, high) in enumerate(((0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)), start=1):
        inside = [h for h, p in zip(entropy, learned.position.tolist(), strict=True) if low <= p < high]
        if inside:
            figures[f"policy/entropy_position_q{quarter}"] = mean(inside)
    if learned.reference_kl is not None:
        figures["policy/kl_reference"] = mean(learned.reference_kl.tolist())
    return figures


def compared_tokens(counts: Sequence[int], seed: int, spread: float = 0.3, corrected: bool = True) -> Compared:
    random, tokens = np.random.default_rng(seed), sum(counts)
    sampler = -random.exponential(1.0, tokens).astype(np.float32)
    old = (sampler + random.normal(0.0, spread, tokens)).astype(np.float32)
    plain = Compared(sampler, old, np.array(counts, dtype=np.int64))
    if not corrected:
        return plain
    masked = {"veto": random.random(tokens) < 0.2, "weight": random.random(tokens) < 0.3}
    kept = ~(masked["veto"] | masked["weight"])
    return replace(plain, masked=masked, kept=kept, weights=np.where(kept, random.random(tokens) * 2, 0.0))


def learned_tokens(tokens: int, seed: int, reference: bool = True) -> Learned:
    random = np.random.default_rng(seed)
    return Learned(
        logprobs=-random.exponential(1.0, tokens).astype(np.float32),
        anchor_logprobs=-random.exponential(1.0, tokens).astype(np.float32),
        entropy=random.exponential(1.0, tokens).astype(np.float32),
        clipped=random.integers(-1, 2, tokens).astype(np.int8),
        position=random.random(tokens).astype(np.float32),
        reference_kl=random.normal(0.0, 1.0, tokens).astype(np.float32) if reference else None,
    )


def same(made: Figures, expected: Figures, rel: float = 1e-12) -> None:
    assert made == pytest.approx(expected, rel=rel, abs=1e-12)


@pytest.mark.parametrize("spread", [0.01, 0.3, 15.0])
@given(counts=COUNTS, seed=SEEDS)
def test_figures_of_the_mismatch_are_their_definitions(spread: float, counts: list[int], seed: int) -> None:
    """The largest spread takes ratios of tokens and of sequences to where they are held."""
    compared = compared_tokens(counts, seed, spread, corrected=False)
    same(mismatch_statistics(compared, LIMIT), mismatch_by_hand(compared), rel=1e-11)


@given(counts=COUNTS, seed=SEEDS)
def test_figures_of_the_correction_are_their_definitions(counts: list[int], seed: int) -> None:
    compared = compared_tokens(counts, seed)
    expected = mismatch_by_hand(compared) | correction_by_hand(compared, LIMIT)
    same(mismatch_statistics(compared, LIMIT), expected, rel=1e-11)


@given(tokens=st.integers(1, 30), seed=SEEDS, reference=st.booleans())
def test_figures_of_the_policy_are_their_definitions(tokens: int, seed: int, reference: bool) -> None:
    learned = learned_tokens(tokens, seed, reference)
    same(policy_statistics(learned), policy_by_hand(learned))


def test_percentiles_lie_between_the_two_nearest_tokens() -> None:
    differences = np.arange(101, dtype=np.float32) / 128  # 0 to 100 hundred-and-twenty-eighths, exact
    compared = Compared(np.zeros(101, dtype=np.float32), -differences[::-1].copy(), np.array([101]))
    figures = mismatch_statistics(compared, 200)
    assert figures["mismatch/logprob_abs_diff_p50"] == 50 / 128
    assert figures["mismatch/logprob_abs_diff_p99"] == 99 / 128
    two = Compared(np.zeros(2, dtype=np.float32), np.array([-1.0, -2.0], dtype=np.float32), np.array([2]))
    assert mismatch_statistics(two, 200)["mismatch/logprob_abs_diff_p99"] == pytest.approx(1.99, rel=1e-12)


def test_engines_that_agree_have_exact_figures() -> None:
    logprobs = -np.random.default_rng(0).exponential(1.0, 12).astype(np.float32)
    figures = mismatch_statistics(Compared(logprobs, logprobs.copy(), np.array([5, 7])), LIMIT)
    ones = {"ratio_mean", "perplexity_ratio", "effective_sample_share", "probability_pearson"}
    assert {name: repr(value) for name, value in figures.items()} == {
        name: "1.0" if name.removeprefix("mismatch/") in ones else "0.0" for name in figures
    }
    assert len(figures) == 14


def test_a_policy_that_has_not_moved_has_a_divergence_of_exactly_zero() -> None:
    learned = learned_tokens(9, seed=0)
    still = replace(learned, anchor_logprobs=learned.logprobs.copy())
    assert repr(policy_statistics(still)["policy/kl_old"]) == "0.0"


@pytest.mark.parametrize("constant", ["sampler_logprobs", "old_logprobs"])
def test_a_correlation_is_absent_where_one_side_does_not_vary(constant: str) -> None:
    """Not even by rounding: the mean of three times 0.1 is not 0.1."""
    compared = compared_tokens([3], seed=0, corrected=False)
    still = replace(compared, **{constant: np.full(3, np.log(0.1), dtype=np.float32)})
    assert "mismatch/probability_pearson" in mismatch_statistics(compared, LIMIT)
    assert "mismatch/probability_pearson" not in mismatch_statistics(still, LIMIT)


@pytest.mark.parametrize(("a", "b", "expected"), [(1.0, 0.0, 1.0), (-1.0, 1.0, -1.0)])
def test_a_correlation_is_that_of_probabilities(a: float, b: float, expected: float) -> None:
    """y = a x + b of the probabilities, not of their logarithms, is a correlation of 1 or -1."""
    x = np.array([0.1, 0.3, 0.35, 0.8])
    logs = [np.log(values).astype(np.float32) for values in (x, 0.5 * (a * x + b))]
    figures = mismatch_statistics(Compared(logs[0], logs[1], np.array([4])), LIMIT)
    assert figures["mismatch/probability_pearson"] == pytest.approx(expected, abs=1e-6)


def test_a_correlation_of_the_least_likely_tokens_is_no_quotient_of_zeros() -> None:
    logprobs = np.array([-500, -501, -503], dtype=np.float32)
    figures = mismatch_statistics(Compared(logprobs, logprobs.copy(), np.array([3])), LIMIT)
    assert figures["mismatch/probability_pearson"] == 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("far", [500.0, -500.0])
@given(counts=COUNTS, seed=SEEDS)
def test_figures_are_finite_however_far_the_engines_are_apart(far: float, counts: list[int], seed: int) -> None:
    compared = compared_tokens(counts, seed)
    shifted = compared.old_logprobs + np.float32(far)
    shifted[::2] = compared.sampler_logprobs[::2] - np.float32(far)
    figures = mismatch_statistics(replace(compared, old_logprobs=shifted), LIMIT)
    assert all(map(isfinite, figures.values()))


def test_a_divergence_that_is_far_is_not_held_near() -> None:
    """A token whose probability is nearly lost costs its whole log-ratio, in k3 as in k1."""
    compared = Compared(np.zeros(1, dtype=np.float32), np.full(1, -500, dtype=np.float32), np.array([1]))
    figures = mismatch_statistics(compared, LIMIT)
    assert figures["mismatch/kl_k1"] == 500
    assert figures["mismatch/kl_k3"] == pytest.approx(499, abs=1e-8)


@given(counts=COUNTS, seed=SEEDS)
def test_the_two_estimates_of_the_mismatch_share_an_identity(counts: list[int], seed: int) -> None:
    """k3 = (mean rho - 1) + k1, and the effective share is (mean rho)^2 / (1 + chi2)."""
    f = mismatch_statistics(compared_tokens(counts, seed, corrected=False), LIMIT)
    assert f["mismatch/kl_k3"] == pytest.approx(f["mismatch/ratio_mean"] - 1 + f["mismatch/kl_k1"], abs=1e-12)
    share = f["mismatch/ratio_mean"] ** 2 / (1 + f["mismatch/chi2_token"])
    assert f["mismatch/effective_sample_share"] == pytest.approx(share, rel=1e-12)


def kept_by_length(length: int) -> set[str]:
    compared = compared_tokens([length], seed=0)
    return {name for name in mismatch_statistics(compared, 400) if "length" in name}


@pytest.mark.parametrize(
    ("length", "quarter"), [(1, 1), (99, 1), (100, 2), (199, 2), (200, 3), (299, 3), (300, 4), (399, 4), (400, 4)]
)
def test_a_response_is_in_one_quarter_of_the_limit_and_borders_are_in_the_upper(length: int, quarter: int) -> None:
    assert kept_by_length(length) == {f"correction/kept_share_length_q{quarter}"}


@pytest.mark.parametrize("tokens", [4, 12, 400, 131_072])
def test_positions_of_a_response_fall_into_quarters_of_equal_size(tokens: int) -> None:
    position = np.arange(tokens, dtype=np.float32) / np.float32(tokens)
    learned = replace(
        learned_tokens(tokens, seed=0),
        position=position,
        entropy=np.repeat([1, 2, 3, 4], tokens // 4).astype(np.float32),
    )
    figures = policy_statistics(learned)
    assert [figures[f"policy/entropy_position_q{q}"] for q in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_quarters_without_tokens_are_absent() -> None:
    learned = replace(learned_tokens(2, seed=0), position=np.array([0.0, 0.6], dtype=np.float32))
    names = {name for name in policy_statistics(learned) if "position" in name}
    assert names == {"policy/entropy_position_q1", "policy/entropy_position_q3"}


def test_without_a_kept_token_there_are_no_weights_to_tell_of() -> None:
    compared = compared_tokens([3, 2], seed=0)
    figures = mismatch_statistics(replace(compared, kept=np.zeros(5, dtype=bool), weights=np.zeros(5)), LIMIT)
    assert figures["correction/kept_share"] == 0
    assert not [name for name in figures if name.startswith("correction/weight_m")]


def test_weights_are_those_of_kept_tokens_alone() -> None:
    compared = replace(
        compared_tokens([3], seed=0), kept=np.array([True, False, True]), weights=np.array([0.5, 0.0, 1.5])
    )
    figures = mismatch_statistics(compared, LIMIT)
    assert (figures["correction/weight_mean"], figures["correction/weight_max"]) == (1.0, 1.5)


def test_without_a_correction_nothing_is_said_of_one() -> None:
    figures = mismatch_statistics(compared_tokens([3, 2], seed=0, corrected=False), LIMIT)
    assert not [name for name in figures if name.startswith("correction/")]


# Updates together, and tokens in another order.


def columns(tokens: Compared | Learned) -> dict[str, list[float]]:
    """All values, by the name of their field or of their rule."""
    values = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    values |= values.pop("masked", {})
    return {name: column.tolist() for name, column in values.items() if column is not None}


@given(parts=st.lists(COUNTS, min_size=1, max_size=4), seed=SEEDS, corrected=st.booleans())
def test_compared_tokens_are_joined_end_to_end(parts: list[list[int]], seed: int, corrected: bool) -> None:
    updates = [compared_tokens(counts, seed + i, corrected=corrected) for i, counts in enumerate(parts)]
    expected = {name: [x for update in updates for x in columns(update)[name]] for name in columns(updates[0])}
    assert columns(joined(updates)) == expected


@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=SEEDS, reference=st.booleans())
def test_learned_tokens_are_joined_end_to_end(parts: list[int], seed: int, reference: bool) -> None:
    updates = [learned_tokens(tokens, seed + i, reference) for i, tokens in enumerate(parts)]
    expected = {name: [x for update in updates for x in columns(update)[name]] for name in columns(updates[0])}
    assert columns(joined(updates)) == expected


def test_figures_of_several_updates_weigh_tokens_and_not_updates() -> None:
    one, many = learned_tokens(1, seed=0), learned_tokens(99, seed=1)
    entropy = policy_statistics(joined([one, many]))["policy/entropy"]
    of_each = [policy_statistics(update)["policy/entropy"] for update in (one, many)]
    assert entropy == pytest.approx((of_each[0] + 99 * of_each[1]) / 100, rel=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_how_sequences_are_divided_among_updates_does_not_matter(cut: int) -> None:
    whole = compared_tokens([2, 8, 3, 5], seed=0)
    border = int(whole.tokens_B[:cut].sum())
    parts: list[Callable[[np.ndarray], np.ndarray]] = [lambda x: x[:border], lambda x: x[border:]]
    updates = [
        Compared(
            part(whole.sampler_logprobs),
            part(whole.old_logprobs),
            tokens_B,
            {rule: part(row) for rule, row in whole.masked.items()},
            None if whole.kept is None else part(whole.kept),
            None if whole.weights is None else part(whole.weights),
        )
        for part, tokens_B in zip(parts, np.split(whole.tokens_B, [cut]), strict=True)
    ]
    assert mismatch_statistics(joined(updates), LIMIT) == mismatch_statistics(whole, LIMIT)


@given(tokens=st.integers(1, 30), seed=SEEDS)
def test_the_order_of_tokens_does_not_matter_to_figures_of_the_policy(tokens: int, seed: int) -> None:
    learned, order = learned_tokens(tokens, seed), np.random.default_rng(seed).permutation(tokens)
    shuffled = Learned(**{f.name: getattr(learned, f.name)[order] for f in fields(learned)})
    same(policy_statistics(shuffled), policy_statistics(learned))


@given(counts=COUNTS, seed=SEEDS)
def test_the_order_of_tokens_in_their_sequence_does_not_matter_to_figures_of_the_mismatch(
    counts: list[int], seed: int
) -> None:
    compared, random = compared_tokens(counts, seed), np.random.default_rng(seed)
    borders = np.cumsum([0, *counts])
    order = np.concatenate([a + random.permutation(b - a) for a, b in pairwise(borders)])
    assert compared.kept is not None
    assert compared.weights is not None
    shuffled = Compared(
        compared.sampler_logprobs[order],
        compared.old_logprobs[order],
        compared.tokens_B,
        {rule: row[order] for rule, row in compared.masked.items()},
        compared.kept[order],
        compared.weights[order],
    )
    same(mismatch_statistics(shuffled, LIMIT), mismatch_statistics(compared, LIMIT), rel=1e-11)


def test_figures_are_plain_floats_that_json_can_write() -> None:
    figures = mismatch_statistics(compared_tokens([3, 2], seed=0), LIMIT) | policy_statistics(learned_tokens(5, seed=0))
    assert {type(value) for value in figures.values()} == {float}


def test_the_share_of_capped_weights_is_there_where_weights_can_be_capped() -> None:
    logprobs, everything = np.full(4, -1.0, np.float32), np.ones(4, dtype=bool)
    capped = np.array([True, False, False, False])
    compared = Compared(logprobs, logprobs, np.array([4]), {}, everything, np.ones(4), capped)
    assert mismatch_statistics(compared, LIMIT)["correction/capped_share"] == 0.25
    assert "correction/capped_share" not in mismatch_statistics(replace(compared, capped=None), LIMIT)
