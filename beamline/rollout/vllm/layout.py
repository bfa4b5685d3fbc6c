"""Where a Beam lies inside a vLLM engine: which slice of which checkpoint tensor in which parameter of which rank.

Described is the format into which vLLM 0.33 loads a checkpoint (``vllm/models/beam/nvidia``), before any kernel pads or
reorders weights. Data parallelism within an engine is not used, so that experts spread over the tensor ranks alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from beamline.model.beam import BeamShape, ModelError
from beamline.model.layout import DType, Layout
from beamline.model.placement import Cut, Held, Placed, joined, specs, stacked

VOCABULARY_MULTIPLE = 64
"""The embedding and the head are filled with rows up to a multiple of this, before they are cut."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of one engine. With ``experts`` each tensor rank holds whole experts, else a part of every expert."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    @property
    def size(self) -> int:
        """Number of ranks: rank ``p * tensor + t`` is tensor rank t of pipeline stage p."""
        return self.tensor * self.pipeline


def check_mesh(shape: BeamShape, mesh: Mesh) -> None:
    """Ask whether vLLM can cut the model for these ranks.

    Raises:
        ModelError: it cannot, with the number, the rule and what would do.
    """
    layers = shape.num_hidden_layers
    if not 1 <= mesh.pipeline <= layers:
        raise ModelError(f"pipeline={mesh.pipeline} stages for {layers} layers: use 1 to {layers}")
    broken = _broken(shape, mesh.tensor, mesh.experts)
    if broken:
        possible = [n for n in range(1, shape.num_attention_heads + 1) if not _broken(shape, n, mesh.experts)]
        raise ModelError(f"tensor={mesh.tensor} ranks: {'; '.join(broken)}: use {', '.join(map(str, possible))}")


def _broken(shape: BeamShape, ranks: int, experts: bool) -> list[str]:
    """The rules that a number of tensor ranks breaks."""
    if ranks < 1:
        return ["there must be at least one"]
    kv_heads, rows = shape.num_key_value_heads, _padded(shape.vocab_size)
    divided = {"num_attention_heads": shape.num_attention_heads}
    if "dense" in shape.mlp_layer_types:
        divided["intermediate_size"] = shape.intermediate_size
    if shape.moe_layers and not experts:
        divided["moe_intermediate_size"] = shape.moe_intermediate_size
    broken = [f"{name}={size} is not divisible by {ranks}" for name, size in divided.items() if size % ranks]
    if kv_heads % ranks and ranks % kv_heads:
        broken.append(f"num_key_value_heads={kv_heads} is neither a multiple nor a divisor of {ranks}")
    if rows % ranks:
        broken.append(f"vocab_size={shape.vocab_size}, filled up to {rows}, is not divisible by {ranks}")
    if shape.moe_layers and experts and shape.num_experts < ranks:
        broken.append(f"num_experts={shape.num_experts} leaves ranks without an expert")
    return broken


def parameters(shape: BeamShape, mesh: Mesh, rank: int, dtype: DType) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Name -> shape and type of every parameter of a rank, in the order of vLLM's ``named_parameters()``.

    Raises:
        ModelError: the model cannot be cut for this mesh.
        ValueError: no such rank.
    """
    return {held.name: (held.shape, held.dtype) for held in _held(shape, mesh, rank, dtype)}


def placed(shape: BeamShape, mesh: Mesh, rank: int, dtype: DType) -> tuple[Placed, ...]:
    """What a rank holds, parameter by parameter; within one, each part begins in memory where the last one ended.

    Raises:
        ModelError: the model cannot be cut for this mesh.
        ValueError: no such rank.
    """
    return tuple(part for held in _held(shape, mesh, rank, dtype) for part in held.placed())


def engine_layout(shape: BeamShape, mesh: Mesh, dtype: DType) -> Layout:
    """The slices of all ranks of an engine, each in the order of :func:`placed`.

    Raises:
        ModelError: the model cannot be cut for this mesh.
    """
    ranks = range(mesh.size)
    return Layout(tuple(tuple(p for held in _held(shape, mesh, r, dtype) for p in held.parts) for r in ranks))


def _held(shape: BeamShape, mesh: Mesh, rank: int, dtype: DType) -> Iterator[Held]:
    """The parameters of a rank, in the order of vLLM's modules."""
    check_mesh(shape, mesh)
    if not 0 <= rank < mesh.size:
        raise ValueError(f"there is no rank {rank} in an engine of {mesh.size}")
    stage, index = divmod(rank, mesh.tensor)
    cut = Cut(specs(shape, dtype), index, mesh.tensor)
    if stage == 0:
        yield _vocabulary(cut, "model.embed_tokens.weight")
    for layer in _layers(shape.num_hidden_layers, mesh.pipeline, stage):
        at = f"model.layers.{layer}"
        yield from _attention(cut, f"{at}.self_attn", shape.num_key_value_heads)
        if shape.mlp_layer_types[layer] == "dense":
            yield from _mlp(cut, f"{at}.mlp")
        else:
            yield from _experts(cut, f"{at}.mlp", shape.num_experts, mesh.experts)
        for name in ("input", "pre_feedforward", "post_attention", "post_feedforward"):
            yield joined(f"{at}.{name}_layernorm.weight", cut.whole(f"{at}.{name}_layernorm.weight"))
    if stage == mesh.pipeline - 1:
        yield joined("model.norm.weight", cut.whole("model.norm.weight"))
        yield _vocabulary(cut, "lm_head.weight")


