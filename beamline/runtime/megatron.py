"""Building the learner over Megatron-Core for a run: this rank's part of it, and serving where it is not the first."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from beamline.config import ConfigError, Problem
from beamline.config.schema import RunConfig
from beamline.learner.megatron.mesh import Mesh, check_mesh, mesh_of
from beamline.model.beam import BeamShape
from beamline.transfer.local import LocalChannel

if TYPE_CHECKING:  # Megatron-Core is imported where it is used
    from beamline.learner.megatron.learner import MegatronLearner
    from beamline.learner.megatron.rank import Rank
    from beamline.learner.megatron.ranks import Ranks

DEVICE = "cuda"  # that Megatron-Core is made for
_BETWEEN_CALLS = timedelta(days=1)  # longest time that the first rank samples, grades or evaluates
_IN_A_CALL = timedelta(minutes=30)  # longest time that ranks wait for each other in an update


def mesh_of_run(config: RunConfig) -> Mesh:
    """How the processes that torchrun has started share the model.

    Raises:
        ModelError: their number and ``learner.parallel`` do not fit together.
    """
    parallel = config.learner.parallel
    return mesh_of(int(os.environ.get("WORLD_SIZE", "1")), parallel.tp, parallel.ep, parallel.pp)


def check_megatron(config: RunConfig, shape: BeamShape) -> None:
    """Ask whether a model can be trained by these processes, before anything is loaded.

    Raises:
        ConfigError: there are several of them.
        ModelError: the model cannot be cut like this.
    """
    mesh = mesh_of_run(config)
    check_mesh(shape, mesh)
    if mesh.size > 1:
        reason = (
            "the Megatron learner of several ranks cannot hand its weights to a sampler yet: start one process, with "
            "tp=1, ep=1 and pp=1"
        )
        raise ConfigError([Problem(reason, "learner.parallel")])


def require_megatron() -> None:
    """Make sure that Megatron-Core is here.

    Raises:
        ConfigError: it is not.
    """
    import torch

    if find_spec("megatron") is None:
        reason = "megatron-core is not installed here: pip install 'megatron-core==0.19.2' (Python 3.12, an NVIDIA GPU)"
        raise ConfigError([Problem(reason, "learner.engine", "megatron")])
    if DEVICE == "cuda" and not torch.cuda.is_available():
        reason = "Megatron-Core needs an NVIDIA GPU, and torch finds none here: use torch on a CPU"
        raise ConfigError([Problem(reason, "learner.engine", "megatron")])


@contextmanager
def megatron_rank(config: RunConfig, folder: Path) -> "Iterator[tuple[Rank, Ranks, Mesh]]":
    """This process's rank with the weights of a model folder, and all ranks; they part at the end."""
    require_megatron()
    import torch
    from megatron.core import parallel_state
    from torch import distributed
    from transformers import BeamConfig

    from beamline.learner.megatron.model import Stage, initialize
    from beamline.learner.megatron.rank import Rank
    from beamline.learner.megatron.ranks import Ranks

    mesh, device = mesh_of_run(config), torch.device(DEVICE, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if mesh.size > 1 or "RANK" in os.environ:
        distributed.init_process_group(backend, timeout=_IN_A_CALL)
    else:
        alone = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=alone, rank=0, world_size=1)
    try:
        initialize(mesh)
        policy = config.policy
        stage = Stage(BeamConfig.from_pretrained(folder), mesh, policy.dtype, device, policy.activation_checkpointing)
        stage.read(folder)
        rank = Rank(stage, mesh, config.learner, policy.head_chunk_rows)
        yield rank, Ranks(rank, _BETWEEN_CALLS.total_seconds()), mesh
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


@contextmanager
def megatron_learner(config: RunConfig, folder: Path, channel: LocalChannel) -> "Iterator[MegatronLearner]":
    """The learner, on the first rank; at its end the others return from :func:`serve`."""
    from beamline.learner.megatron.learner import MegatronLearner

    with megatron_rank(config, folder) as (rank, ranks, mesh):
        try:
            yield MegatronLearner(rank, ranks, mesh, channel)
        except BaseException:
            with suppress(RuntimeError):  # a rank that has ended is not why this one does
                ranks.stop()
            raise
        ranks.stop()


def serve(config: RunConfig, folder: Path) -> None:
    """What every rank but the first does: as it says, until it says stop."""
    check_megatron(config, BeamShape.from_folder(folder))
    with megatron_rank(config, folder) as (_, ranks, _):
        ranks.serve()
