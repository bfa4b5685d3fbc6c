"""How weights go into an engine: what each rank is given, through which memory, and whether it arrived."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.messages import Fill, Finish, Join, Loaded, Prepare, Prepared
from beamline.rollout.vllm.replica import Replica
from beamline.transfer.buckets import samples
from beamline.transfer.group import Meeting, free_port
from beamline.transfer.plan import Shares, TransferError
from beamline.transfer.source import SLOTS, Source


class Delivery:
    """The way of a source's weights into one engine, under one plan; found once, used at every sync.

    What lies in the memory of a GPU that the engine's rank sees stays there: the engine maps the bucket (CUDA IPC).
    All else goes through host memory. With ``group_seconds`` everything goes through a group that the ranks of both
    sides join: by NCCL between GPUs, else by gloo.

    Args:
        shares: what each rank of the engine is given by each rank of the source.
        source: where it comes from.
        bucket_bytes: most bytes that are handed over at a time, from a rank to a rank.
        group_seconds: longest time that ranks of a group wait for each other; None without a group.
    """

    def __init__(self, shares: Shares, source: Source, bucket_bytes: int, group_seconds: float | None) -> None:
        self._shares, self._bucket_bytes, self._group_seconds = shares, bucket_bytes, group_seconds
        self._supply = source.supply(shares, bucket_bytes)

    def checksums(self) -> list[list[int]]:
        """Of a fixed sample of what each rank is given, as the source has it now."""
        return self._supply.checksums()

    def deliver(self, fleet: Fleet, replica: int, version: int) -> list[list[int]]:
        """Bring the weights into an engine, which stamps tokens with ``version`` from then on; gives their checksums.

        Raises:
            EngineFailedError: the engine failed meanwhile.
            TransferError: what it holds afterwards is not what was sent, or they do not come together in a group.
        """
        engine = fleet.replicas[replica]
        prepared_for, engine.prepared_for = engine.prepared_for, None
        if prepared_for is not self:
            prepared = fleet.ask(replica, lambda number: Prepare(number, self._shares, self._bucket_bytes), Prepared)
            self._open(fleet, engine, prepared)
        under_way: list[int] = []
        for bucket in range(self._supply.rounds):
            if len(under_way) == SLOTS:
                engine.answer(under_way.pop(0), type(None))
            number = fleet.number()
            if self._group_seconds is None:
                engine.send(Fill(number, bucket, self._supply.pack(bucket)))
            else:
                engine.send(Fill(number, bucket, None))
                self._together(engine, number, partial(self._supply.send, bucket))
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
        self._supply.close()

    def _open(self, fleet: Fleet, engine: Replica, prepared: Prepared) -> None:
        """Take memory that the engine can see, or meet it in a group."""
        if self._group_seconds is None:
            self._supply.take_memory(prepared.gpus)
            return
        ours, theirs = self._supply.gpus(), [seen[0] if seen else "" for seen in prepared.gpus]
        for rank, gpu in enumerate(ours):
            if gpu and gpu in theirs:
                raise TransferError(
                    f"rank {rank} of the learner and rank {theirs.index(gpu)} of engine {engine.name} are on one GPU "
                    f"({gpu}), and NCCL joins no two ranks of one: use rollout.vllm.weights=shared, or other GPUs "
                    "(rollout.vllm.devices)"
                )
        backend: Literal["gloo", "nccl"] = "nccl" if all(ours) and all(theirs) else "gloo"
        size = len(ours) + len(theirs)
        meeting = Meeting("127.0.0.1", free_port(), len(ours), size, backend, self._group_seconds)
        number = fleet.number()
        engine.send(Join(number, meeting))
        self._together(engine, number, partial(self._supply.join, meeting))
        engine.answer(number, type(None))

    @staticmethod
    def _together(engine: Replica, number: int, ours: Callable[[], None]) -> None:
        """Do our part of what the engine was asked for by this number; if that fails because it has, say why it has."""
        try:
            ours()
        except TransferError:
            engine.answer(number, type(None))
            raise

    def _compare(self, engine: str, sent: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> None:
        for rank, (ours, theirs) in enumerate(zip(sent, found, strict=True)):
            sampled = [(source, part) for source, parts in enumerate(samples(self._shares[rank])) for part in parts]
            for (source, part), one, other in zip(sampled, ours, theirs, strict=True):
                if one != other:
                    raise TransferError(
                        f"engine {engine}, rank {rank}: {part.start}:{part.stop} of {part.name} is not what was sent "
                        f"by rank {source} of the learner (checksum {other:08x}, not {one:08x}); its weights cannot be "
                        "trusted"
                    )
