"""Where a Beam lies inside a vLLM engine: which slice of which checkpoint tensor in which parameter of which rank.

Described is the format into which vLLM 0.33 loads a checkpoint (``vllm/models/beam/nvidia``), before any kernel pads or
reorders weights. Data parallelism within an engine is not used, so that experts spread over the tensor ranks alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from beamline.model.beam import BeamShape, ModelError, TensorSpec, tensors
from beamline.model.layout import DType, Layout, TensorSlice

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


@dataclass(frozen=True, slots=True)
class Placed:
    """``part`` lies in ``parameter[box]``; a stack of experts adds a first dimension to the box, 1 long.

    ``shape`` is that of the whole parameter.
    """

    part: TensorSlice
    parameter: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]


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


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter and its parts, one after the other: along the rows and, in a stack, from expert to expert."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[TensorSlice, ...]

    def placed(self) -> Iterator[Placed]:
        """Each part with its box."""
        stacked, first = len(self.shape) == 3, 0
        for part in self.parts:
            expert, row = divmod(first, self.shape[1 if stacked else 0])
            box = (slice(row, row + part.size[0]), *(slice(0, n) for n in part.size[1:]))
            yield Placed(part, self.name, self.shape, (slice(expert, expert + 1), *box) if stacked else box)
            first += part.size[0]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Takes the slices of tensor rank ``index`` of ``count`` out of the tensors of a checkpoint."""

    specs: Mapping[str, TensorSpec]
    index: int
    count: int

    def whole(self, name: str) -> TensorSlice:
        """All of a tensor, on every rank."""
        spec = self.specs[name]
        return TensorSlice.whole(spec.name, spec.dtype, spec.shape)

    def share(self, name: str, dim: int = 0, most: int | None = None) -> TensorSlice:
        """One of equal parts along a dimension: of ``count``, or of ``most`` if fewer, which neighbours then share."""
        count = min(self.count, most or self.count)
        size = self.specs[name].shape[dim] // count
        start = self.index * count // self.count * size
        return self._between(name, dim, start, start + size)

    def rows(self, name: str, start: int, stop: int) -> tuple[TensorSlice, ...]:
        """Those of the rows ``start:stop`` that there are."""
        stop = min(stop, self.specs[name].shape[0])
        return (self._between(name, 0, start, stop),) if start < stop else ()

    def _between(self, name: str, dim: int, start: int, stop: int) -> TensorSlice:
        spec = self.specs[name]
        starts, stops = [0] * len(spec.shape), list(spec.shape)
        starts[dim], stops[dim] = start, stop
        return TensorSlice(spec.name, spec.dtype, spec.shape, tuple(starts), tuple(stops))


def _held(shape: BeamShape, mesh: Mesh, rank: int, dtype: DType) -> Iterator[_Held]:
    """The parameters of a rank, in the order of vLLM's modules."""
    check_mesh(shape, mesh)
    if not 0 <= rank < mesh.size:
        raise ValueError(f"there is no rank {rank} in an engine of {mesh.size}")
    stage, index = divmod(rank, mesh.tensor)
    cut = _Cut(_specs(shape, dtype), index, mesh.tensor)
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
            yield _joined(f"{at}.{name}_layernorm.weight", cut.whole(f"{at}.{name}_layernorm.weight"))
    if stage == mesh.pipeline - 1:
        yield _joined("model.norm.weight", cut.whole("model.norm.weight"))
        yield _vocabulary(cut, "lm_head.weight")


@lru_cache(maxsize=1)
def _specs(shape: BeamShape, dtype: DType) -> Mapping[str, TensorSpec]:
    """The checkpoint's tensors by name; kept for the next rank, since there are tens of thousands."""
    return {spec.name: spec for spec in tensors(shape, dtype)}


def _layers(layers: int, stages: int, stage: int) -> range:
    """The layers of a pipeline stage. What is left over goes one each to the stages before the last, from the back."""
    each, left = divmod(layers, stages)
    sizes = [each + (stages - 1 - left <= s < stages - 1) for s in range(stages)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def _joined(parameter: str, *parts: TensorSlice) -> _Held:
    """A parameter that is its parts one below the other."""
    rows, others = sum(part.size[0] for part in parts), parts[0].size[1:]
    return _Held(parameter, (rows, *others), parts[0].dtype, parts)


def _vocabulary(cut: _Cut, name: str) -> _Held:
    """Equal numbers of rows on all ranks. The last ranks hold fewer of the vocabulary, or none, and filling."""
    spec = cut.specs[name]
    rows = _padded(spec.shape[0]) // cut.count
    return _Held(name, (rows, spec.shape[1]), spec.dtype, cut.rows(name, cut.index * rows, (cut.index + 1) * rows))


def _padded(rows: int) -> int:
    return ceil(rows / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _attention(cut: _Cut, at: str, kv_heads: int) -> Iterator[_Held]:
    q, gate = cut.share(f"{at}.q_proj.weight"), cut.share(f"{at}.gate_proj.weight")
    k, v = (cut.share(f"{at}.{name}_proj.weight", most=kv_heads) for name in "kv")
    yield _joined(f"{at}.gate_bias", cut.share(f"{at}.gate_bias"))
    if kv_heads >= cut.count:
        yield _joined(f"{at}.qkv_gate_proj.weight", q, k, v, gate)
    else:
        yield _joined(f"{at}.qkv_proj.weight", q, k, v)
        yield _joined(f"{at}.output_gate_proj.weight", gate)
    yield _joined(f"{at}.o_proj.weight", cut.share(f"{at}.o_proj.weight", dim=1))
    for name in ("q_norm", "k_norm"):
        yield _joined(f"{at}.{name}.weight", cut.whole(f"{at}.{name}.weight"))


def _mlp(cut: _Cut, at: str) -> Iterator[_Held]:
    gate, up = (cut.share(f"{at}.{name}_proj.weight") for name in ("gate", "up"))
    yield _joined(f"{at}.gate_up_proj.weight", gate, up)
    yield _joined(f"{at}.down_proj.weight", cut.share(f"{at}.down_proj.weight", dim=1))


def _experts(cut: _Cut, at: str, experts: int, whole: bool) -> Iterator[_Held]:
    for name in ("weight", "e_score_correction_bias"):
        yield _joined(f"{at}.gate.{name}", cut.whole(f"{at}.gate.{name}"))
    held = _whole_experts(experts, cut.count, cut.index) if whole else range(experts)
    within = _Cut(cut.specs, 0, 1) if whole else cut
    above = [within.share(f"{at}.experts.{e}.{name}_proj.weight") for e in held for name in ("gate", "up")]
    below = [within.share(f"{at}.experts.{e}.down_proj.weight", dim=1) for e in held]
    yield _stacked(f"{at}.experts.routed_experts.w13_weight", len(held), above)
    yield _stacked(f"{at}.experts.routed_experts.w2_weight", len(held), below)


def _whole_experts(experts: int, ranks: int, rank: int) -> range:
    """Neighbours in a row; what is left over goes one each to the first ranks (vLLM's placement ``linear``)."""
    each, left = divmod(experts, ranks)
    first = rank * each + min(rank, left)
    return range(first, first + each + (rank < left))


def _stacked(parameter: str, experts: int, parts: list[TensorSlice]) -> _Held:
    joined = _joined(parameter, *parts)
    rows, columns = joined.shape
    return _Held(parameter, (experts, rows // experts, columns), joined.dtype, joined.parts)