def _layers(layers: int, stages: int, stage: int) -> range:
    """The layers of a pipeline stage. What is left over goes one each to the stages before the last, from the back."""
    each, left = divmod(layers, stages)
    sizes = [each + (stages - 1 - left <= s < stages - 1) for s in range(stages)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def _vocabulary(cut: Cut, name: str) -> Held:
    """Equal numbers of rows on all ranks. The last ranks hold fewer of the vocabulary, or none, and filling."""
    spec = cut.specs[name]
    rows = _padded(spec.shape[0]) // cut.count
    return Held(name, (rows, spec.shape[1]), spec.dtype, cut.rows(name, cut.index * rows, (cut.index + 1) * rows))


def _padded(rows: int) -> int:
    return ceil(rows / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _attention(cut: Cut, at: str, kv_heads: int) -> Iterator[Held]:
    q, gate = cut.share(f"{at}.q_proj.weight"), cut.share(f"{at}.gate_proj.weight")
    k, v = (cut.share(f"{at}.{name}_proj.weight", most=kv_heads) for name in "kv")
    yield joined(f"{at}.gate_bias", cut.share(f"{at}.gate_bias"))
    if kv_heads >= cut.count:
        yield joined(f"{at}.qkv_gate_proj.weight", q, k, v, gate)
    else:
        yield joined(f"{at}.qkv_proj.weight", q, k, v)
        yield joined(f"{at}.output_gate_proj.weight", gate)
    yield joined(f"{at}.o_proj.weight", cut.share(f"{at}.o_proj.weight", dim=1))
    for name in ("q_norm", "k_norm"):
        yield joined(f"{at}.{name}.weight", cut.whole(f"{at}.{name}.weight"))


def _mlp(cut: Cut, at: str) -> Iterator[Held]:
    gate, up = (cut.share(f"{at}.{name}_proj.weight") for name in ("gate", "up"))
    yield joined(f"{at}.gate_up_proj.weight", gate, up)
    yield joined(f"{at}.down_proj.weight", cut.share(f"{at}.down_proj.weight", dim=1))


def _experts(cut: Cut, at: str, experts: int, whole: bool) -> Iterator[Held]:
    for name in ("weight", "e_score_correction_bias"):
        yield joined(f"{at}.gate.{name}", cut.whole(f"{at}.gate.{name}"))
    held = _whole_experts(experts, cut.count, cut.index) if whole else range(experts)
    within = Cut(cut.specs, 0, 1) if whole else cut
    above = [within.share(f"{at}.experts.{e}.{name}_proj.weight") for e in held for name in ("gate", "up")]
    below = [within.share(f"{at}.experts.{e}.down_proj.weight", dim=1) for e in held]
    yield stacked(f"{at}.experts.routed_experts.w13_weight", len(held), above)
    yield stacked(f"{at}.experts.routed_experts.w2_weight", len(held), below)


def _whole_experts(experts: int, ranks: int, rank: int) -> range:
    """Neighbours in a row; what is left over goes one each to the first ranks (vLLM's placement ``linear``)."""
    each, left = divmod(experts, ranks)
    first = rank * each + min(rank, left)
    return range(first, first + each + (rank < left))
