"""What makes an engine for the contract. A new engine is one more function here and one more name in its table.

Or, if it cannot be in every process that runs tests, fixtures beside its own tests: ``tests/cluster`` has those of the
learner over Megatron-Core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

from torch import nn

from beamline.config.policy import LoraConfig, PolicyConfig
from beamline.config.schema import LearnerConfig, OptimizerConfig
from beamline.learner.learner import Learner
from beamline.learner.torch import TorchLearner
from beamline.model.beam import BeamShape
from beamline.model.layout import DType
from beamline.model.lora import LoraShape
from beamline.policy.lora import Adapters
from beamline.policy.weights import module_layout, named_tensors
from beamline.rollout.local import LocalSampler, Numerics
from beamline.rollout.sampler import Sampler
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors
from tests.adapters import random_adapters
from tests.tiny_beam import CONTEXT, THETA, beam_shape

Unfinished = Literal["keep", "abort"]


@dataclass(frozen=True)
class SamplerBench:
    """A sampler of sequences of up to ``CONTEXT`` tokens, and a hand that gives it a module's weights or an adapter."""

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
        self,
        weights: nn.Module | None,
        slots: int = ...,
        seed: int = ...,
        threads: int = ...,
        *,
        lora: LoraShape | None = ...,
        dtype: DType = ...,
    ) -> SamplerBench:
        """A sampler with a module's weights as version 1, or with none; with room for an adapter, or for none."""


class LearnerFactory(Protocol):
    def __call__(
        self,
        module: nn.Module,
        micro_batch_tokens: int = ...,
        *,
        reference: nn.Module | None = ...,
        lora: LoraShape | None = ...,
        b: float = ...,
        dropout: float = ...,
        r3: bool = ...,
        recompute: bool = ...,
        **optimizer: Any,
    ) -> Learner[Any]:
        """A learner that starts from a module's weights; ``optimizer`` are fields of OptimizerConfig.

        With ``lora`` it trains adapters, whose B begin as random numbers of the deviation ``b``. ``r3`` replays routes,
        and ``recompute`` is activation checkpointing.
        """


class PairFactory(Protocol):
    def __call__(
        self, module: nn.Module, *, lora: LoraShape | None = ..., b: float = ..., r3: bool = ..., **optimizer: Any
    ) -> PairBench:
        """A learner that starts from a module's weights, and a sampler without any, or without adapters only."""


def local_sampler(
    weights: nn.Module | None,
    slots: int = 4,
    seed: int = 0,
    threads: int = 1,
    *,
    lora: LoraShape | None = None,
    dtype: DType = "float32",
) -> SamplerBench:
    channel = LocalChannel()
    sampler = LocalSampler(beam_shape(), Numerics(dtype), THETA, slots, CONTEXT, seed, channel, threads, lora)

    def give(module: nn.Module, version: int, unfinished: Unfinished) -> None:
        moves = plan(module_layout(module), sampler.layout("adapter" if isinstance(module, Adapters) else "full"))
        channel.send(moves, Tensors(named_tensors(module)))
        sampler.receive(moves, version, unfinished)

    if weights is not None:
        give(weights, 1, "keep")
    return SamplerBench(sampler, give)


def shape_of(module: nn.Module) -> BeamShape:
    return BeamShape.from_config(cast(Any, module).config.to_dict())


def torch_learner(
    module: nn.Module,
    micro_batch_tokens: int = 4096,
    channel: LocalChannel | None = None,
    parity: bool = True,
    reference: nn.Module | None = None,
    lora: LoraShape | None = None,
    b: float = 0.0,
    dropout: float = 0.0,
    r3: bool = False,
    recompute: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    **optimizer: Any,
) -> TorchLearner:
    config = LearnerConfig(micro_batch_tokens=micro_batch_tokens, optimizer=OptimizerConfig(**optimizer))
    policy = PolicyConfig(
        head_chunk_rows=16,
        parity=parity,
        device=device,
        lora=LoraConfig(dropout=dropout),
        r3=r3,
        recompute="full" if recompute else "none",
    )
    adapters = None if lora is None else random_adapters(shape_of(module), lora, b)
    return TorchLearner(module, policy, config, channel or LocalChannel(), adapters, reference)


def with_local_sampler(
    make: Callable[..., Learner[Any]], module: nn.Module, *, lora: LoraShape | None = None, **settings: Any
) -> PairBench:
    """A learner that ``make`` gives, which sends into a channel, and the local sampler behind that."""
    channel = LocalChannel()
    learner = make(module, channel=channel, lora=lora, **settings)
    sampler = LocalSampler(shape_of(module), Numerics(), THETA, 4, CONTEXT, 0, channel, lora=lora)
    if lora is not None:
        base = plan(learner.layout("full"), sampler.layout("full"))
        learner.send(base)
        sampler.receive(base, 0, unfinished="abort")
    moves = plan(learner.layout(learner.kind), sampler.layout(learner.kind))

    def sync(version: int) -> None:
        learner.send(moves)
        sampler.receive(moves, version, unfinished="abort")

    return PairBench(learner, sampler, sync)


torch_local = partial(with_local_sampler, torch_learner)

SAMPLERS: dict[str, SamplerFactory] = {"local": local_sampler}
INVARIANT = {"local"}
"""Samplers that promise the same bits whatever else is in flight; others promise the same tokens."""
LEARNERS: dict[str, LearnerFactory] = {"torch": torch_learner, "torch-module": partial(torch_learner, parity=False)}
PAIRS: dict[str, PairFactory] = {"torch-local": torch_local}
