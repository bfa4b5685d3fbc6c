"""How many ranks there are, what each of them stands for, and which models can be cut for them. Imports no torch."""

from dataclasses import dataclass
from itertools import accumulate

from beamline.model.beam import BeamShape, ModelError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its index among tensor ranks, data ranks, expert ranks, and its pipeline stage."""

    tensor: int
    data: int
    expert: int
    stage: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a learner.

    ``tensor`` ranks share each attention and dense layer, and the rows of everything between them (sequence parallel).
    ``expert`` ranks share the experts of each layer; they are taken from the ``tensor * data`` ranks of a stage, in
    order, so that experts cost no ranks of their own. ``pipeline`` stages share the layers.

    Ranks are numbered as Megatron-Core does (tp-ep-dp-pp): tensor ranks are neighbours, stages are far apart.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.data

    @property
    def size(self) -> int:
        """All ranks."""
        return self.stage_size * self.pipeline

    def place(self, rank: int) -> Place:
        """What a rank stands for.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in a mesh of {self.size}")
        stage, within = divmod(rank, self.stage_size)
        data, tensor = divmod(within, self.tensor)
        return Place(tensor, data, within % self.expert, stage)


def mesh_of(world: int, tensor: int, expert: int, pipeline: int) -> Mesh:
    """The mesh of so many ranks: what tensor and pipeline ranks leave is data parallel.

    Raises:
        ModelError: the numbers do not divide each other, with the rule and what would do.
    """
    if world % (tensor * pipeline):
        raise ModelError(
            f"{world} ranks are not a multiple of tensor={tensor} x pipeline={pipeline}: "
            f"use {_next_multiple(world, tensor * pipeline)} ranks, or others of these"
        )
    data = world // (tensor * pipeline)
    if (tensor * data) % expert:
        possible = [n for n in range(1, tensor * data + 1) if tensor * data % n == 0]
        raise ModelError(
            f"expert={expert} ranks are taken from the {tensor * data} of a pipeline stage (tensor={tensor} x "
            f"data={data}), which they must divide: use {_listed(possible)}"
        )
    return Mesh(tensor, expert, pipeline, data)


def check_mesh(shape: BeamShape, mesh: Mesh) -> None:
    """Ask whether the model can be cut for these ranks.

    Raises:
        ModelError: it cannot, with the number, the rule and what would do.
    """
    layers = shape.num_hidden_layers
    if not 1 <= mesh.pipeline <= layers:
        raise ModelError(f"pipeline={mesh.pipeline} stages for {layers} layers: use 1 to {layers}")
    if broken := _broken_by_tensor(shape, mesh.tensor):
        possible = [n for n in range(1, shape.num_key_value_heads + 1) if not _broken_by_tensor(shape, n)]
        raise ModelError(f"tensor={mesh.tensor} ranks: {'; '.join(broken)}: use {_listed(possible)}")
    if shape.moe_layers and shape.num_experts % mesh.expert:
        possible = [n for n in range(1, shape.num_experts + 1) if shape.num_experts % n == 0]
        raise ModelError(
            f"expert={mesh.expert} ranks: num_experts={shape.num_experts} is not divisible by them: use "
            f"{_listed(possible)}"
        )


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of a pipeline stage, whole Beam layers; the first stages take one more where they do not divide."""
    each, left = divmod(layers, stages)
    borders = [0, *accumulate(each + (s < left) for s in range(stages))]
    return range(borders[stage], borders[stage + 1])


def _broken_by_tensor(shape: BeamShape, ranks: int) -> list[str]:
    divided = {"num_key_value_heads": shape.num_key_value_heads, "vocab_size": shape.vocab_size}
    if "dense" in shape.mlp_layer_types:
        divided["intermediate_size"] = shape.intermediate_size
    return [f"{name}={size} is not divisible by {ranks}" for name, size in divided.items() if size % ranks]


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
