"""What a configuration means to vLLM: the arguments of its engine, and the environment of an engine process."""

import os
from pathlib import Path
from typing import Any

from beamline.config import ConfigError, Problem
from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.rollout.vllm.plugin import ACTIVE

VISIBLE = "CUDA_VISIBLE_DEVICES"
PLUGINS = "VLLM_PLUGINS"

_ENVIRONMENT = {
    ACTIVE: "1",
    # The engine's core runs in the process that drives it, which steps it and stops it between two steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Left to itself vLLM falls back to its older runner, which returns neither routes nor the tokens of a support.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # Never used where requests have seeds, and a minute or two of compilation at the first start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Ranks of an engine are started by a process that has threads already.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    # The model is a folder; whatever is missing from it must not come from the network.
    "HF_HUB_OFFLINE": "1",
}


def engine_arguments(rollout: RolloutConfig, policy_needs_routes: bool, model: Path, positions: int) -> dict[str, Any]:
    """The arguments of vLLM's ``EngineArgs``, as plain data.

    Args:
        rollout: with ``engine=vllm``.
        policy_needs_routes: whether completions bring the routes of experts along; only for a model that has experts,
            and without pipeline parallelism (vLLM refuses all else).
        model: the folder of the model and its tokenizer.
        positions: of the longest sequence, prompt and response together.
    """
    vllm = rollout.vllm
    return {
        "model": str(model),
        "tokenizer": str(model),
        "skip_tokenizer_init": True,
        "dtype": vllm.dtype,
        "quantization": None if vllm.quantization == "none" else vllm.quantization,
        "hf_overrides": {"head_dtype": "float32"},
        "tensor_parallel_size": vllm.tensor_parallel,
        "pipeline_parallel_size": vllm.pipeline_parallel,
        "enable_expert_parallel": vllm.expert_parallel,
        "max_model_len": positions,
        "gpu_memory_utilization": vllm.memory_share,
        "max_num_seqs": vllm.max_sequences,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "enable_return_routed_experts": policy_needs_routes,
        "return_sampling_mask": rollout.record_support,
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": "beamline.rollout.vllm.worker.WeightsExtension",
        **vllm.engine_args,
    }


def environment(rollout: RolloutConfig, replica: int) -> dict[str, str]:
    """Environment variables of engine process ``replica`` (from 0), to be laid over those of this process.

    Raises:
        ConfigError: this process may not see a GPU that the replica is to have.
    """
    devices = _devices(rollout.vllm, replica, os.environ.get(VISIBLE))
    variables = {**_ENVIRONMENT, VISIBLE: ",".join(devices)}
    if rollout.vllm.dtype == "float32":
        variables["TRITON_F32_DEFAULT"] = "ieee"  # left to itself Triton multiplies float32 with 10 bits
    if (plugins := os.environ.get(PLUGINS)) is not None:  # a list of the only ones that are loaded
        variables[PLUGINS] = ",".join(filter(None, (*plugins.split(","), "beamline")))
    return variables


def _devices(vllm: VllmConfig, replica: int, visible: str | None) -> list[str]:
    """The GPUs of a replica, by the names that this process has for them where it may not see all (``visible``)."""
    count = vllm.devices_per_replica
    numbers = vllm.devices or range(vllm.replicas * count)
    chosen = numbers[replica * count : (replica + 1) * count]
    if visible is None:
        return [str(number) for number in chosen]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if unseen := [number for number in chosen if number >= len(names)]:
        reason = (
            f"engine {replica} is to have GPU {unseen[0]}, counted from 0, but {VISIBLE}={visible} shows {len(names)}: "
            "use fewer engines or others of these GPUs, or show more"
        )
        raise ConfigError([Problem(reason, "rollout.vllm.devices")])
    return [names[number] for number in chosen]
