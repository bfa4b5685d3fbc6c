"""Engines for tests on a GPU."""

from pathlib import Path
from typing import Any

from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.model.layout import DType
from beamline.policy import model
from beamline.rollout.vllm.arguments import engine_arguments, environment
from beamline.rollout.vllm.replica import Launch
from beamline.runtime.vllm import COMMAND
from tests.shared_engines import SharedEngines
from tests.tiny_beam import CONTEXT, random_beam


def launch(model_folder: Path, log: Path, positions: int, rollout: RolloutConfig, **changes: Any) -> Launch:
    """How an engine is started as a run would start it; ``changes`` replace arguments of vLLM."""
    arguments = engine_arguments(rollout, True, model_folder, positions) | changes
    return Launch(COMMAND, arguments, environment(rollout, 0), log, start_seconds=500.0, token_seconds=120.0)


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
