"""Generation by vLLM: what of it is set here, and which of vLLM's own arguments stay free. Imports no vLLM."""

import difflib
from math import isfinite
from typing import Annotated, Literal

from pydantic import Field, JsonValue, WithJsonSchema, field_validator

from beamline.config.section import NonNegative, Positive, Section

_NO_ADAPTERS = "vllm serves no adapters of Beam yet"
_MODEL = "use model.path; the folder says what the model is"
_NO_CODE = "Beamline runs vLLM's own model, and no code from elsewhere"
_TOKENS = "token ids go in and come out; text is made and read by Beamline alone"
_SAMPLING = "use the settings of sampling under rollout and evaluation; every request brings its own"
_LOGPROBS = "completions carry the log-probability of each token in the distribution that it was drawn from"
_TARGET = "the learner must be able to compute the distribution that is sampled from"
_DRAFTS = "drafts would come from weights that are never trained, and spend random numbers that others then lack"
_ROUTES = "policy.r3 asks for the routes of experts"
_EXPERTS = "new weights are handed to each rank under the assumption that experts lie in order, each of them once"
_ONE_ENGINE = "use rollout.vllm.replicas: each replica is an engine of its own, on one host"
_MEMORY = "use rollout.vllm.memory_share"
_IN_PLACE = "new weights are written over the old ones, where they lie on the device"
_ASLEEP = "an engine can always give its memory back, by vLLM's own allocator"
_STALE = "what was computed by old weights must be gone when new ones arrive"
_QUANTIZATION = "use rollout.vllm.quantization"
_STEPPED = "Beamline queues requests and steps the engine itself, one step after another"

_GROUPS = {
    _MODEL: "model model_weights served_model_name hf_config_path config_format revision code_revision hf_token "
    "ignore_patterns tokenizer tokenizer_mode tokenizer_revision load_format runner convert pooler_config "
    "disable_sliding_window",
    _NO_CODE: "trust_remote_code model_impl model_class_overrides",
    _TOKENS: "skip_tokenizer_init tokens_only io_processor_plugin structured_outputs_config reasoning_parser "
    "reasoning_parser_plugin reasoning_config",
    _SAMPLING: "generation_config override_generation_config",
    _LOGPROBS: "logprobs_mode max_logprobs",
    _TARGET: "logits_processors watermark_config diffusion_config kv_sharing_fast_prefill",
    _DRAFTS: "speculative_config spec_method spec_model spec_tokens",
    _ROUTES: "enable_return_routed_experts aux_output_config",
    _EXPERTS: "enable_eplb eplb_config expert_placement_strategy enable_elastic_ep elastic_ep_max_dp_size",
    _ONE_ENGINE: "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
    "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
    "data_parallel_multi_port_external_lb data_parallel_backend distributed_executor_backend nnodes node_rank "
    "master_addr master_port",
    "use rollout.vllm.devices": "device_ids",
    _MEMORY: "gpu_memory_utilization kv_cache_memory_bytes",
    _IN_PLACE: "weight_transfer_config worker_cls worker_extension_cls offload_backend cpu_offload_gb "
    "cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params",
    _ASLEEP: "enable_sleep_mode enable_cumem_allocator sleep_mode_backend sleep_preserve_parameter_names",
    _STALE: "enable_prefix_caching kv_transfer_config kv_offloading_size kv_offloading_backend",
    _QUANTIZATION: "quantization quantization_config allow_deprecated_quantization",
    _STEPPED: "scheduler_cls stream_interval disable_log_stats max_num_queued_reqs max_num_queued_tokens",
    _NO_ADAPTERS: "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype "
    "lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
    "enable_moe_shared_loras max_lora_cls_labels",
    "use rollout.vllm.dtype": "dtype",
    "use rollout.vllm.tensor_parallel": "tensor_parallel_size prefill_context_parallel_size",
    "use rollout.vllm.pipeline_parallel": "pipeline_parallel_size",
    "use rollout.vllm.expert_parallel": "enable_expert_parallel",
    "use rollout.vllm.max_sequences": "max_num_seqs",
    "use rollout.max_prompt_tokens and rollout.max_response_tokens": "max_model_len",
    "use rollout.record_support": "return_sampling_mask",
    "use seed; every request has a stream of its own": "seed",
    "the head computes in float32, as the learner's does, and all else is said by the model's config.json": (
        "hf_overrides"
    ),
}

