"""How weights go into an engine: what each rank is given, through which memory, and whether it arrived."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from beamline.model.layout import Layout, TensorSlice
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.messages import Fill, Finish, Loaded, Prepare
from beamline.transfer.buckets import Copier, buckets, checksum, sample
from beamline.transfer.memory import SharedMemory, cuda_memory, host_memory
from beamline.transfer.plan import TransferError, TransferPlan

_SLOTS = 2  # buckets under way for each rank: one is packed while another is taken


def parts_of(plan: TransferPlan, destination: Layout) -> list[list[TensorSlice]]:
    """What each rank of the destination is given, in order, in the types that it holds."""
    types = {each.name: each.dtype for rank in destination.ranks for each in rank}
    parts: list[list[TensorSlice]] = [[] for _ in destination.ranks]
    for move in plan.moves:
        parts[move.destination].append(replace(move.part, dtype=types[move.part.name]))
    return parts


class Delivery:
    """The way of weights from tensors of this process into one engine, under one plan; found once, used at every sync.

    Tensors in a GPU's memory stay there: the engine maps the bucket (CUDA IPC). Others go through host memory.

    Args:
        parts: what each rank of the engine is given.
        source: the tensors that the parts are of, whole, by Hugging Face name.
        bucket_bytes: most bytes that are handed over at a time, to a rank.
    """

    def __init__(self, parts: Sequence[Sequence[TensorSlice]], source: Mapping[str, Tensor], bucket_bytes: int) -> None:
        self._parts, self._source, self._bucket_bytes = parts, source, bucket_bytes
        cut = [buckets(rank, bucket_bytes) for rank in parts]
        self._copiers = [[Copier(bucket, self._view) for bucket in rank] for rank in cut]
        self._sizes = [max((bucket.nbytes for bucket in rank), default=0) for rank in cut]
        self._samples = [sample(rank) for rank in parts]
        self._memory: list[list[SharedMemory]] = []

    def checksums(self) -> list[list[int]]:
        """Of a fixed sample of what each rank is given, as the source has it now."""
        return [[checksum(self._view(part), part.dtype) for part in sampled] for sampled in self._samples]

    def deliver(self, fleet: Fleet, replica: int, version: int) -> list[list[int]]:
        """Bring the weights into an engine, which stamps tokens with ``version`` from then on; gives their checksums.

        Raises:
            EngineFailedError: the engine failed meanwhile.
            TransferError: what it holds afterwards is not what was sent.
        """
        engine = fleet.replicas[replica]
        prepared_for, engine.prepared_for = engine.prepared_for, None
        if prepared_for is not self:
            parts = [list(rank) for rank in self._parts]
            fleet.ask(replica, lambda number: Prepare(number, parts, self._bucket_bytes), type(None))
            self._take_memory()
        under_way: list[int] = []
        for bucket in range(max(map(len, self._copiers))):
            if len(under_way) == _SLOTS:
                engine.answer(under_way.pop(0), type(None))
            number = fleet.number()
            engine.send(Fill(number, bucket, self._packed(bucket)))
            under_way.append(number)
        for number in under_way:
            engine.answer(number, type(None))
        loaded = fleet.ask(replica, lambda number: Finish(number, version), Loaded)
        sent = self.checksums()
        self._compare(engine.name, sent, loaded.checksums)
        engine.prepared_for = self  # not before: one that broke off begins anew
        return sent

    def close(self) -> None:
        """Give the memory of buckets back."""
        for rank in self._memory:
            for each in rank:
                each.close()
        self._memory = []

    def _view(self, part: TensorSlice) -> Tensor:
        return self._source[part.name][part.index]

    def _take_memory(self) -> None:
        """New memory, because that of a GPU has one reader in all its life."""
        self.close()
        for rank, nbytes in zip(self._parts, self._sizes, strict=True):
            device = self._source[rank[0].name].device
            self._memory.append([_memory(nbytes, device) for _ in range(_SLOTS)])

    def _packed(self, bucket: int) -> list[bytes]:
        """Fill the memory of each rank with its bucket of this number; empty for ranks that have no so many."""
        described = []
        for copiers, slots in zip(self._copiers, self._memory, strict=True):
            if bucket >= len(copiers):
                described.append(b"")
                continue
            slot = slots[bucket % _SLOTS]
            copiers[bucket].pack(slot.buffer)
            if slot.buffer.is_cuda:
                torch.cuda.synchronize(slot.buffer.device)
            described.append(slot.descriptor)
        return described

    def _compare(self, engine: str, sent: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> None:
        for rank, (ours, theirs) in enumerate(zip(sent, found, strict=True)):
            for part, one, other in zip(self._samples[rank], ours, theirs, strict=True):
                if one != other:
                    raise TransferError(
                        f"engine {engine}, rank {rank}: {part.start}:{part.stop} of {part.name} is not what was sent "
                        f"(checksum {other:08x}, not {one:08x}); its weights cannot be trusted"
                    )


def _memory(nbytes: int, device: torch.device) -> SharedMemory:
    return cuda_memory(nbytes, device) if device.type == "cuda" else host_memory(nbytes)
