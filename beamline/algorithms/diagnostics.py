"""What the tokens of a step's updates tell, the same for every loss. Figures are defined in ``docs/metrics.md``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.ratios import LOG_RATIO_LIMIT

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Compared:
    """The T tokens of B sequences whose log-probability sampler and learner both computed, before any was left out.

    ``tokens_B`` says how many each sequence has, one at least. With a correction, the other fields are those of
    :class:`~beamline.algorithms.correction.Correction`.
    """

    sampler_logprobs: Floats
    old_logprobs: Floats
    tokens_B: NDArray[np.int64]
    masked: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    kept: NDArray[np.bool_] | None = None
    weights: NDArray[np.float64] | None = None
    capped: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Learned:
    """The T tokens that updates learned from, as each update found them.

    ``clipped`` is that of :class:`~beamline.algorithms.losses.TokenLosses`; ``position`` is where in its response a
    token stands, from 0 to below 1; ``reference_kl`` is there where the loss has a KL part.
    """

    logprobs: Floats
    anchor_logprobs: Floats
    entropy: Floats
    clipped: NDArray[np.int8]
    position: Floats
    reference_kl: Floats | None = None


def mismatch_statistics(compared: Compared, limit: int) -> dict[str, float]:
    """The ``mismatch/`` and ``correction/`` metrics; ``limit`` is the most tokens that a response may have.

    With ``rho = pi_old / mu`` and tokens drawn from mu, k1 and k3 estimate KL(mu || pi_old) (Schulman, Approximating KL
    divergence, 2020), chi2 the chi-squared divergence of pi_old from mu, which is the variance of the weights rho, and
    the effective sample share is Kish's (Survey sampling, 1965).
    """
    old, sampler = compared.old_logprobs.astype(np.float64), compared.sampler_logprobs.astype(np.float64)
    log_ratio = old - sampler
    ratio, size = _exp(log_ratio), np.abs(log_ratio)
    sequence = np.repeat(np.arange(len(compared.tokens_B)), compared.tokens_B)
    sums = np.bincount(sequence, weights=log_ratio).astype(np.float64)
    median, p99 = np.quantile(size, [0.5, 0.99])
    metrics = {
        "mismatch/logprob_abs_diff_mean": size.mean(),
        "mismatch/logprob_abs_diff_std": size.std(),
        "mismatch/logprob_abs_diff_p50": median,
        "mismatch/logprob_abs_diff_p99": p99,
        "mismatch/logprob_abs_diff_max": size.max(),
        "mismatch/ratio_mean": ratio.mean(),
        "mismatch/kl_k1": (sampler - old).mean(),
        "mismatch/kl_k3": (np.expm1(_held(log_ratio)) - log_ratio).mean(),
        "mismatch/log_perplexity_abs_diff": np.abs(sums / compared.tokens_B).mean(),
        "mismatch/perplexity_ratio": _exp(-sums / compared.tokens_B).mean(),
        "mismatch/chi2_token": (ratio**2).mean() - 1,
        "mismatch/chi2_sequence": (_exp(sums) ** 2).mean() - 1,
        "mismatch/effective_sample_share": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
    }
    pearson = _pearson(np.exp(old), np.exp(sampler))
    if pearson is not None:
        metrics["mismatch/probability_pearson"] = pearson
    metrics |= _correction_statistics(compared, compared.tokens_B[sequence] / limit)
    return {name: float(value) for name, value in metrics.items()}


def _held(log_ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is exponentiated, so that every figure is finite."""
    return np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _exp(log_ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    ratio: NDArray[np.float64] = np.exp(_held(log_ratio))
    return ratio


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """The correlation, None where either does not vary."""
    if x.min() == x.max() or y.min() == y.max():
        return None
    dx, dy = x - x.mean(), y - y.mean()
    dx, dy = dx / np.abs(dx).max(), dy / np.abs(dy).max()  # so that no square is too small for a float
    return float((dx * dy).sum() / np.sqrt((dx**2).sum() * (dy**2).sum()))


def _correction_statistics(compared: Compared, length: NDArray[np.float64]) -> dict[str, float]:
    """Shares of the compared tokens that each rule leaves out, and of those kept by the length of their response."""
    if compared.kept is None or compared.weights is None:
        return {}
    metrics = {f"correction/dropped_share_{rule}": float(masked.mean()) for rule, masked in compared.masked.items()}
    metrics["correction/kept_share"] = float(compared.kept.mean())
    for quarter, inside in _quarters(length):
        if inside.any():
            metrics[f"correction/kept_share_length_q{quarter}"] = float(compared.kept[inside].mean())
    if compared.capped is not None:
        metrics["correction/capped_share"] = float(compared.capped.mean())
    if compared.kept.any():
        weights = compared.weights[compared.kept]
        metrics |= {"correction/weight_mean": float(weights.mean()), "correction/weight_max": float(weights.max())}
    return metrics


def policy_statistics(learned: Learned) -> dict[str, float]:
    """The ``policy/`` metrics that are means over tokens."""
    entropy = learned.entropy.astype(np.float64)
    metrics = {
        "policy/entropy": entropy.mean(),
        "policy/clip_share_low": (learned.clipped < 0).mean(),
        "policy/clip_share_high": (learned.clipped > 0).mean(),
        "policy/kl_old": (learned.anchor_logprobs.astype(np.float64) - learned.logprobs).mean(),
    }
    for quarter, inside in _quarters(learned.position):
        if inside.any():
            metrics[f"policy/entropy_position_q{quarter}"] = entropy[inside].mean()
    if learned.reference_kl is not None:
        metrics["policy/kl_reference"] = learned.reference_kl.mean(dtype=np.float64)
    return {name: float(value) for name, value in metrics.items()}


def _quarters(share: NDArray[np.floating]) -> list[tuple[int, NDArray[np.bool_]]]:
    """Which of some shares of a whole lie in its first, second, third and last quarter."""
    quarter = np.clip((share * 4).astype(np.int64), 0, 3)
    return [(q + 1, quarter == q) for q in range(4)]


Seen = TypeVar("Seen", Compared, Learned)


def joined(parts: Sequence[Seen]) -> Seen:
    """The tokens of several micro-batches or updates as one."""
    kind = type(parts[0])
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(kind)):
        columns = [getattr(part, name) for part in parts]
        if isinstance(columns[0], Mapping):
            values[name] = {key: np.concatenate([column[key] for column in columns]) for key in columns[0]}
        else:
            values[name] = None if columns[0] is None else np.concatenate(columns)
    return kind(**values)
