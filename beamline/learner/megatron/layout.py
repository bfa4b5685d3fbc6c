"""Where a Beam lies in the learner over Megatron-Core: which slice of which tensor in which parameter of which rank."""

from collections.abc import Iterator

from beamline.learner.megatron.mesh import Mesh, Place, check_mesh, stage_layers
from beamline.model.beam import BeamShape
from beamline.model.layout import DType, Layout
from beamline.model.placement import Cut, Held, joined, specs, stacked


def learner_layout(shape: BeamShape, mesh: Mesh, dtype: DType) -> Layout:
    """The slices of all ranks, each in the order of :func:`held`.

    Raises:
        ModelError: the model cannot be cut for this mesh.
    """
    return Layout(
        tuple(tuple(p for each in held(shape, mesh, rank, dtype) for p in each.parts) for rank in range(mesh.size))
    )


def held(shape: BeamShape, mesh: Mesh, rank: int, dtype: DType) -> tuple[Held, ...]:
    """The parameters of a rank, in the order of the model's ``named_parameters()``; the router's bias is a buffer.

    Raises:
        ModelError: the model cannot be cut for this mesh.
        ValueError: there is no such rank.
    """
    check_mesh(shape, mesh)
    return tuple(_held(shape, mesh, mesh.place(rank), dtype))


def _held(shape: BeamShape, mesh: Mesh, place: Place, dtype: DType) -> Iterator[Held]:
    tensor = Cut(specs(shape, dtype), place.tensor, mesh.tensor)
    if place.stage == 0:
        yield joined("model.embed_tokens.weight", tensor.share("model.embed_tokens.weight"))
    for layer in stage_layers(shape.num_hidden_layers, mesh.pipeline, place.stage):
        at = f"model.layers.{layer}"
        yield from _attention(tensor, f"{at}.self_attn")
        if shape.mlp_layer_types[layer] == "dense":
            yield from _mlp(tensor, f"{at}.mlp")
        else:
            yield from _experts(tensor, f"{at}.mlp", _experts_of(shape, mesh, place))
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield joined(f"{at}.{name}_layernorm.weight", tensor.whole(f"{at}.{name}_layernorm.weight"))
    if place.stage == mesh.pipeline - 1:
        yield joined("model.norm.weight", tensor.whole("model.norm.weight"))
        yield joined("lm_head.weight", tensor.share("lm_head.weight"))


def _attention(cut: Cut, at: str) -> Iterator[Held]:
    """A rank's query heads are those of its key heads; its gate and gate bias those of its query heads."""
    yield joined(f"{at}.gate_bias", cut.share(f"{at}.gate_bias"))
    yield joined(f"{at}.qkvg_proj.weight", *(cut.share(f"{at}.{name}_proj.weight") for name in ("q", "k", "v", "gate")))
    yield joined(f"{at}.o_proj.weight", cut.share(f"{at}.o_proj.weight", dim=1))
    for name in ("q_norm", "k_norm"):
        yield joined(f"{at}.{name}.weight", cut.whole(f"{at}.{name}.weight"))


def _mlp(cut: Cut, at: str) -> Iterator[Held]:
    yield joined(f"{at}.gate_up_proj.weight", *(cut.share(f"{at}.{name}_proj.weight") for name in ("gate", "up")))
    yield joined(f"{at}.down_proj.weight", cut.share(f"{at}.down_proj.weight", dim=1))


def _experts(cut: Cut, at: str, experts: range) -> Iterator[Held]:
    for name in ("weight", "e_score_correction_bias"):
        yield joined(f"{at}.gate.{name}", cut.whole(f"{at}.gate.{name}"))
    above = [cut.whole(f"{at}.experts.{e}.{name}_proj.weight") for e in experts for name in ("gate", "up")]
    below = [cut.whole(f"{at}.experts.{e}.down_proj.weight") for e in experts]
    yield stacked(f"{at}.experts.gate_up_proj", len(experts), above)
    yield stacked(f"{at}.experts.down_proj", len(experts), below)


def _experts_of(shape: BeamShape, mesh: Mesh, place: Place) -> range:
    each = shape.num_experts // mesh.expert
    return range(place.expert * each, (place.expert + 1) * each)
