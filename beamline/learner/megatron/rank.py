"""What each rank of the learner does when all of them are asked for the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from beamline.algorithms.diagnostics import Learned
from beamline.algorithms.loss import LossConfig
from beamline.checkpoint.files import FileDigest
from beamline.checkpoint.shards import Group, ShardReader, ShardWriter
from beamline.config.schema import LearnerConfig
from beamline.learner.megatron.mesh import Mesh
from beamline.learner.megatron.model import Stage
from beamline.learner.megatron.optimizer import MOMENTS, Optimizer
from beamline.learner.megatron.packed import Packed
from beamline.learner.offload import Offload
from beamline.learner.planning import Planned, micro_batches
from beamline.learner.update import loss_of, micro_batch
from beamline.model.layout import TensorSlice
from beamline.policy.device import on_device
from beamline.policy.model import saved
from beamline.policy.weights import raw
from beamline.records import Batch, Experience, pack
from beamline.transfer.plan import Shares
from beamline.transfer.source import Packer, first_not_finite

Floats = NDArray[np.float32]
Score = Callable[[Tensor], tuple[Tensor, Callable[[], list[Any]]]]
"""From the last stage's hidden states: the loss, and a function that gives what was found, once all is computed."""
Step = tuple[Batch, Score]
"""A micro-batch and its score."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Log-probabilities and entropies of chosen rows of one sequence, by its index."""

    index: int
    logprobs: Floats
    entropy: Floats


@dataclass(frozen=True, slots=True)
class Trained:
    """What an update found of one micro-batch: the sequences in it, by their indices, its loss, and its tokens."""

    indices: list[int]
    loss: float
    learned: Learned


