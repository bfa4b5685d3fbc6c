"""A tiny random Beam whose sampler and learner are compared, without a tokenizer or a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from beamline.config import load_config
from beamline.config.schema import RunConfig
from beamline.mismatch.evaluator import Evaluator
from beamline.mismatch.frozen import FrozenBatch
from beamline.policy import model
from beamline.policy.lora import lora_shape
from beamline.rollout.collect import to_rollout
from beamline.runtime.console import RunConsole
from beamline.runtime.engines import sampler_of
from beamline.runtime.subject import Subject, Weights
from tests.adapters import random_adapters
from tests.contract.sampling import requests, run
from tests.tiny_beam import beam_shape, random_beam

LENGTHS = ["rollout.max_prompt_tokens=40", "rollout.max_response_tokens=56", "algorithm.samples_per_prompt=4"]
MANY_EXPERTS: dict[str, Any] = {"num_experts": 64, "num_experts_per_tok": 8, "n_group": 4, "topk_group": 4}
"""So many that rounding changes the choice of some of them."""


def config_of(folder: Path, *settings: str, **changes: Any) -> RunConfig:
    """The settings of a run of the tiny model, whose files are written to the folder."""
    model.save(random_beam(**changes), folder, "float32")
    return load_config(None, [f"model.path={folder}", "runtime.threads=2", *LENGTHS, *settings])


def weights_of(config: RunConfig, b: float = 0.1, **changes: Any) -> Weights:
    """The tiny model, and adapters with B of this deviation where the settings ask for them."""
    module, lora = random_beam(**changes), lora_shape(config.policy.lora)
    return Weights(module, None if lora is None else random_adapters(beam_shape(**changes), lora, b))


def frozen(config: RunConfig, weights: Weights, **params: Any) -> FrozenBatch:
    """What the run's sampler draws for a few prompts, by settings of its own where ``params`` say so."""
    sampler = sampler_of(config, weights.module, 0, weights.adapters)
    params = {"temperature": config.rollout.temperature} | params
    asked = [replace(r, key=replace(r.key, sample=n)) for n in range(4) for r in requests(**params)]
    return FrozenBatch(tuple(to_rollout(r, done) for r, done in zip(asked, run(sampler, asked), strict=True)))


def evaluator(config: RunConfig, batch: FrozenBatch, weights: Weights, other: Weights | None = None) -> Evaluator:
    """What evaluates the batch with these weights."""
    subject = Subject("tiny", config, None, None, 0, 0)
    return Evaluator(subject, {"these": weights} | ({"other": other} if other else {}), batch, RunConsole(1, 1))


@torch.no_grad()
def perturbed(module: nn.Module, names: Sequence[str], noise: float) -> nn.Module:
    """The module with noise on some of its tensors, in place."""
    state, generator = module.state_dict(), torch.Generator().manual_seed(1)
    for name in names:
        state[name].add_(noise * torch.randn(state[name].shape, generator=generator))
    return module
