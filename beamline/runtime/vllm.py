"""Building the sampler over vLLM for a run: its engine processes, and what each of them is told."""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from beamline.config import ConfigError, Problem
from beamline.config.rollout import RolloutConfig
from beamline.model.beam import BeamShape
from beamline.rollout.vllm.arguments import engine_arguments, environment
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.layout import Mesh
from beamline.rollout.vllm.replica import Launch
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.transfer.local import LocalChannel

COMMAND = (sys.executable, "-P", "-m", "beamline.rollout.vllm.process")  # -P: not what lies in the current folder


def mesh(rollout: RolloutConfig) -> Mesh:
    """How an engine of a run spreads the model over GPUs."""
    return Mesh(rollout.vllm.tensor_parallel, rollout.vllm.pipeline_parallel, rollout.vllm.expert_parallel)


def require_vllm() -> None:
    """Make sure that vLLM is here, before anything is loaded.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("vllm") is None:
        reason = (
            "vLLM is not installed here: make setup-gpu makes an environment with it (Python 3.12, Linux, an NVIDIA "
            "GPU); see docs/vllm.md"
        )
        raise ConfigError([Problem(reason, "rollout.engine", "vllm")])


def vllm_sampler(
    rollout: RolloutConfig,
    shape: BeamShape,
    model: Path,
    positions: int,
    seed: int,
    channel: LocalChannel,
    routes: bool,
    logs: Path | None,
) -> VllmSampler:
    """Start the engines of a run and wait until they are ready.

    Args:
        rollout: with ``engine=vllm``.
        shape: of the model.
        model: its folder, from which engines load the weights that they begin with.
        positions: tokens of the longest sequence.
        seed: of the run.
        channel: where weights come from.
        routes: whether completions bring the experts of every token along, which costs vLLM a fifth of its speed.
        logs: the folder of the engines' logs; None for one of this command's own among temporary files.

    Raises:
        ConfigError: vLLM is not installed, or a GPU may not be seen.
        EngineFailedError: an engine did not start.
    """
    require_vllm()
    environments = [environment(rollout, replica) for replica in range(rollout.vllm.replicas)]
    folder = logs or Path(tempfile.mkdtemp(prefix="beamline-engines-"))
    launches = [
        Launch(
            command=COMMAND,
            arguments=engine_arguments(rollout, routes, model, positions),
            environment=each,
            log=folder / f"vllm-{replica}.log",
            start_seconds=rollout.vllm.start_seconds,
            token_seconds=rollout.vllm.token_seconds,
        )
        for replica, each in enumerate(environments)
    ]
    fleet = Fleet(launches, rollout.vllm.max_restarts, say)
    bucket_bytes = rollout.vllm.bucket_mb << 20
    seconds = rollout.vllm.token_seconds if rollout.vllm.weights == "group" else None
    return VllmSampler(fleet, shape, mesh(rollout), rollout.vllm.dtype, positions, seed, channel, bucket_bytes, seconds)


def say(line: str) -> None:
    """A line for whoever watches the run, above its progress bars."""
    print(line, file=sys.stderr, flush=True)
