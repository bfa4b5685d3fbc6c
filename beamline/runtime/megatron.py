"""Building the learner over Megatron-Core for a run: this rank's part of it, and serving where it is not the first."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from beamline.config import ConfigError, Problem
from beamline.config.schema import RunConfig
from beamline.learner.megatron.mesh import Mesh, check_mesh, mesh_of
from beamline.model.beam import BeamShape
from beamline.runtime.determinism import make_deterministic
from beamline.runtime.interrupt import Interrupt
from beamline.runtime.launched import LaunchError, launched, processes
from beamline.transfer.local import LocalChannel

if TYPE_CHECKING:  # Megatron-Core is imported where it is used
    from beamline.learner.megatron.learner import MegatronLearner
    from beamline.learner.megatron.rank import Rank
    from beamline.learner.megatron.ranks import Ranks

DEVICE = "cuda"  # that Megatron-Core is made for
_BETWEEN_CALLS = timedelta(days=1)  # longest time that the first rank samples, grades or evaluates
_JOINING = timedelta(minutes=5)  # longest time from the first process of the group to the last
_IN_A_CALL = timedelta(minutes=30)  # longest time that ranks wait for each other in an update


def mesh_of_run(config: RunConfig) -> Mesh:
    """How the processes that torchrun has started share the model.

    Raises:
        ConfigError: torchrun has not started any, and one does not do.
        ModelError: their number and ``learner.parallel`` do not fit together.
    """
    parallel = config.learner.parallel
    least = parallel.tp * parallel.pp
    if processes() == 1 < least:
        reason = f"start {least} processes or a multiple: torchrun --nproc-per-node {least} -m beamline train ..."
        raise ConfigError([Problem(reason, "learner.parallel", f"tp={parallel.tp} pp={parallel.pp}")])
    return mesh_of(processes(), parallel.tp, parallel.ep, parallel.pp)


def check_megatron(config: RunConfig, shape: BeamShape) -> None:
    """Ask whether a model can be trained by these processes, before anything is loaded.

    Raises:
        ConfigError: torchrun has not started any, and one does not do; they are not all on this machine.
        ModelError: the model cannot be cut like this.
    """
    parallel = config.learner.parallel
    check_mesh(shape, Mesh(parallel.tp, parallel.ep, parallel.pp))  # before so many processes are asked for
    mesh = mesh_of_run(config)
    here = launched().local_size
    if here != mesh.size:
        reason = (
            f"{here} of {mesh.size} ranks are on this machine, and weights cannot be handed from one "
            "machine to another yet: start all of them on one (torchrun --nnodes 1)"
        )
        raise ConfigError([Problem(reason, "learner.parallel")])


def require_megatron() -> None:
    """Make sure that Megatron-Core is here.

    Raises:
        ConfigError: it is not.
    """
    import torch

    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        reason = (
            "Megatron-Core is not installed here: make setup-gpu makes an environment with it (Python 3.12, Linux, an "
            "NVIDIA GPU); see docs/megatron.md"
        )
        raise ConfigError([Problem(reason, "learner.engine", "megatron")])
    if DEVICE == "cuda" and not torch.cuda.is_available():
        reason = "Megatron-Core needs an NVIDIA GPU, and torch finds none here: use learner=torch"
        raise ConfigError([Problem(reason, "learner.engine", "megatron")])


def _join(backend: str) -> None:
    """Meet the other ranks in the default process group.

    Raises:
        LaunchError: they are not where torchrun says.
    """
    from torch import distributed

    if processes() == 1:
        alone = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=alone, rank=0, world_size=1)
        return
    try:
        distributed.init_process_group(backend, timeout=_IN_A_CALL)
    except RuntimeError as error:
        own, place = launched(), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LaunchError(
            f"rank {own.rank} did not find the others of {own.size} at {place} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).partition(chr(10))[0]}; see what they wrote, or use another port: torchrun --standalone"
        ) from error


@contextmanager
def megatron_rank(config: RunConfig, folder: Path) -> "Iterator[tuple[Rank, Ranks, Mesh]]":
    """This process's rank with the weights of a model folder, and all ranks; they part at the end."""
    require_megatron()
    import torch
    from megatron.core import parallel_state
    from torch import distributed
    from transformers import BeamConfig

    from beamline.learner.megatron.lifeline import Lifeline
    from beamline.learner.megatron.model import Stage, initialize
    from beamline.learner.megatron.rank import Rank
    from beamline.learner.megatron.ranks import Ranks

    mesh, device = mesh_of_run(config), torch.device(DEVICE, launched().local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _join("nccl" if device.type == "cuda" else "gloo")
    ranks = None
    with closing(Lifeline(distributed.get_rank(), mesh.size, _JOINING.total_seconds())) as lifeline:
        try:
            initialize(mesh)
            policy = config.policy
            stage = Stage(BeamConfig.from_pretrained(folder), mesh, policy.dtype, device, policy.recompute)
            stage.read(folder)
            rank = Rank(stage, mesh, config.learner, policy.head_chunk_rows)
            ranks = Ranks(rank, _BETWEEN_CALLS.total_seconds())
            yield rank, ranks, mesh
        finally:
            if ranks is None or ranks.broken:  # others may be in the middle of something: nobody is waited for
                distributed.distributed_c10d._abort_process_group()
            else:
                lifeline.close()
                parallel_state.destroy_model_parallel()
                distributed.destroy_process_group()


@contextmanager
def megatron_learner(config: RunConfig, folder: Path, channel: LocalChannel) -> "Iterator[MegatronLearner]":
    """The learner, on the first rank; at its end the others return from :func:`serve`."""
    from beamline.learner.megatron.learner import MegatronLearner

    with megatron_rank(config, folder) as (rank, ranks, mesh):
        try:
            yield MegatronLearner(rank, ranks, mesh, channel)
        finally:
            ranks.stop()


def serve(config: RunConfig, folder: Path) -> None:
    """What every rank but the first does: as it says, until it says stop.

    Signals are for the first rank to decide about: launchers send them to all, and it has a step to finish with these.

    Raises:
        RankFailedError: the first rank has ended without a word.
    """
    check_megatron(config, BeamShape.from_folder(folder))
    make_deterministic(config.runtime.threads)
    with megatron_rank(config, folder) as (_, ranks, _):
        for number in Interrupt.signals:
            signal.signal(number, signal.SIG_IGN)
        ranks.serve()
