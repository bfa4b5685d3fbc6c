"""A pipeline stage of a Beam, on one rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BeamConfig
from transformers.models.beam.modeling_beam import BeamRMSNorm

from beamline.config.policy import Recompute
from beamline.learner.megatron.flat import Flat, Kind
from beamline.learner.megatron.head import head_logprobs
from beamline.learner.megatron.layers import Layer, column
from beamline.learner.megatron.layout import held
from beamline.learner.megatron.mesh import Mesh, stage_layers
from beamline.learner.megatron.packed import Packed
from beamline.learner.megatron.recompute import kept, recomputed
from beamline.model.beam import BeamShape
from beamline.model.layout import DType
from beamline.model.placement import Held, Placed
from beamline.policy.model import stored_weights
from beamline.policy.passes import norm
from beamline.transfer.dtypes import TORCH_DTYPES


@dataclass
class ParallelConfig(ModelParallelConfig):  # type: ignore[misc]
    """What Megatron-Core's layers and schedules ask for beyond how a model is cut."""

    hidden_size: int = 0
    calculate_per_token_loss: bool = True  # losses are sums: nothing is divided by a number of micro-batches


def parallel_config(config: BeamConfig, mesh: Mesh, dtype: torch.dtype) -> ParallelConfig:
    """How Megatron-Core cuts the model over a mesh. Parameters are not filled, and have no device yet."""
    return ParallelConfig(
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=mesh.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        hidden_size=config.hidden_size,
    )


def initialize(mesh: Mesh) -> None:
    """Make the process groups of a mesh, in a process group of all its ranks; again does nothing.

    Raises:
        RuntimeError: there are other groups already.
    """
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.tensor,
            pipeline_model_parallel_size=mesh.pipeline,
            expert_model_parallel_size=mesh.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
    place = mesh.place(torch.distributed.get_rank())
    found = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    if found != (place.tensor, place.data, place.expert, place.stage):
        raise RuntimeError(f"Megatron-Core puts this rank at {found} (tensor, data, expert, stage), and we at {place}")


class Stage(nn.Module):
    """The layers of this rank's pipeline stage; the first stage has the embedding, the last one the head.

    The process groups of the mesh must have been made. Weights are allocated on ``device`` and hold anything.
    ``recompute`` says what a layer does not keep for the backward pass: what lies between products of matrices
    (selective), or anything but its input (full).

    Raises:
        ModelError: the model cannot be cut for the mesh.
    """

    model_type = ModelType.encoder_or_decoder  # for Megatron-Core's schedules

    def __init__(
        self, config: BeamConfig, mesh: Mesh, dtype: DType, device: torch.device, recompute: Recompute = "none"
    ) -> None:
        super().__init__()
        self._recompute = recompute
        self.beam, self.shape = config, BeamShape.from_config(config.to_dict())
        self.config = parallel_config(config, mesh, TORCH_DTYPES[dtype])
        rank = torch.distributed.get_rank()
        self._mesh, self._stage = mesh, mesh.place(rank).stage
        self._held = held(self.shape, mesh, rank, dtype)
        self._input: Tensor | None = None
        with torch.device("meta"):
            self._build(parallel_state.get_expert_model_parallel_group())
        self.flats = list(self._flats(device))
        for flat in self.flats:
            for name, parameter in flat.parameters.items():
                _replace(self, name, parameter)
        for name, buffer in self.named_buffers():
            _replace(self, name, torch.empty_like(buffer, device=device))

    @property
    def first(self) -> bool:
        """Whether token ids go in."""
        return self._stage == 0

    @property
    def last(self) -> bool:
        """Whether log-probabilities come out."""
        return self._stage == self._mesh.pipeline - 1

    def placed(self) -> Iterator[tuple[Placed, Tensor]]:
        """Each slice of a checkpoint's tensor that lies here, and where: a view of a parameter or buffer."""
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        for each in self._held:
            for part in each.placed():
                view = own[part.parameter].data[part.box]
                yield part, view[0] if view.dim() > len(part.part.size) else view

    def read(self, folder: Path) -> None:
        """Fill it from a Hugging Face folder, of which this rank's slices alone are read. Types are cast.

        Raises:
            ModelError: the folder cannot be used: see :func:`beamline.policy.model.stored_weights`.
        """
        with stored_weights(folder, self.shape) as read:
            for each, view in self.placed():
                view.copy_(read(each.part))

    def _flats(self, device: torch.device) -> Iterator[Flat]:
        """Memory for the parameters, each kind in one piece."""
        kinds: dict[Kind, list[Held]] = {}
        names = {name for name, _ in self.named_parameters()}
        for each in self._held:
            if each.name in names:
                kinds.setdefault(Kind.of(each), []).append(each)
        data, experts = parallel_state.get_data_parallel_group(), parallel_state.get_expert_data_parallel_group()
        for kind, members in kinds.items():
            yield Flat(kind, members, experts if kind.expert else data, device)

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take what the stage before made, as Megatron-Core's schedules hand it over."""
        (self._input,) = tensors

    def forward(self, input_ids_N: Tensor, packed: Packed) -> Tensor:
        """Hidden states of this rank's rows ``[rows, 1, D]``; the last stage's, after the final norm, of all rows.

        ``input_ids_N`` are used by the first stage alone. N is a multiple of the tensor ranks.
        """
        h, model = self._input, cast(Any, self.model)
        self._input = None
        if self.first:
            h = model.embed_tokens(input_ids_N[None])
            h = h if self.config.sequence_parallel else h.transpose(0, 1)
        assert h is not None
        for layer in model.layers.values():
            if self._recompute == "full" and torch.is_grad_enabled():
                h = checkpoint(layer, h, packed, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, packed)
        if self.last:
            h = norm(h, model.norm.weight, self.beam.rms_norm_eps)
            if self.config.sequence_parallel:
                h = gather_from_sequence_parallel_region(h)
        return h

    def logprobs(
        self, hidden_N1D: Tensor, rows: Tensor, target_N: Tensor, temperature_N: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the given rows, from what the last stage gave."""
        return head_logprobs(
            hidden_N1D.squeeze(1)[rows],
            self.lm_head.weight,
            target_N[rows],
            temperature_N[rows],
            self.beam.final_logit_softcapping,
            chunk_rows,
            parallel_state.get_tensor_model_parallel_group(),
        )

    def _build(self, experts: torch.distributed.ProcessGroup) -> None:
        config, parallel = self.beam, self.config
        self.model = nn.Module()
        if self.first:
            self.model.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                init_method=lambda _: None,
                reduce_scatter_embeddings=parallel.sequence_parallel,
                config=parallel,
            )
        layers = stage_layers(config.num_hidden_layers, self._mesh.pipeline, self._stage)
        make = recomputed if self._recompute == "selective" else kept
        self.model.layers = nn.ModuleDict({str(i): Layer(config, i, parallel, experts, make) for i in layers})
        if self.last:
            self.model.norm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps).to(parallel.params_dtype)
            self.lm_head = column(config.hidden_size, config.vocab_size, parallel)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or buffer in the place of the one of this name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)
