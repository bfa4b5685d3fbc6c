"""Runs that replay routes: resumed to the byte under adapters, refused on another base, nearer to their sampler."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beamline.checkpoint import ShardReader
from beamline.records import Completion
from beamline.report import read_metrics, read_rollouts
from beamline.report.rollouts import find_rollouts
from beamline.rollout.local.slots import Slots
from beamline.starter import STARTER
from tests.system.conftest import Cli
from tests.system.runs import ADAPTED, LORA, TINY, Process, last_step, newest, results

UNMEASURED = ("evaluation.every=0", "evaluation.before_training=false", "checkpoint.export=false")


def test_a_killed_run_with_adapters_and_replay_ends_with_the_bytes_of_an_uninterrupted_one(
    adapted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ("train", TINY, f"output={run}", *ADAPTED, "checkpoint.resume=latest")
    process = Process(tmp_path / "log", *arguments)
    process.until(lambda: last_step(run) >= 2)
    assert process.end(signal.SIGKILL) == -signal.SIGKILL
    last = Process(tmp_path / "log", *arguments)
    assert last.end() == 0, last.output
    assert "resumed at step" in last.output
    assert results(run) == results(adapted)


def test_its_checkpoint_holds_adapters_alone(adapted: Path) -> None:
    names = [part.name for part in ShardReader(newest(adapted)).slices("policy")]
    assert names
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)


def test_its_sampler_and_learner_agree_exactly(adapted: Path) -> None:
    lines = read_metrics(adapted / "metrics.jsonl")[1:]
    assert {line["mismatch/logprob_abs_diff_max"] for line in lines} == {0.0}


def test_adapters_do_not_go_on_with_another_base(tmp_path: Path, cli: Cli) -> None:
    base, run = Path(shutil.copytree(STARTER, tmp_path / "base")), tmp_path / "run"
    settings = (f"model.path={base}", f"output={run}", *LORA, *UNMEASURED, "checkpoint.resume=latest")
    begun = cli("train", TINY, *settings, "steps=1")
    assert begun.code == 0, begun.err
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-2] ^= 1  # the last bit of the last weight
    (base / "model.safetensors").write_bytes(weights)
    ended = cli("train", TINY, *settings, "steps=2")
    assert ended.code == 1
    assert f"the weights in model.path={base}, which the run needs" in ended.err
    assert last_step(run) == 1


def test_replay_brings_the_learner_nearer_to_a_sampler_in_bfloat16(tmp_path: Path, cli: Cli) -> None:
    """In the first step both runs have the same samples, and differ in the experts that the learner uses.

    At a high temperature, so that there are tokens that the starter is not sure of.
    """
    settings = ("rollout.dtype=bfloat16", "rollout.temperature=1.5", "algorithm.samples_per_prompt=16", "steps=2")
    for r3 in ("true", "false"):
        ended = cli("train", TINY, *settings, f"policy.r3={r3}", f"output={tmp_path / r3}", *UNMEASURED)
        assert ended.code == 0, ended.err
    replaying, free = (read_metrics(tmp_path / r3 / "metrics.jsonl") for r3 in ("true", "false"))
    one, other = (read_rollouts(find_rollouts(tmp_path / r3)[0]) for r3 in ("true", "false"))
    assert [row["response"] for row in one] == [row["response"] for row in other]
    assert 0 < replaying[1]["mismatch/logprob_abs_diff_mean"] < 0.8 * free[1]["mismatch/logprob_abs_diff_mean"]
    assert [line["policy/updates"] for line in replaying] == [0, 2, 4]


def test_routes_that_were_not_recorded_end_the_run(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    completed = Slots.completion

    def unrecorded(slots: Slots, *arguments: Any) -> Completion:
        completion = completed(slots, *arguments)
        assert completion.routes is not None
        return replace(completion, routes=np.zeros_like(completion.routes))

    monkeypatch.setattr(Slots, "completion", unrecorded)
    ended = cli("train", TINY, f"output={tmp_path}", "policy.r3=true", *UNMEASURED)
    assert ended.code == 1
    assert "RouteError: Key(split='eval', step=0, problem='probe', " in ended.err
    assert "the engine recorded nothing" in ended.err
