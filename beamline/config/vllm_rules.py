"""What cannot be asked of vLLM: settings that contradict each other, or that it would not heed."""

from collections.abc import Iterator

from beamline.config.policy import PolicyConfig
from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import TEMPERATURES, VllmConfig

LOCAL_ALONE = {
    "slots": "use rollout.vllm.max_sequences",
    "dtype": "use rollout.vllm.dtype",
    "kv_dtype": "use rollout.vllm.engine_args.kv_cache_dtype",
    "head_dtype": "know that vllm's logits are always float32",
}
"""Settings of sampling that vLLM does not heed, and what to do instead."""


def about_vllm(rollout: RolloutConfig, policy: PolicyConfig, evaluation_temperature: float) -> Iterator[str]:
    """Every contradiction of a run that samples by vLLM, in words."""
    yield from _about_devices(rollout.vllm)
    yield from _about_sampling(rollout, policy, evaluation_temperature)
    for key, instead in LOCAL_ALONE.items():
        if (value := getattr(rollout, key)) != RolloutConfig.model_fields[key].default:
            yield f"rollout.{key}={value} is a setting of rollout.engine=local: leave it out, and {instead}"
    if policy.lora.rank > 0:
        yield f"policy.lora.rank={policy.lora.rank} needs rollout.engine=local: vllm serves no adapters of Beam yet"


def _about_devices(vllm: VllmConfig) -> Iterator[str]:
    """Parts of vLLM's engines that do not fit together."""
    needed = vllm.replicas * vllm.devices_per_replica
    if vllm.devices is not None and len(vllm.devices) != needed:
        yield (
            f"rollout.vllm.devices names {len(vllm.devices)} GPUs, and {needed} are needed: rollout.vllm.replicas="
            f"{vllm.replicas}, each with tensor_parallel={vllm.tensor_parallel} times pipeline_parallel="
            f"{vllm.pipeline_parallel}"
        )
    if vllm.devices is not None and len(set(vllm.devices)) < len(vllm.devices):
        yield f"rollout.vllm.devices={vllm.devices} names a GPU twice"
    if vllm.expert_parallel and vllm.tensor_parallel == 1:
        yield (
            "rollout.vllm.expert_parallel=true has no use with rollout.vllm.tensor_parallel=1: a single GPU has "
            "all experts"
        )
    if vllm.quantization != "none" and vllm.tensor_parallel > 1:
        yield (
            f"rollout.vllm.quantization={vllm.quantization} needs rollout.vllm.tensor_parallel=1: ranks share the "
            "scale of a layer, and weights that arrive in buckets are complete on one before they are on another"
        )
    if vllm.quantization != "none" and vllm.dtype == "float32":
        yield (
            f"rollout.vllm.quantization={vllm.quantization} needs rollout.vllm.dtype=bfloat16: products of 8 bits "
            "have no float32 results"
        )


def _about_sampling(rollout: RolloutConfig, policy: PolicyConfig, temperature: float) -> Iterator[str]:
    """Distributions that vLLM would sample from differently, or could not tell of."""
    least, most = TEMPERATURES
    for key, asked in (("rollout", rollout.temperature), ("evaluation", temperature)):
        if not (asked == 0 or least <= asked <= most):
            greedy = " or 0" if key == "evaluation" else ""
            yield (
                f"{key}.temperature={asked} is not one of vllm's, which raises lower ones to {least} unasked and "
                f"refuses others above {most:g}: use {least} to {most:g}{greedy}, or rollout.engine=local"
            )
    if policy.r3 and rollout.vllm.pipeline_parallel > 1:
        yield (
            "policy.r3=true needs rollout.vllm.pipeline_parallel=1: vllm returns no routes under pipeline "
            "parallelism; use rollout.vllm.tensor_parallel"
        )
    if rollout.record_support and rollout.top_k == 0:
        yield (
            "rollout.record_support=true needs a rollout.top_k with vllm, such as 1000: without one it returns up "
            "to the whole vocabulary for every token"
        )
