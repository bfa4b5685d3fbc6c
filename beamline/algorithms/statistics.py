"""What is reported of a step and of an evaluation. Every figure is defined in ``docs/metrics.md``."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages import has_signal
from beamline.records import Group, Rollout

_Z95 = 1.959963984540054


def rewards_of(group: Group) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Rewards ``[n]`` of a group's rollouts, and which of them were graded."""
    grades = [rollout.grade for rollout in group.rollouts]
    graded = np.array([grade is not None and grade.status == "graded" for grade in grades])
    return np.array([0.0 if grade is None else grade.reward for grade in grades]), graded


def sampling_statistics(groups: Sequence[Group]) -> dict[str, float]:
    """The ``train/`` metrics of a step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    grades = [r.grade for r in rollouts if r.grade is not None and r.grade.status == "graded"]
    tokens = np.array([rollout.response_tokens for rollout in rollouts])
    signals = [has_signal(*rewards_of(group)) for group in groups]
    metrics = {
        "train/graded": len(grades),
        "train/ungraded": len(rollouts) - len(grades),
        "train/response_tokens_mean": float(tokens.mean()),
        "train/response_tokens_max": int(tokens.max()),
        "train/truncated_share": _truncated(rollouts),
        "train/groups_without_signal": len(groups) - sum(signals),
        "train/tokens": int(tokens.sum()),
    }
    if grades:
        rewards = np.array([grade.reward for grade in grades])
        metrics |= {
            "train/reward_mean": float(rewards.mean()),
            "train/accuracy": float(np.mean([grade.correct for grade in grades])),
            "train/well_formed_share": float(np.mean([grade.well_formed for grade in grades])),
            "train/overlong_penalty_mean": float(np.mean([grade.parts.get("overlong", 0.0) for grade in grades])),
        }
        if len(grades) > 1:
            metrics["train/reward_std"] = float(rewards.std(ddof=1))
    return metrics


def evaluation_statistics(groups: Sequence[Group], k: int) -> dict[str, float]:
    """avg@k with its 95 % interval over problems, pass@k, and what the responses looked like.

    A problem without any graded response has no place in a mean and is counted as ``ungraded`` with each of them.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    per_problem = [problem for group in groups if len(problem := _correct(group))]
    metrics = {
        "response_tokens_mean": float(np.mean([rollout.response_tokens for rollout in rollouts])),
        "truncated_share": _truncated(rollouts),
        "ungraded": len(rollouts) - sum(len(problem) for problem in per_problem),
    }
    if per_problem:
        means = np.array([problem.mean() for problem in per_problem])
        metrics |= {
            f"avg@{k}": float(means.mean()),
            f"pass@{k}": float(np.mean([problem.any() for problem in per_problem])),
        }
        if len(means) > 1:
            metrics[f"avg@{k}_low"], metrics[f"avg@{k}_high"] = interval95(means)
    return metrics


def interval95(means: NDArray[np.float64]) -> tuple[float, float]:
    """Normal 95 % interval of the mean of per-problem accuracies, clipped to [0, 1].

    Responses to one problem are not independent, so problems are the unit: ``mean +- 1.96 s / sqrt(P)`` with
    the unbiased standard deviation s of P >= 2 problems.
    """
    center, half = float(means.mean()), _Z95 * float(means.std(ddof=1)) / len(means) ** 0.5
    return max(0.0, center - half), min(1.0, center + half)


def _correct(group: Group) -> NDArray[np.bool_]:
    grades = [rollout.grade for rollout in group.rollouts]
    return np.array([g.correct for g in grades if g is not None and g.status == "graded"], dtype=bool)


def _truncated(rollouts: Sequence[Rollout]) -> float:
    return float(np.mean([rollout.finish == "length" for rollout in rollouts]))
