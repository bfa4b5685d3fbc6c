"""Adapters of a Beam, torch-free: which linear layers have one, what they share, and the names of their tensors.

An adapter adds ``alpha / rank * B A x`` to what a linear layer makes of x. Linears that read the same input share
their A: q, k, v and the output gate of attention, gate and up of an MLP or expert. Each has a B of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from beamline.model.beam import BeamShape, ModelError, TensorSpec

ExpertAdapters = Literal["per_expert", "shared_per_layer", "none"]


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The numbers that fix an adapter's tensors, for a model of some shape.

    ``targets`` are ends of names of linear layers, without layer and expert (``q_proj``, ``mlp.experts.down_proj``), or
    None for all.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    experts: ExpertAdapters = "per_expert"

    @property
    def scale(self) -> float:
        """What ``B A x`` is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Site:
    """Linear layers that read one input, and so share an A: in layer ``layer``, under ``place``.

    ``outputs`` has the rows of each of these ``projections``, in the order in which engines stack them; an adapter acts
    on those in ``adapted``. ``sets`` is how many adapters there are, and ``experts`` how many experts they serve; None
    outside of experts.
    """

    layer: int
    place: str
    projections: tuple[str, ...]
    outputs: tuple[int, ...]
    adapted: tuple[str, ...]
    inputs: int
    sets: int = 1
    experts: int | None = None

    @property
    def name(self) -> str:
        """Place and first projection: unique in a model."""
        return f"{self.place}.{self.projections[0]}"

    @property
    def rows(self) -> int:
        """Rows of all projections stacked."""
        return sum(self.outputs)

    def adapters(self) -> Iterator[tuple[int, str]]:
        """Each adapter's index, and the place that its tensors' names begin with.

        One that all experts share stands under the name of the stack, ``mlp.experts``, without a number.
        """
        if self.sets == 1:
            yield 0, self.place
        else:
            for expert in range(self.sets):
                yield expert, f"{self.place}.{expert}"

    def served(self) -> Iterator[tuple[str, int, str]]:
        """Each place in the model that has these linears, and the index and the place of the adapter that serves it."""
        for expert in range(self.experts or 1):
            place = self.place if self.experts is None else f"{self.place}.{expert}"
            yield place, *((0, self.place) if self.sets == 1 else (expert, place))

    def spans(self) -> Iterator[tuple[str, slice]]:
        """The adapted projections, and their rows among the stacked ones."""
        start = 0
        for projection, rows in zip(self.projections, self.outputs, strict=True):
            if projection in self.adapted:
                yield projection, slice(start, start + rows)
            start += rows


def sites(shape: BeamShape, lora: LoraShape) -> tuple[Site, ...]:
    """Where a model has adapters, in layer order.

    Raises:
        ModelError: a target names no linear layer of the model, or experts are to be adapted and there are none, or
            none of their linear layers is a target.
    """
    possible = [site for layer in range(shape.num_hidden_layers) for site in _layer(shape, lora, layer)]
    names = {kind_of(f"{site.place}.{projection}") for site in possible for projection in site.projections}
    if lora.targets is not None:
        unmatched = [target for target in lora.targets if not any(_matches(name, target) for name in names)]
        if unmatched:
            raise ModelError(
                f"policy.lora.targets: {', '.join(unmatched)} matched no linear layer of the model; there are "
                f"{', '.join(sorted(names))}"
                + (" (policy.lora.experts=none leaves experts out)" if lora.experts == "none" else "")
            )
    elif lora.experts != "none" and not shape.moe_layers:
        raise ModelError(f"policy.lora.experts={lora.experts} matched nothing: the model has no experts; use none")
    found = tuple(site for site in possible if site.adapted)
    if lora.experts == "shared_per_layer" and not any(site.experts for site in found):
        raise ModelError(
            f"policy.lora.experts=shared_per_layer has no use: policy.lora.targets={list(lora.targets or [])} names no "
            "linear layer of experts of the model"
        )
    return found


def adapter_tensors(shape: BeamShape, lora: LoraShape) -> Iterator[TensorSpec]:
    """Every tensor of an adapter, under the name of the linear layer; a shared A under that of the first to share it.

    Names are those of PEFT files but for their prefix, in which a shared A is repeated.
    """
    for site in sites(shape, lora):
        for _, place in site.adapters():
            yield TensorSpec(f"{place}.{site.adapted[0]}.lora_A.weight", (lora.rank, site.inputs), "float32")
            for projection, rows in site.spans():
                size = (rows.stop - rows.start, lora.rank)
                yield TensorSpec(f"{place}.{projection}.lora_B.weight", size, "float32")


def _layer(shape: BeamShape, lora: LoraShape, layer: int) -> Iterator[Site]:
    D, d = shape.hidden_size, shape.head_dim
    q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    yield _site(lora, layer, attention, {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": q}, D)
    yield _site(lora, layer, attention, {"o_proj": D}, q)
    width, sets, experts = shape.intermediate_size, 1, None
    if shape.mlp_layer_types[layer] == "sparse":
        if lora.experts == "none":
            return
        width, experts, mlp = shape.moe_intermediate_size, shape.num_experts, f"{mlp}.experts"
        sets = shape.num_experts if lora.experts == "per_expert" else 1
    yield _site(lora, layer, mlp, {"gate_proj": width, "up_proj": width}, D, sets, experts)
    yield _site(lora, layer, mlp, {"down_proj": D}, width, sets, experts)


def _site(
    lora: LoraShape, layer: int, place: str, outputs: dict[str, int], inputs: int, sets: int = 1,
    experts: int | None = None,
) -> Site:  # fmt: skip
    kinds = {projection: kind_of(f"{place}.{projection}") for projection in outputs}
    adapted = tuple(p for p, kind in kinds.items() if lora.targets is None or _is_named(kind, lora.targets))
    return Site(layer, place, tuple(outputs), tuple(outputs.values()), adapted, inputs, sets, experts)


def kind_of(linear: str) -> str:
    """The name of a linear layer without layer and expert: ``mlp.experts.gate_proj``."""
    return ".".join(part for part in linear.removeprefix("model.layers.").split(".") if not part.isdigit())


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_named(name: str, targets: Sequence[str]) -> bool:
    return any(_matches(name, target) for target in targets)
