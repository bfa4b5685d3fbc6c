"""Engines for tests on a GPU."""

from pathlib import Path

from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.model.layout import DType
from beamline.policy import model
from beamline.rollout.vllm.arguments import engine_arguments, environment
from beamline.rollout.vllm.replica import Launch
from beamline.runtime.vllm import COMMAND
from tests.shared_engines import SharedEngines
from tests.tiny_beam import CONTEXT, random_beam

_ARGUMENTS = {"kv_cache_memory_bytes": 1 << 30}  # engines that start together would measure what the others use
_ON_ONE_DEVICE = {
    "worker_extension_cls": "tests.gpu.one_device.SharingExtension",
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
}
_OVER_THE_HOST = {"VLLM_DISABLE_PYNCCL": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


def launch(model_folder: Path, log: Path, positions: int, rollout: RolloutConfig, replica: int = 0) -> Launch:
    """How an engine is started as a run would start it, but for the size of its cache."""
    arguments = engine_arguments(rollout, True, model_folder, positions) | _ARGUMENTS
    return Launch(COMMAND, arguments, environment(rollout, replica), log, start_seconds=500.0, token_seconds=120.0)


def launch_on_one_device(model_folder: Path, log: Path, positions: int, rollout: RolloutConfig) -> Launch:
    """The same with all its ranks on the first GPU, as ``one_device.py`` says."""
    arguments = engine_arguments(rollout, True, model_folder, positions) | _ARGUMENTS | _ON_ONE_DEVICE
    one_rank = RolloutConfig(engine="vllm", vllm=VllmConfig(dtype=rollout.vllm.dtype))
    variables = environment(one_rank, 0) | _OVER_THE_HOST
    return Launch(COMMAND, arguments, variables, log, start_seconds=500.0, token_seconds=120.0)


def gpu_engines(folder: Path) -> SharedEngines:
    """One engine for each type of weights, with the tiny Beam of the contract."""
    model.save(random_beam(), folder / "model", "float32")

    def launches(dtype: DType) -> list[Launch]:
        rollout = RolloutConfig(
            engine="vllm",
            record_support=True,
            top_k=1,
            vllm=VllmConfig(dtype=dtype, memory_share=0.2, max_sequences=64, engine_args={"enforce_eager": True}),
        )
        return [launch(folder / "model", folder / f"{dtype}.log", CONTEXT, rollout)]

    return SharedEngines(launches)
