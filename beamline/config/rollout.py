"""How the policy samples in training, and by which engine."""

from typing import Annotated, Literal

from pydantic import Field

from beamline.config.section import NonNegative, Positive, Section
from beamline.config.vllm import VllmConfig


class RolloutConfig(Section):
    """How the policy samples in training."""

    engine: Literal["local", "vllm"] = "local"
    """`local`: the embedded sampler, in this process, on compiled kernels. What it draws for a request has the same
    bits whatever else is in the batch. `vllm`: vLLM on GPUs, in processes of its own, set under `rollout.vllm`. What it
    draws for a request is fixed by the same seed, but for rounding, which differs with the batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the local sampler computes as. `bfloat16` rounds weights and activations as a model of that type does
    (emulated in float32), while the learner does not: a mismatch to study."""
    kv_dtype: Literal["same", "float8_e4m3"] = "same"
    """How the local sampler caches keys and values: as `dtype`, or rounded to 8 bits (scale 1, larger values become
    448)."""
    head_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the local sampler's logits before soft cap and softmax. `bfloat16` rounds them, as engines do unless told
    not to."""
    max_prompt_tokens: Positive = 64
    """Longer prompts are left out before training, and counted."""
    max_response_tokens: Positive = 96
    """Longer responses are cut; their finish is `length`."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Divides the logits, in the sampler and in the learner alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 in training, unless the support is recorded."""
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Keep the k most likely tokens, 0 = all; 0 in training, unless the support is recorded."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 in training, unless the support is recorded."""
    min_tokens: NonNegative = 0
    """No stop token before so many others; 0 in training, unless the support is recorded."""
    record_support: bool = False
    """Keep the tokens that were allowed at each draw, and have the learner renormalize over them; then the four
    settings above are free. vLLM wants `top_k` with it, and tells the tokens in evaluation too, which takes longer."""
    slots: Positive = 512
    """Sequences that decode together in the local sampler; each holds a slot of the cache."""
    deadline_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest wait for the next finished response before the run fails."""
    vllm: VllmConfig = VllmConfig()
