"""What is reported of a step of training. Every figure is defined in ``docs/metrics.md``."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from beamline.records import Group, Rollout


def sampling_statistics(groups: Sequence[Group]) -> dict[str, float]:
    """The ``train/`` metrics of the responses that a step sampled and judged."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    grades = [rollout.verdict for rollout in rollouts if rollout.verdict is not None]
    statuses = Counter("ungraded" if r.grade is None else r.grade.status for r in rollouts)
    tokens = np.array([rollout.response_tokens for rollout in rollouts])
    metrics = {
        "train/graded": len(grades),
        "train/ungraded": len(rollouts) - len(grades),
        "train/grading_timeouts": statuses["timeout"],
        "train/grading_errors": statuses["error"],
        "train/response_tokens_mean": float(tokens.mean()),
        "train/response_tokens_max": int(tokens.max()),
        "train/truncated_share": truncated_share(rollouts),
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
        penalties = [grade.parts["kl"] for grade in grades if "kl" in grade.parts]
        if penalties:
            metrics["train/kl_penalty_mean"] = float(np.mean(penalties))
        if len(grades) > 1:
            metrics["train/reward_std"] = float(rewards.std(ddof=1))
    return metrics


def truncated_share(rollouts: Sequence[Rollout]) -> float:
    """Share of the rollouts that were cut at the limit."""
    return float(np.mean([rollout.finish == "length" for rollout in rollouts]))
