"""How the trained model is held: adapters, replayed routes, types."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from beamline.config.section import Positive, Section

Target = Annotated[str, Field(pattern=r"^[a-z_]+(\.[a-z_]+)*$")]

Recompute = Literal["none", "selective", "full"]

RANK_STEP = 8
"""Ranks are multiples of it: rows of grouped matrix products are aligned."""


class LoraConfig(Section):
    """Low-rank adapters on linear layers: each adds `alpha / rank * B A x`, and the model itself stays as it is."""

    rank: Annotated[int, Field(ge=0, le=1024, multiple_of=RANK_STEP)] = 0
    """Rows of A and columns of B; 0 = no adapters, and every weight is trained."""
    alpha: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """What an adapter adds is multiplied by `alpha / rank`; unset = `rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each adapter's inputs that an update leaves out, at random. Nothing is left out in sampling."""
    targets: Literal["all-linear"] | Annotated[list[Target], Field(min_length=1)] = "all-linear"
    """Which linear layers: all of attention, dense MLPs and experts, or those with these names or ends of names, such
    as `q_proj`, `self_attn.gate_proj` or `experts.down_proj`. Router, norms, embeddings and head are never adapted."""
    experts: Literal["per_expert", "shared_per_layer", "none"] = "per_expert"
    """An adapter for each expert, one for all experts of a layer, or none on experts."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A begins: uniform within 1 / sqrt(inputs), or normal with a deviation of 1 / rank. B begins as 0."""
    adapter_path: Path | None = None
    """A folder with an adapter in PEFT's format to begin from, instead of a new one."""


class PolicyConfig(Section):
    """How the trained model is held in memory, and evaluated."""

    lora: LoraConfig = LoraConfig()
    r3: bool = False
    """Rollout routing replay: the learner sends each token to the experts that the sampler sent it to, and computes
    their weights itself."""
    parity: bool = True
    """Of `learner.engine=torch`: evaluate the model with the kernels of the local sampler. Log-probabilities of the
    same weights then have the same bits in both engines, and the learner is faster. False = the operations of the
    Hugging Face module."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Of `learner.engine=torch`: where it trains. `cuda` is an NVIDIA GPU, without `parity`; evaluations and the
    analysis of a mismatch compute on the CPU in either case."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's weights. In `bfloat16` every weight that is trained has a float32 one beside it, which is
    what is updated and saved; with `learner.engine=torch` it is without `parity`. Adapters are float32 in either
    case."""
    recompute: Recompute = "none"
    """What an update computes again in the backward pass instead of keeping it: nothing; what lies between products of
    matrices (`selective`, of the Megatron learner), such as norms and activations; or each layer (`full`)."""
    head_chunk_rows: Positive = 2048
    """Rows of the vocabulary projection computed at a time; `[rows, vocabulary]` is the largest tensor of the head."""
