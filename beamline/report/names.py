"""The name of every metric. ``docs/metrics.md`` defines them; a test keeps the two alike."""

import re

METRICS = (
    "step",
    "weights_version",
    "train/reward_mean",
    "train/reward_std",
    "train/accuracy",
    "train/graded",
    "train/ungraded",
    "train/grading_timeouts",
    "train/grading_errors",
    "train/response_tokens_mean",
    "train/response_tokens_max",
    "train/truncated_share",
    "train/well_formed_share",
    "train/groups_without_signal",
    "train/overlong_penalty_mean",
    "train/tokens",
    "mismatch/logprob_abs_diff_mean",
    "mismatch/logprob_abs_diff_max",
    "mismatch/ratio_mean",
    "policy/entropy",
    "policy/loss",
    "policy/grad_norm",
    "policy/lr",
    "policy/clip_share_low",
    "policy/clip_share_high",
    "policy/kl_old",
    "policy/updates",
    "policy/skipped_updates",
    "eval/<set>/avg@<k>",
    "eval/<set>/avg@<k>_low",
    "eval/<set>/avg@<k>_high",
    "eval/<set>/pass@<k>",
    "eval/<set>/maj@<k>",
    "eval/<set>/truncated_share",
    "eval/<set>/response_tokens_mean",
    "eval/<set>/ungraded",
    "timing/step",
    "timing/sampling",
    "timing/grading",
    "timing/old_logprobs",
    "timing/update",
    "timing/transfer",
    "timing/evaluation",
    "timing/checkpoint",
    "timing/report",
    "timing/sampling_tokens_per_s",
    "timing/training_tokens_per_s",
    "memory/peak_bytes",
)
"""``<set>`` stands for the name of an evaluation set, ``<k>`` for its samples a problem: ``eval/arithmetic/avg@8``."""

_PATTERN = re.compile(
    "|".join(re.escape(name).replace("<set>", "[^/]+").replace("<k>", r"[1-9]\d*") for name in METRICS)
)


def is_metric(name: str) -> bool:
    """Whether ``name`` is one of :data:`METRICS`, with its places filled."""
    return _PATTERN.fullmatch(name) is not None
