"""A run folder as a training run leaves it, made up in milliseconds: arithmetic learned over some steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from beamline.algorithms.evaluation import ProblemResult
from beamline.config.schema import RunConfig
from beamline.report import MetricsWriter, RolloutRow, evaluation_folder, rollouts_path, write_rollouts
from beamline.report.problems import write_problems

PROBLEMS, SAMPLES, EVALUATED = 32, 8, 256


def write_fake_run(run: Path, steps: int = 50, evaluate_every: int = 5, dump_every: int = 1) -> Path:
    """Write configuration, metrics and rollout dumps of a run of ``steps`` steps; always the same bytes."""
    rng = np.random.default_rng(7)
    run.mkdir(parents=True, exist_ok=True)
    config = RunConfig(name=run.name, output=run, steps=max(steps, 1)).model_dump(mode="json")
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    writer = MetricsWriter(run / "metrics.jsonl")
    if evaluate_every:
        writer.append(
            {"step": 0, "weights_version": 0, "timing/step": 5.1, "timing/evaluation": 5.0} | _evaluation(0.0)
        )
    for step in range(1, steps + 1):
        progress = step / steps
        line = _training(rng, step, progress)
        if evaluate_every and (step % evaluate_every == 0 or step == steps):
            line |= _evaluation(progress) | {"timing/evaluation": 4.6}
            write_fake_problems(run, step, right=round(SAMPLES * _skill(progress)))
        writer.append(line | {"timing/step": sum(v for k, v in line.items() if _is_phase(k)) + 0.15})
        if dump_every and step % dump_every == 0:
            write_rollouts(rollouts_path(run, step), _rows(rng, step, _skill(progress)))
    return run


def write_fake_problems(run: Path, step: int, right: int, problems: int = 30, **changes: Any) -> None:
    """The results of an evaluation set in which each problem has ``right`` right answers, or a few less."""
    folder = evaluation_folder(run, step)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        ProblemResult(
            problem=f"p{n}",
            question=f"What is {n} + {n}?",
            answer=f"{2 * n}",
            graded=SAMPLES,
            ungraded=0,
            right=max(right - n % 3, 0),
            truncated=n % 2,
            tokens_mean=50.0 + n,
            majority_answer=f"{2 * n}" if n % 3 else None,
            majority=float(n % 3 > 0),
        )
        for n in range(problems)
    ]
    write_problems(folder, "arithmetic", [replace(row, **changes) for row in rows])


def fake_row(sample: int, response: str = "<|channel|>final<|message|>5<|return|>", reward: float = 1.0) -> RolloutRow:
    """A right answer to one problem; the response is anything a test wants to see carried through."""
    return {
        "step": 3,
        "problem": "p",
        "sample": sample,
        "attempt": 0,
        "question": "2 + 3?",
        "answer": "5",
        "response": response,
        "parsed": "5",
        "correct": True,
        "reward": reward,
        "parts": {"answer": reward},
        "status": "graded",
        "finish": "stop",
        "tokens": 4,
        "logprob_mean": -0.1,
    }


def _skill(progress: float) -> float:
    """Accuracy over the run: 0.38 at the start, 0.85 at the end, steepest before the middle."""
    return 0.38 + 0.47 * (1 - math.exp(-3.2 * progress)) / (1 - math.exp(-3.2))


def _evaluation(progress: float) -> dict[str, float]:
    line: dict[str, float] = {}
    for name, problems, shift in (("arithmetic", EVALUATED, 0.0), ("arithmetic-hard", 40, -0.27)):
        mean = _skill(progress) + shift + 0.02 * math.sin(17 * progress + problems)
        half = 1.96 * math.sqrt(mean * (1 - mean) / problems) * 0.8
        line |= {
            f"eval/{name}/avg@8": mean,
            f"eval/{name}/avg@8_low": max(0.0, mean - half),
            f"eval/{name}/avg@8_high": min(1.0, mean + half),
            f"eval/{name}/pass@8": 1 - (1 - mean) ** 3,
            f"eval/{name}/maj@8": mean,
            f"eval/{name}/response_tokens_mean": 46 - 9 * progress,
            f"eval/{name}/truncated_share": 0.04 * (1 - progress),
            f"eval/{name}/ungraded": 0,
        }
    return line


def _training(rng: np.random.Generator, step: int, progress: float) -> dict[str, float]:
    samples = PROBLEMS * SAMPLES
    accuracy = float(rng.binomial(samples, _skill(progress)) / samples)
    tokens = 46 - 9 * progress + rng.normal(0, 0.8)
    seconds = 2.4 * tokens / 40 + rng.normal(0, 0.08)
    return {
        "step": step,
        "weights_version": step,
        "train/reward_mean": 2 * accuracy - 1,
        "train/reward_std": 2 * math.sqrt(accuracy * (1 - accuracy)),
        "train/accuracy": accuracy,
        "train/graded": samples - (step == 17),
        "train/ungraded": int(step == 17),
        "train/response_tokens_mean": tokens,
        "train/response_tokens_max": min(96, round(84 - 20 * progress + rng.normal(0, 6))),
        "train/truncated_share": max(0.0, 0.05 * (1 - progress) + rng.normal(0, 0.008)),
        "train/well_formed_share": 0.93 + 0.06 * progress,
        "train/groups_without_signal": int(rng.binomial(PROBLEMS, 0.05 + 0.4 * progress)),
        "train/overlong_penalty_mean": 0.0,
        "train/tokens": round(samples * tokens),
        "mismatch/logprob_abs_diff_mean": float(2.1e-7 * math.exp(rng.normal(0, 0.15))),
        "mismatch/logprob_abs_diff_p99": float(1.5e-6 * math.exp(rng.normal(0, 0.2))),
        "mismatch/logprob_abs_diff_max": float(6e-6 * math.exp(rng.normal(0, 0.5))),
        "mismatch/ratio_mean": 1.0,
        "correction/dropped_share_sequence_mask": 0.02 + 0.05 * progress,
        "correction/kept_share": 0.98 - 0.05 * progress,
        "correction/kept_share_length_q4": 0.95 - 0.2 * progress,
        **{f"policy/entropy_position_q{n}": (0.3 + 0.1 * n) * math.exp(-1.6 * progress) + 0.08 for n in range(1, 5)},
        "policy/entropy": 0.52 * math.exp(-1.6 * progress) + 0.08 + float(rng.normal(0, 0.008)),
        "policy/loss": float(rng.normal(0, 0.01)),
        "policy/grad_norm": 0.35 + 0.3 * math.exp(-4 * progress) + float(abs(rng.normal(0, 0.05))),
        "policy/lr": 1e-4,
        "policy/clip_share_low": float(abs(rng.normal(0.0016, 0.0006))),
        "policy/clip_share_high": float(abs(rng.normal(0.0031, 0.0009))),
        "policy/kl_old": float(abs(rng.normal(4e-4, 1e-4))),
        "policy/updates": step,
        "policy/skipped_updates": 0,
        "timing/sampling": float(seconds),
        "timing/grading": 0.04,
        "timing/old_logprobs": 0.5 + float(abs(rng.normal(0, 0.03))),
        "timing/update": 1.55 + float(abs(rng.normal(0, 0.08))),
        "timing/transfer": 0.06,
        **({"timing/checkpoint": 0.7, "timing/report": 0.4} if step % 10 == 1 and step > 1 else {}),
        "timing/sampling_tokens_per_s": float(samples * tokens / seconds),
        "timing/training_tokens_per_s": float(samples * tokens / 1.55),
        "memory/peak_bytes": 1.9e9 + 1e6 * step,
    }


def _is_phase(key: str) -> bool:
    return key.startswith("timing/") and not key.endswith("_per_s")


def _rows(rng: np.random.Generator, step: int, skill: float) -> list[RolloutRow]:
    return [_row(rng, step, problem, sample, skill) for problem in range(PROBLEMS) for sample in range(SAMPLES)]


def _row(rng: np.random.Generator, step: int, problem: int, sample: int, skill: float) -> RolloutRow:
    terms = [12 + problem, 47, 90 - problem]
    total = sum(terms)
    correct, truncated = bool(rng.random() < skill), bool(rng.random() < 0.05)
    parsed = None if truncated else str(total if correct else total + int(rng.integers(1, 12)))
    first = terms[0] + terms[1]
    response = f"<|channel|>analysis<|message|>{terms[0]} + {terms[1]} = {first}\n{first} + {terms[2]} = {parsed or ''}"
    if not truncated:
        response += f"<|end|><|start|>assistant<|channel|>final<|message|>{parsed}<|return|>"
    correct = correct and not truncated
    return {
        "step": step,
        "problem": f"arithmetic-{problem:04d}",
        "sample": sample,
        "attempt": 0,
        "question": f"What is {' + '.join(map(str, terms))}?",
        "answer": str(total),
        "response": response,
        "parsed": parsed,
        "correct": correct,
        "reward": 1.0 if correct else -1.0,
        "parts": {"answer": 1.0 if correct else -1.0, "overlong": 0.0},
        "status": "graded",
        "finish": "length" if truncated else "stop",
        "tokens": 96 if truncated else int(rng.integers(24, 60)),
        "logprob_mean": -0.21,
    }
