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
    "train/kl_penalty_mean",
    "train/tokens",
    "train/tokens_unjudged",
    "train/sampling_rounds",
    "train/groups_left_out",
    "train/groups_missing",
    "rollout/engine_restarts",
    "rollout/requests_reissued",
    "mismatch/logprob_abs_diff_mean",
    "mismatch/logprob_abs_diff_std",
    "mismatch/logprob_abs_diff_p50",
    "mismatch/logprob_abs_diff_p99",
    "mismatch/logprob_abs_diff_max",
    "mismatch/ratio_mean",
    "mismatch/kl_k1",
    "mismatch/kl_k3",
    "mismatch/log_perplexity_abs_diff",
    "mismatch/perplexity_ratio",
    "mismatch/chi2_token",
    "mismatch/chi2_sequence",
    "mismatch/effective_sample_share",
    "mismatch/probability_pearson",
    "correction/dropped_share_veto",
    "correction/dropped_share_sequence_mask",
    "correction/dropped_share_weight",
    "correction/capped_share",
    "correction/kept_share",
    "correction/kept_share_length_q<n>",
    "correction/weight_mean",
    "correction/weight_max",
    "policy/counted_tokens",
    "policy/kept_tokens",
    "policy/entropy",
    "policy/entropy_position_q<n>",
    "policy/loss",
    "policy/grad_norm",
    "policy/lr",
    "policy/clip_share_low",
    "policy/clip_share_high",
    "policy/kl_old",
    "policy/kl_reference",
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
"""Places: ``<set>`` is the name of an evaluation set, ``<k>`` its samples a problem, ``<n>`` a quarter from 1 to 4."""

_PATTERN = re.compile(
    "|".join(
        re.escape(name).replace("<set>", "[^/]+").replace("<k>", r"[1-9]\d*").replace("<n>", "[1-4]")
        for name in METRICS
    )
)


def is_metric(name: str) -> bool:
    """Whether ``name`` is one of :data:`METRICS`, with its places filled."""
    return _PATTERN.fullmatch(name) is not None