class Rank:
    """A stage, its optimizer, and what it does with sequences that every rank is given.

    Args:
        stage: with its weights.
        mesh: of all ranks.
        config: micro-batches and optimizer.
        head_chunk_rows: rows whose logits exist at a time.
    """

    def __init__(self, stage: Stage, mesh: Mesh, config: LearnerConfig, head_chunk_rows: int) -> None:
        self.stage, self._mesh, self._config, self._chunk = stage, mesh, config, head_chunk_rows
        self.number = torch.distributed.get_rank()
        self._place = mesh.place(self.number)
        self.optimizer = Optimizer(stage, config.optimizer)
        self._device = next(stage.parameters()).device
        self._offload = Offload(*self.optimizer.memory())
        self._packers: dict[int, Packer] = {}

    @property
    def _reports(self) -> bool:
        """Whether this rank is the one of its data rank that knows what came out."""
        return self.stage.last and self._place.tensor == 0

    def evaluate(self, sequences: Sequence[Experience], chosen: Literal["responses", "all"]) -> list[Evaluated]:
        """Log-probabilities and entropies, without a gradient, of this data rank's share of the sequences."""

        def step(share: list[int]) -> Step:
            packed = pack([sequences[i] for i in share])
            mask_N = packed.loss_mask_N if chosen == "responses" else np.ones(packed.rows, dtype=bool)

            def score(hidden: Tensor) -> tuple[Tensor, Callable[[], list[Any]]]:
                tensors = self._logprobs(packed, torch.from_numpy(mask_N.nonzero()[0]), hidden)

                def found() -> list[Any]:
                    parts = (packed.by_sequence(mask_N, tensor.cpu().numpy()) for tensor in tensors)
                    return [Evaluated(*each) for each in zip(share, *parts, strict=True)]

                return hidden.new_zeros(()), found

            return packed, score

        with torch.no_grad():
            return self._run([sequence.rows for sequence in sequences], step, forward_only=True)

    def update(self, planned: Sequence[Planned], loss: LossConfig) -> list[Trained]:
        """Add up the gradient of this data rank's share of the sequences; gives each micro-batch's loss and tokens."""

        def step(share: list[int]) -> Step:
            micro = micro_batch([planned[i] for i in share], loss).to(self._device)

            def score(hidden: Tensor) -> tuple[Tensor, Callable[[], list[Any]]]:
                total, learned = loss_of(micro, *self._logprobs(micro.batch, micro.rows_T, hidden), loss)
                value = total.detach()
                return total, lambda: [Trained(share, float(value), learned())]

            return micro.batch, score

        return self._run([each.experience.rows for each in planned], step, forward_only=False)

    def forget(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero()

    def apply(self) -> float:
        """Update the weights by the gradient; gives its norm.

        Raises:
            FloatingPointError: it is not finite, on every rank alike; nothing was updated.
        """
        return self.optimizer.step()

    def sleep(self) -> None:
        """Give device memory back."""
        self._offload.sleep()

    def wake(self) -> None:
        """Take it again."""
        self._offload.wake()

    def not_finite(self) -> str | None:
        """The name of a tensor with a weight that is not finite."""
        return next((s.part.name for s in self.optimizer.states() if not bool(torch.isfinite(s.master).all())), None)

    def save(self, folder: Path) -> dict[str, FileDigest]:
        """Write what this rank updates, each once over all ranks: float32 weights and moments, and buffers."""
        writer, states = ShardWriter(folder, self.number), list(self.optimizer.states(alone=True))
        kept = [(each.part, view) for each, view in self._buffers()] if self._keeps_buffers else []
        weights = [(state.part, state.master) for state in states] + kept
        moments = [(_moment(s.part, name), getattr(s, name)) for s in states for name in MOMENTS]
        groups: dict[Group, list[tuple[TensorSlice, Tensor]]] = {"policy": weights, "optimizer": moments}
        for group, tensors in groups.items():
            slices = [_float32(part) for part, _ in tensors]
            writer.write(group, slices, (raw(tensor.cpu()).numpy() for _, tensor in tensors))
        return writer.digests

    def read(self, folder: Path, updates: int) -> None:
        """Read what this rank updates, and its buffers, of what ranks of any mesh wrote.

        Raises:
            CheckpointError: a tensor is missing, or its shape or type is another.
        """
        reader = ShardReader(folder)
        for state in self.optimizer.states():
            state.master.copy_(saved(reader, _float32(state.part)))
            for name in MOMENTS:
                moment = reader.read("optimizer", _float32(_moment(state.part, name)))
                getattr(state, name).copy_(torch.from_numpy(moment).view(torch.float32))
        for each, view in self._buffers():
            view.copy_(saved(reader, _float32(each.part)))
        self.optimizer.updates = updates

    def share(self) -> None:
        """Give all ranks the weights that were read, rounded to what they compute with."""
        self.optimizer.share()

    def weights_not_finite(self) -> str | None:
        """The name of a tensor of which this rank would give away a value that is not finite."""
        held = chain(self.stage.parameters(), self.stage.buffers())
        if all(bool(torch.isfinite(tensor).all()) for tensor in held):
            return None
        return first_not_finite({each.part.name: view for each, view in self.stage.placed()})

    def supply(self, number: int, shares: Shares, bucket_bytes: int) -> int:
        """Find the way of this rank's weights into the ranks of a destination: from now on the supply ``number``.

        Gives how many rounds it takes.
        """
        views = {each.part.name: (each.part, view) for each, view in self.stage.placed()}

        def view_of(part: TensorSlice) -> Tensor:
            held, view = views[part.name]
            return view[part.within(held)]

        self._packers[number] = Packer(shares, self.number, view_of, self._device, bucket_bytes)
        return self._packers[number].rounds

    def of_supply(self, number: int, method: str, *arguments: Any) -> Any:
        """What a method of this rank's :class:`~beamline.transfer.source.Packer` gives."""
        return getattr(self._packers[number], method)(*arguments)

    def end_supply(self, number: int) -> None:
        """Give the memory of its buckets back."""
        self._packers.pop(number).close()

    @property
    def _keeps_buffers(self) -> bool:
        return self._place.tensor == self._place.data == 0

    def _buffers(self) -> Iterator[Any]:
        names = {name for name, _ in self.stage.named_buffers()}
        return (each for each in self.stage.placed() if each[0].parameter in names)

    def _shares(self, rows: Sequence[int]) -> list[list[int]]:
        """This data rank's micro-batches, as indices of sequences; on every rank equally many, some without any."""
        cuts = micro_batches(rows, self._config.micro_batch_tokens)
        data = self._mesh.data
        own = cuts[self._place.data :: data]
        return own + [[]] * (-(-len(cuts) // data) - len(own))

    def _run(self, rows: Sequence[int], step: Callable[[list[int]], Step], forward_only: bool) -> list[Any]:
        """Forward, and backward, over this data rank's micro-batches and all stages (1F1B).

        Gives what their scores found on the rank that reports, and nothing on the others.
        """
        shares = self._shares(rows)
        if not shares:
            return []

        def forward(iterator: Iterator[Step], stage: Stage) -> tuple[Tensor, Any]:
            batch, score = next(iterator)
            ids, borders = self._filled(batch)
            hidden = stage(ids, Packed.of(borders, stage.beam, self._device))
            return hidden, partial(_scored, score)

        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=(step(share) if share else self._nothing() for share in shares),
            model=self.stage,
            num_microbatches=len(shares),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [each for found in results for each in found()] if self._reports else []

    def _filled(self, batch: Batch) -> tuple[Tensor, tuple[int, ...]]:
        """Token ids and borders, with a sequence behind that makes the rows a multiple of the tensor ranks."""
        missing = -batch.rows % self._mesh.tensor
        ids = on_device(torch.from_numpy(np.append(batch.input_ids_N, np.arange(missing))), self._device)
        borders = batch.cu_seqlens_B1.tolist()
        return ids, tuple(borders + [borders[-1] + missing] * bool(missing))

    def _logprobs(self, batch: Batch, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        arrays = batch.target_ids_N, batch.row_temperatures
        target_N, temperature_N = (on_device(torch.from_numpy(array), self._device) for array in arrays)
        return self.stage.logprobs(hidden, on_device(rows, self._device), target_N, temperature_N, self._chunk)

    def _nothing(self) -> Step:
        """A micro-batch that nothing is learned from, for a rank that the others have to wait for at their experts."""
        ids = np.arange(self._mesh.tensor, dtype=np.int64)
        zeros = np.zeros(len(ids), dtype=np.float32)
        batch = Batch(ids, ids, ids, np.array([0, len(ids)]), zeros > 0, zeros, zeros, np.ones(1, np.float32), None)
        return batch, lambda hidden: (hidden.sum() * 0, list)


def _scored(score: Score, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
    """What Megatron-Core's schedules want of a loss: its value, a number of tokens (of no use here), what to keep."""
    total, found = score(hidden)
    return total, torch.zeros((), dtype=torch.int, device=hidden.device), found


def _moment(part: TensorSlice, name: str) -> TensorSlice:
    return replace(part, name=f"{part.name}/{name}")


def _float32(part: TensorSlice) -> TensorSlice:
    return replace(part, dtype="float32")
