"""Whole runs with the learner over Megatron-Core, on the CPU."""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from beamline.config import ConfigError, load_config
from beamline.model.beam import BeamShape, ModelError
from beamline.policy import model
from beamline.runtime import megatron
from beamline.starter import STARTER
from tests.cluster.ranks import PROCESSES, on_cpu, variables

SETTINGS = (
    "steps=2",
    "algorithm.prompts_per_step=4",
    "algorithm.prompts_per_update=4",
    "algorithm.samples_per_prompt=4",
    "data.train.problems=64",
    "evaluation.before_training=false",
    "evaluation.every=0",
    "checkpoint.every=1",
    "runtime.threads=1",
    "rollout.slots=16",
)


def trained(output: Path, *settings: str) -> None:
    """Train in this process, whose GPU is the CPU."""
    on_cpu()
    megatron.DEVICE = "cpu"
    from beamline.train import train

    train(load_config(Path("recipes/quickstart.yaml"), [*SETTINGS, f"output={output}", *settings]))


def lines(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_what_it_learns_with_the_torch_learner_and_goes_on_with_it(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, PROCESSES, max_tasks_per_child=1) as pool:
        for name, settings in {
            "torch": ("policy.parity=false",),
            "megatron": ("learner=megatron", "learner.micro_batch_tokens=512"),
        }.items():
            pool.submit(trained, tmp_path / name, *settings).result()
        on = (f"checkpoint.resume={tmp_path / 'megatron' / 'checkpoints' / 'global_step_1'}", "checkpoint.export=true")
        pool.submit(trained, tmp_path / "on", "learner=megatron", "learner.micro_batch_tokens=512", *on).result()
    theirs, ours = lines(tmp_path / "torch"), lines(tmp_path / "megatron")
    assert [line["step"] for line in ours] == [0, 1, 2]
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        for figure in ("train/reward_mean", "policy/loss", "policy/grad_norm", "policy/counted_tokens"):
            assert one[figure] == pytest.approx(other[figure], rel=1e-3, abs=1e-6), figure
        assert one["mismatch/logprob_abs_diff_mean"] < 1e-4
    resumed = lines(tmp_path / "on")
    assert resumed[-1]["policy/grad_norm"] == pytest.approx(ours[-1]["policy/grad_norm"], rel=1e-6)
    exported = model.load(tmp_path / "on" / "export" / "global_step_2", "float32")
    assert BeamShape.from_config(exported.config.to_dict()) == BeamShape.from_folder(STARTER)  # type: ignore[union-attr, operator]


def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="Megatron-Core needs an NVIDIA GPU"):
        megatron.require_megatron()


def test_processes_that_do_not_fit_the_mesh_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 3, 1).items():
        monkeypatch.setenv(name, value)
    config = load_config(None, ["learner=megatron", "learner.parallel.tp=2"])
    with pytest.raises(ModelError, match="3 ranks are not a multiple of tensor=2 x pipeline=1: use 4 ranks"):
        megatron.check_megatron(config, BeamShape.from_folder(STARTER))


def test_processes_are_not_asked_for_that_the_model_has_no_use_for() -> None:
    config = load_config(None, ["learner=megatron", "learner.parallel.tp=3"])
    with pytest.raises(ModelError, match="num_key_value_heads=2 is not divisible by 3"):
        megatron.check_megatron(config, BeamShape.from_folder(STARTER))
