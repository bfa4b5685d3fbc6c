"""What an evaluation says of a model. Every figure is defined in ``docs/metrics.md``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.statistics import truncated_share
from beamline.records import Grade, Group
from beamline.records.random import stream

_RESAMPLES = 10_000
_DRAWN_AT_ONCE = 2**21  # bounds the memory of the bootstrap


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """How the samples of one problem came out.

    ``majority`` is the share of right answers among those given most often: 0 or 1, or between where they are tied.
    """

    problem: str
    question: str
    answer: str
    graded: int
    ungraded: int
    right: int
    truncated: int
    tokens_mean: float
    majority_answer: str | None
    majority: float


def problem_result(group: Group) -> ProblemResult:
    """Count the samples of a problem; what could not be graded is in no count but ``ungraded``."""
    grades = [rollout.verdict for rollout in group.rollouts if rollout.verdict is not None]
    answer, majority = _majority(grades)
    return ProblemResult(
        problem=group.problem.id,
        question=group.problem.text,
        answer=group.problem.answer,
        graded=len(grades),
        ungraded=len(group.rollouts) - len(grades),
        right=sum(grade.correct for grade in grades),
        truncated=sum(rollout.finish == "length" for rollout in group.rollouts),
        tokens_mean=float(np.mean([rollout.response_tokens for rollout in group.rollouts])),
        majority_answer=answer,
        majority=majority,
    )


def _majority(grades: Sequence[Grade]) -> tuple[str | None, float]:
    """The answer given most often and how right it is; right answers are one answer, however they are written."""
    votes: Counter[tuple[bool, str]] = Counter()
    written: dict[tuple[bool, str], str] = {}
    for grade in grades:
        if grade.parsed is not None:
            vote = (grade.correct, "" if grade.correct else grade.parsed)
            votes[vote] += 1
            written.setdefault(vote, grade.parsed)
    if not votes:
        return None, 0.0
    most = max(votes.values())
    tied = [vote for vote, number in votes.items() if number == most]
    return written[tied[0]], sum(correct for correct, _ in tied) / len(tied)


@dataclass(frozen=True, slots=True)
class SetResult:
    """What was sampled of an evaluation set, how each of its problems came out, and what that comes to."""

    groups: Sequence[Group]
    problems: Sequence[ProblemResult]
    metrics: dict[str, float]


def set_result(groups: Sequence[Group], k: int) -> SetResult:
    """Sum up an evaluation of k samples a problem.

    ``metrics`` has avg@k with its 95 % interval over problems, pass@k, maj@k, and what the responses looked like. A
    problem without any graded response has no place in a mean and is counted as ``ungraded`` with each of them.
    """
    results = [problem_result(group) for group in groups]
    return SetResult(groups, results, _metrics(groups, results, k))


def _metrics(groups: Sequence[Group], results: Sequence[ProblemResult], k: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    graded = [result for result in results if result.graded]
    metrics: dict[str, float] = {}
    if graded:
        means = np.array([result.right / result.graded for result in graded])
        metrics[f"avg@{k}"] = float(means.mean())
        if len(means) > 1:
            metrics[f"avg@{k}_low"], metrics[f"avg@{k}_high"] = interval95(means)
        metrics[f"pass@{k}"] = float(np.mean([result.right > 0 for result in graded]))
        metrics[f"maj@{k}"] = float(np.mean([result.majority for result in graded]))
    return metrics | {
        "truncated_share": truncated_share(rollouts),
        "response_tokens_mean": float(np.mean([rollout.response_tokens for rollout in rollouts])),
        "ungraded": sum(result.ungraded for result in results),
    }


def interval95(means: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean of per-problem accuracies ``[P]``, P >= 2, by bootstrap over problems.

    Responses to one problem are not independent, so problems are drawn, with all their responses (a cluster
    bootstrap): the 2.5 % and 97.5 % quantiles of the means of 10,000 draws of P problems with replacement, linear
    between two. The draws are always the same, so that equal results have equal intervals.

    Source: Efron, Bootstrap methods: another look at the jackknife, 1979 (percentile method).
    """
    problems = len(means)
    draws = stream(0, "bootstrap", problems)
    at_once = max(1, _DRAWN_AT_ONCE // problems)
    resampled = [
        means[(draws.random_raw(rows * problems) % np.uint64(problems)).astype(np.intp)].reshape(rows, -1).mean(axis=1)
        for rows in (min(at_once, _RESAMPLES - done) for done in range(0, _RESAMPLES, at_once))
    ]
    low, high = np.quantile(np.concatenate(resampled), [0.025, 0.975])
    return float(low), float(high)
