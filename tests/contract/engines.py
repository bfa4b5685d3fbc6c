"""What makes an engine for the contract. A new engine is one more function here and one more name in its table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from torch import nn

from beamline.config.schema import LearnerConfig, OptimizerConfig, PolicyConfig
from beamline.learner.learner import Learner
from beamline.learner.torch import TorchLearner
from beamline.policy.weights import module_layout, named_tensors
from beamline.rollout.local import LocalSampler, Numerics
from beamline.rollout.sampler import Sampler
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from tests.tiny_beam import CONTEXT, THETA, beam_shape

Unfinished = Literal["keep", "abort"]


@dataclass(frozen=True)
class SamplerBench:
    """A sampler of sequences of up to ``CONTEXT`` tokens, and a hand that gives it a module's weights."""

    sampler: Sampler
    give: Callable[[nn.Module, int, Unfinished], None]


@dataclass(frozen=True)
class PairBench:
    """A learner and a sampler that are joined; ``sync`` brings the weights over as the version given."""

    learner: Learner[Any]
    sampler: Sampler
    sync: Callable[[int], None]


class SamplerFactory(Protocol):
    def __call__(
        self, weights: nn.Module | None, slots: int = ..., seed: int = ..., threads: int = ...
    ) -> SamplerBench:
        """A sampler with a module's weights as version 1, or with none."""


class LearnerFactory(Protocol):
    def __call__(
        self, module: nn.Module, micro_batch_tokens: int = ..., *, reference: nn.Module | None = ..., **optimizer: Any
    ) -> Learner[Any]:
        """A learner that starts from a module's weights; ``optimizer`` are fields of OptimizerConfig."""


class PairFactory(Protocol):
    def __call__(self, module: nn.Module, **optimizer: Any) -> PairBench:
        """A learner that starts from a module's weights, and a sampler without any."""


def local_sampler(weights: nn.Module | None, slots: int = 4, seed: int = 0, threads: int = 1) -> SamplerBench:
    channel = LocalChannel()
    sampler = LocalSampler(beam_shape(), Numerics(), THETA, slots, CONTEXT, seed, channel, threads)

    def give(module: nn.Module, version: int, unfinished: Unfinished) -> None:
        moves = plan(module_layout(module), sampler.layout("full"))
        channel.send(moves, named_tensors(module))
        sampler.receive(moves, version, unfinished)

    if weights is not None:
        give(weights, 1, "keep")
    return SamplerBench(sampler, give)


def torch_learner(
    module: nn.Module,
    micro_batch_tokens: int = 4096,
    channel: LocalChannel | None = None,
    parity: bool = True,
    reference: nn.Module | None = None,
    **optimizer: Any,
) -> TorchLearner:
    config = LearnerConfig(micro_batch_tokens=micro_batch_tokens, optimizer=OptimizerConfig(**optimizer))
    policy = PolicyConfig(head_chunk_rows=16, parity=parity)
    return TorchLearner(module, policy, config, channel or LocalChannel(), reference=reference)


def torch_local(module: nn.Module, **optimizer: Any) -> PairBench:
    channel = LocalChannel()
    learner = torch_learner(module, channel=channel, **optimizer)
    sampler = LocalSampler(beam_shape(), Numerics(), THETA, 4, CONTEXT, 0, channel)
    moves = plan(learner.layout("full"), sampler.layout("full"))

    def sync(version: int) -> None:
        learner.send(moves)
        sampler.receive(moves, version, unfinished="abort")

    return PairBench(learner, sampler, sync)


SAMPLERS: dict[str, SamplerFactory] = {"local": local_sampler}
INVARIANT = {"local"}
"""Samplers that promise the same bits whatever else is in flight; others promise the same tokens."""
LEARNERS: dict[str, LearnerFactory] = {"torch": torch_learner, "torch-module": partial(torch_learner, parity=False)}
PAIRS: dict[str, PairFactory] = {"torch-local": torch_local}
