"""Sequences for a learner, and what can be read off it, for the tests of its contract."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import BeamForCausalLM

from beamline.algorithms.loss import LossConfig
from beamline.checkpoint import ShardReader, ShardWriter
from beamline.config.algorithm import AlgorithmConfig
from beamline.learner.learner import Learner, StepStats, update_statistics
from beamline.policy.weights import split_experts
from beamline.records import Experience, Finish, Key, Rollout, Turn
from tests.tiny_beam import VOCAB

LIMIT = 64
LOSS = LossConfig(AlgorithmConfig(), response_limit=LIMIT, seed=0, on_policy=True)


def loss_of(on_policy: bool = True, first: bool = False, **algorithm: Any) -> LossConfig:
    """A loss with some settings of the section ``algorithm``, as a recipe would give them."""
    settings = {"prompts_per_update": 16} | algorithm  # of a step of 32, so that no loss is without a use
    return LossConfig(AlgorithmConfig.model_validate(settings), LIMIT, seed=0, on_policy=on_policy, first=first)


_RATE, _EPS = 1e6, 1e3
GRADIENT: dict[str, Any] = {"lr": _RATE, "eps": _EPS, "weight_decay": 0.0, "max_grad_norm": 1e9}
"""An optimizer whose first update is, by its large epsilon, almost the gradient: see :func:`gradient`."""


def experience(
    prompt: int, response: int, seed: int, advantage: float, temperature: float = 1.0, finish: Finish = "stop"
) -> Experience:
    rng = np.random.default_rng(seed)
    S = prompt + response
    chosen = np.arange(S) >= prompt
    rollout = Rollout(
        key=Key("train", 1, f"problem-{seed}", 0),
        token_ids=rng.integers(0, VOCAB, S).astype(np.int32),
        policy_mask=chosen,
        logprobs=np.where(chosen, rng.uniform(-3, 0, S), 0).astype(np.float32),
        versions=np.where(chosen, 1, -1).astype(np.int32),
        routes=None,
        turns=(Turn("prompt", 0, prompt), Turn("policy", prompt, S)),
        finish=finish,
        temperature=temperature,
    )
    return Experience(rollout, advantage)


def of_lengths(lengths: Sequence[int]) -> list[Experience]:
    """Sequences of so many tokens, with a prompt of one, and advantages of both signs."""
    return [experience(1, length - 1, seed, 1.0 - seed % 3) for seed, length in enumerate(lengths)]


def batch() -> list[Experience]:
    """Ragged sequences, shorter and longer than the window, at two temperatures; one was cut at its limit."""
    return [
        experience(3, 9, seed=1, advantage=1.3),
        experience(12, 25, seed=2, advantage=-0.7, temperature=0.8, finish="length"),
        experience(1, 2, seed=3, advantage=0.4),
        experience(7, 17, seed=4, advantage=-1.1),
        experience(5, 8, seed=5, advantage=0.6, temperature=0.8),
    ]


def untrained(sequence: Experience) -> Experience:
    return replace(sequence, trained=False)


def update(learner: Learner[Any], sequences: Sequence[Experience], loss: LossConfig = LOSS) -> StepStats:
    return learner.step(learner.prepare(sequences, loss))


def metrics(stats: StepStats) -> dict[str, float]:
    """What is reported of a step with this one update."""
    return update_statistics([stats], LIMIT)


def weights(learner: Learner[Any]) -> dict[str, NDArray[np.float64]]:
    """Every float32 tensor of the policy, as it would be saved."""
    with TemporaryDirectory() as folder:
        learner.save(ShardWriter(Path(folder), 0))
        reader = ShardReader(Path(folder))
        parts = reader.slices("policy")
        return {part.name: reader.read("policy", part).view(np.float32).astype(np.float64) for part in parts}


def snapshot(learner: Learner[Any]) -> dict[str, bytes]:
    """Every byte that the learner would save."""
    with TemporaryDirectory() as folder:
        learner.save(ShardWriter(Path(folder), 0))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def gradient(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    """The gradient behind a first update with the optimizer GRADIENT: AdamW's step ``rate g / (|g| + eps)``, solved."""
    result = {}
    for name in before:
        step = before[name] - after[name]
        result[name] = _EPS * step / (_RATE - np.abs(step))
    return result


def updated_gradient(
    learner: Learner[Any], sequences: Sequence[Experience], loss: LossConfig = LOSS
) -> tuple[dict[str, NDArray[np.float64]], StepStats]:
    """Make one update of a fresh learner with the optimizer GRADIENT; returns the gradient that it followed."""
    before = weights(learner)
    stats = update(learner, sequences, loss)
    return gradient(before, weights(learner)), stats


def written_loss(logits_of: Callable[[Tensor], Tensor], sequences: Sequence[Experience], denominator: int) -> Tensor:
    """The loss at a ratio of 1, sequence by sequence, from logits ``[S - 1, V]`` of token ids ``[S - 1]``."""
    loss = torch.zeros(())
    for sequence in sequences:
        rollout = sequence.rollout
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        logprobs = (logits_of(ids[:-1]) / rollout.temperature).log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        chosen = logprobs[torch.from_numpy(rollout.policy_mask[1:])]
        loss = loss - ((chosen - chosen.detach()).exp() * sequence.advantage).sum() / denominator
    return loss


def written_gradient(
    plain: BeamForCausalLM, sequences: Sequence[Experience], denominator: int
) -> tuple[dict[str, NDArray[np.float64]], float]:
    """Gradient and value of that loss by the Hugging Face module."""
    loss = written_loss(lambda ids: plain(ids[None], use_cache=False).logits[0], sequences, denominator)
    return named_gradients(plain, loss), loss.item()


def named_gradients(plain: BeamForCausalLM, loss: Tensor) -> dict[str, NDArray[np.float64]]:
    """The gradient of a loss, under checkpoint names."""
    plain.zero_grad()
    loss.backward()
    return {
        part: view.double().numpy()
        for name, parameter in plain.named_parameters()
        for part, view in split_experts(name, _gradient_of(parameter))
    }


def _gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def assert_gradients_equal(
    actual: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], tolerance: float
) -> None:
    """Equal to ``tolerance`` times the largest entry of the expected gradient."""
    largest = max(float(np.abs(values).max()) for values in expected.values())
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=0, atol=tolerance * largest, err_msg=name)


def assert_only_experts_with_rows_change(learner: Learner[Any], module: Any, sequence: Experience) -> None:
    """In an update without decay: the gradient of the others is 0, exactly."""
    routed: set[tuple[int, int]] = set()
    for index, layer in enumerate(module.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _gate, _in, out, index=index: routed.update((index, int(e)) for e in out[2].unique())
            )
    before = weights(learner)
    update(learner, [sequence])
    experts = {name: values for name, values in weights(learner).items() if ".experts." in name}
    for name, values in experts.items():
        layer, expert = int(name.split(".")[2]), int(name.split(".")[5])
        assert (values != before[name]).any() == ((layer, expert) in routed), name
    assert 0 < len(routed) < len(experts) / 3
