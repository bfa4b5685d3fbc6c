"""A learner over Megatron-Core, of one rank or several, for tests."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from beamline.config.policy import Recompute
from beamline.config.schema import LearnerConfig, OptimizerConfig
from beamline.learner.learner import Learner
from beamline.model.layout import DType
from beamline.policy.weights import named_tensors
from beamline.transfer.local import LocalChannel
from tests.cluster.ranks import on_cpu

Weights = Mapping[str, Tensor]

LACKING = {"reference": "a reference model", "lora": "adapters", "r3": "route replay"}
"""What the learner does not have yet, by the setting of the contract that asks for it."""


def weights_of(module: nn.Module) -> Weights:
    """A module's weights under checkpoint names, which go to other processes."""
    return {name: tensor.clone() for name, tensor in named_tensors(module).items()}


def rank_of(
    mesh: Any,
    config: Any,
    weights: Weights,
    optimizer: Mapping[str, Any],
    micro_batch_tokens: int,
    dtype: DType = "float32",
    recompute: Recompute = "none",
    device: str = "cpu",
) -> Any:
    """This process's rank of a mesh, with its slices of the weights."""
    from beamline.learner.megatron.model import Stage, initialize
    from beamline.learner.megatron.rank import Rank

    initialize(mesh)
    stage = Stage(config, mesh, dtype, torch.device(device), recompute)
    for each, view in stage.placed():
        view.copy_(weights[each.part.name][each.part.index])
    settings = LearnerConfig(micro_batch_tokens=micro_batch_tokens, optimizer=OptimizerConfig(**optimizer))
    return Rank(stage, mesh, settings, head_chunk_rows=16)


def with_learner(
    job: Callable[..., Any],
    mesh_sizes: Mapping[str, int],
    config: Any,
    weights: Weights,
    optimizer: Mapping[str, Any],
    micro_batch_tokens: int,
    dtype: DType,
    recompute: Recompute,
    arguments: tuple[Any, ...],
    device: str = "cpu",
) -> Any:
    """On the first rank: what the job makes of a learner over all ranks. On the others: nothing."""
    from beamline.learner.megatron.learner import MegatronLearner
    from beamline.learner.megatron.mesh import Mesh
    from beamline.learner.megatron.ranks import Ranks

    mesh = Mesh(**mesh_sizes)
    rank = rank_of(mesh, config, weights, optimizer, micro_batch_tokens, dtype, recompute, device)
    ranks = Ranks(rank, deadline_seconds=120)
    if rank.number:
        ranks.serve()
        return None
    try:
        return job(MegatronLearner(rank, ranks, mesh, LocalChannel()), *arguments)
    finally:
        ranks.stop()


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """Process groups of a single rank, in this process, as long as this lasts."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextmanager
def one_rank_on_the_cpu() -> Iterator[None]:
    """The same, and Megatron-Core on the CPU."""
    import torch._dynamo

    patch = on_cpu()
    patch.setattr(torch._dynamo.config, "disable", True)  # Megatron-Core's compiled functions, which are for GPUs
    try:
        with one_rank("gloo"):
            yield
    finally:
        patch.undo()


def megatron_learner(
    module: nn.Module,
    micro_batch_tokens: int = 4096,
    channel: LocalChannel | None = None,
    recompute: bool = False,
    **settings: Any,
) -> Learner[Any]:
    """A learner of one rank for a test of the contract, which is skipped if it asks for what there is none of yet.

    What else is set is of the optimizer.
    """
    from beamline.learner.megatron.learner import MegatronLearner
    from beamline.learner.megatron.mesh import Mesh
    from beamline.learner.megatron.ranks import Ranks

    if asked := [what for setting, what in LACKING.items() if settings.pop(setting, None)]:
        pytest.skip(f"the Megatron learner does not have {' and '.join(asked)} yet")
    mesh, config = Mesh(), cast(Any, module).config
    rank = rank_of(
        mesh, config, weights_of(module), settings, micro_batch_tokens, recompute="full" if recompute else "none"
    )
    return MegatronLearner(rank, Ranks(rank, deadline_seconds=120), mesh, channel or LocalChannel())
