"""What a preview says of engines and devices that are not on this machine."""

from pathlib import Path

import pytest
import torch

from beamline.config import load_config
from beamline.runtime import megatron, vllm
from beamline.runtime.preview import preview

NO_GPU = "learner.engine=megatron: Megatron-Core needs an NVIDIA GPU, and torch finds none here: use learner=torch"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def needs(output: Path, *settings: str) -> list[str]:
    """What stands behind the word, line by line."""
    shown = preview(load_config(None, [f"output={output}", "data.allow_overlap=true", *settings]))
    return [line.removeprefix("needs").strip() for line in shown.splitlines() if line.startswith("needs")]


def test_the_embedded_engines_need_nothing(tmp_path: Path) -> None:
    assert needs(tmp_path) == []


def test_the_torch_learner_on_a_gpu_needs_one(tmp_path: Path) -> None:
    reason = "policy.device=cuda: torch finds no NVIDIA GPU here: use cpu"
    assert needs(tmp_path, "policy.device=cuda", "policy.parity=false") == [reason]


def test_the_megatron_learner_needs_megatron_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: None)
    (reason,) = needs(tmp_path, "learner=megatron")
    assert reason.startswith("learner.engine=megatron: Megatron-Core is not installed here: make setup-gpu")


def test_the_megatron_learner_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: object())
    assert needs(tmp_path, "learner=megatron") == [NO_GPU]


def test_each_engine_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    sampler, learner = needs(tmp_path, "rollout=vllm", "learner=megatron", "policy.dtype=bfloat16")
    assert sampler.startswith("rollout.engine=vllm: vLLM is not installed here: make setup-gpu")
    assert learner == NO_GPU