OWNED = {name: instead for instead, names in _GROUPS.items() for name in names.split()}
"""Arguments of vLLM's ``EngineArgs`` that a recipe cannot set, because Beamline sets them or promises what they would
break without a word; and what to do instead, or why."""

TEMPERATURES = 0.01, 2.0
"""What vLLM draws with; it raises what is lower to the first, but for 0, and refuses what is higher than the second."""


SECTION = "rollout.vllm"
"""Where the settings below stand."""


def instead_of(name: str) -> str:
    """What to do in place of a key of this name in the section, where there is none."""
    if name in OWNED:
        return OWNED[name]
    if near := difflib.get_close_matches(name, VllmConfig.model_fields, n=1, cutoff=0.75):
        return f"did you mean {SECTION}.{near[0]}?"
    return f"arguments of vLLM's own go under {SECTION}.engine_args"


def _is_finite(value: JsonValue) -> bool:
    """Whether no number in plain data is infinite, or none at all."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or isfinite(value)


EngineArgument = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=100)]
EngineValue = Annotated[JsonValue, WithJsonSchema({"type": "any value"})]


class VllmConfig(Section):
    """Generation by vLLM, used with `rollout.engine=vllm`."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Engine processes, each with all weights; the samples of a problem go to one of them."""
    tensor_parallel: Literal[1, 2, 4, 8] = 1
    """GPUs that share each layer of a replica."""
    pipeline_parallel: Literal[1, 2] = 1
    """Stages that the layers of a replica are divided into. With 2, no routes are returned: not for `policy.r3`."""
    expert_parallel: bool = False
    """Whole experts on each GPU of `tensor_parallel`, instead of a slice of every expert."""
    devices: Annotated[list[NonNegative], Field(min_length=1)] | None = None
    """GPUs to use, in order, counted among those that the run may see: `replicas` times `tensor_parallel` times
    `pipeline_parallel` of them; unset = the first ones."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations. Logits are float32 in either case."""
    quantization: Literal["none", "fp8_per_tensor"] = "none"
    """`fp8_per_tensor`: linear layers and experts are rounded to 8 bits as weights arrive."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of each GPU's memory for weights, activations and cache."""
    max_sequences: Positive = 512
    """Sequences that decode together in a replica."""
    weights: Literal["shared", "group"] = "shared"
    """How new weights come from the learner's ranks: `shared`, through memory that both sides see, on the GPU where
    they share one and else of the host; `group`, by NCCL from GPU to GPU, for a learner that has GPUs of its own."""
    bucket_mb: Annotated[int, Field(ge=1, le=4096)] = 256
    """Weights handed over at a time, in MiB; this much memory is held twice while they arrive."""
    start_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time for an engine to start: reading weights, compiling, capturing graphs."""
    token_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Longest time without a token from an engine that has requests, or without the answer to anything else that it is
    asked for: to take a part of new weights, to sleep, to wake."""
    max_restarts: NonNegative = 3
    """How often engines that died or hung are started again, all of them together, over the run."""
    engine_args: dict[EngineArgument, EngineValue] = Field(default={})
    """Any further arguments of vLLM's `EngineArgs`, such as `max_num_batched_tokens: 16384`. Those that Beamline sets
    itself are errors."""

    @field_validator("engine_args")
    @classmethod
    def _free_names(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if unclear := [name for name, value in arguments.items() if not _is_finite(value)]:
            raise ValueError(f"{', '.join(unclear)} cannot hold what is no finite number")
        if taken := [f"{name} cannot be set: {OWNED[name]}" for name in arguments if name in OWNED]:
            raise ValueError("; ".join(taken))
        return arguments

    @property
    def devices_per_replica(self) -> int:
        """GPUs of one engine process."""
        return self.tensor_parallel * self.pipeline_parallel
