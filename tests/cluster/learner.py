"""A learner over Megatron-Core, of one rank or several, for tests."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from beamline.config.policy import Recompute
from beamline.config.schema import LearnerConfig, OptimizerConfig
from beamline.model.layout import DType
from beamline.policy.weights import named_tensors
from beamline.transfer.local import LocalChannel

Weights = Mapping[str, Tensor]


def weights_of(module: nn.Module) -> Weights:
    """A module's weights under checkpoint names, which go to other processes."""
    return {name: tensor.clone() for name, tensor in named_tensors(module).items()}


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
    from beamline.learner.megatron.model import Stage, initialize
    from beamline.learner.megatron.rank import Rank
    from beamline.learner.megatron.ranks import Ranks

    mesh = Mesh(**mesh_sizes)
    initialize(mesh)
    stage = Stage(config, mesh, dtype, torch.device(device), recompute)
    for each, view in stage.placed():
        view.copy_(weights[each.part.name][each.part.index])
    settings = LearnerConfig(micro_batch_tokens=micro_batch_tokens, optimizer=OptimizerConfig(**optimizer))
    rank = Rank(stage, mesh, settings, head_chunk_rows=16)
    ranks = Ranks(rank, deadline_seconds=120)
    if rank.number:
        ranks.serve()
        return None
    try:
        return job(MegatronLearner(rank, ranks, mesh, LocalChannel()), *arguments)
    finally:
        ranks.stop()
