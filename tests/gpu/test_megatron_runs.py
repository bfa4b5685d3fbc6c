"""Whole runs from the command line: Megatron-Core trains, vLLM samples."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

STEPS = 30
SETTINGS = (
    "learner=megatron",
    "rollout=vllm",
    "rollout.vllm.memory_share=0.1",
    "rollout.vllm.engine_args.enforce_eager=true",  # which starts in half the time
    "evaluation.before_training=false",
    "evaluation.every=0",
    "checkpoint.every=10",
    f"steps={STEPS}",
)


def trained(output: Path, *settings: str, processes: int = 1) -> list[dict[str, float]]:
    """The metrics of a run of the quickstart."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = ["-m", "beamline", "train", "recipes/quickstart.yaml", f"output={output}", *SETTINGS, *settings]
    done = subprocess.run([sys.executable, *launcher, *command], capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def learned(lines: list[dict[str, float]]) -> tuple[float, float]:
    """Mean reward of the first and the last five steps."""
    rewards = [line["train/reward_mean"] for line in lines if line["step"]]
    return float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_quickstart_learns(dtype: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    lines = trained(tmp_path / "run", f"policy.dtype={dtype}")
    before, after = learned(lines)
    record_property(f"{dtype}: mean reward of the first and last 5 of {STEPS} steps", [before, after])
    mismatch = [line["mismatch/logprob_abs_diff_mean"] for line in lines if line["step"]]
    record_property(f"{dtype}: mean |delta log p| of sampler and learner", float(np.mean(mismatch)))
    assert after > before + 0.1
    assert max(mismatch) < 0.02


def test_two_ranks_on_two_gpus_learn_too(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    before, after = learned(trained(tmp_path / "run", "learner.parallel.tp=2", processes=2))
    record_property(f"two ranks: mean reward of the first and last 5 of {STEPS} steps", [before, after])
    assert after > before + 0.1
