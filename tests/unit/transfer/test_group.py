"""Real processes over gloo. Each returns what it has to show, or the error that it ended with."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from beamline.model.layout import DType, Layout, TensorSlice
from beamline.transfer.buckets import Copier, buckets
from beamline.transfer.dtypes import TORCH_DTYPES
from beamline.transfer.group import Group, connect, free_port
from beamline.transfer.plan import TransferError, plan

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "beamline.transfer.group"])
LIMIT = 60  # seconds until a process that hangs fails the test

Job = Callable[..., Any]


def call(result: Connection, job: Job, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        result.send(job(*arguments))
    except TransferError as error:
        result.send(error)


def run(*jobs: tuple[Any, ...]) -> list[Any]:
    """What each job gave, in a process of its own; None for one that was killed."""
    started = []
    for job, *arguments in jobs:
        here, there = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=call, args=(there, job, tuple(arguments)))
        process.start()
        there.close()
        started.append((process, here))
    deadline = time.monotonic() + LIMIT
    try:
        return [result_of(here, deadline) for _, here in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def result_of(here: Connection, deadline: float) -> Any:
    assert here.poll(max(0, deadline - time.monotonic())), "a process hangs"
    try:
        return here.recv()
    except EOFError:
        return None


# What is exchanged: a matrix cut by rows at the source and by columns at the destination, a stack, a vector.
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 9), "expert": (4, 3, 5), "bias": (7,)}


def cut(name: str, d: int, begin: int, end: int, dtype: DType = "bfloat16") -> TensorSlice:
    shape = SHAPES[name]
    start = tuple(begin if i == d else 0 for i in range(len(shape)))
    stop = tuple(end if i == d else n for i, n in enumerate(shape))
    return TensorSlice(name, dtype, shape, start, stop)


SOURCE = Layout(
    (
        (cut("matrix", 0, 0, 4), cut("expert", 0, 0, 2), cut("bias", 0, 0, 7)),
        (cut("matrix", 0, 4, 6), cut("expert", 0, 2, 4), cut("bias", 0, 0, 7)),
    )
)
DESTINATION = Layout(
    (
        (cut("matrix", 1, 0, 3), cut("expert", 1, 0, 1), cut("bias", 0, 0, 7)),
        (cut("matrix", 1, 3, 6), cut("expert", 1, 1, 2)),
        (cut("matrix", 1, 6, 9), cut("expert", 1, 2, 3), cut("bias", 0, 2, 5)),
    )
)
PLAN = plan(SOURCE, DESTINATION)
BUCKET_BYTES = 32


def whole(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


def box(part: TensorSlice) -> Tensor:
    return whole(part.name)[part.index]


def view_in(held: dict[TensorSlice, Tensor], part: TensorSlice) -> Tensor:
    """The part in the one slice of this rank that has it; a rank holds nothing else that it could touch."""
    piece = next(piece for piece in held if piece.name == part.name and piece.intersect(part) == part)
    return held[piece][part.within(piece)]


def exchanges() -> Iterator[tuple[int, int, list[TensorSlice]]]:
    """Every pair and what goes between the two: the same order for all, so that nobody waits in a circle."""
    for source in range(len(SOURCE.ranks)):
        for destination in range(len(DESTINATION.ranks)):
            parts = [m.part for m in PLAN.moves if (m.source, m.destination) == (source, destination)]
            yield source, destination, parts


def learner(port: int, rank: int) -> int:
    """A source rank, with fp32 values of its own slices; returns how many bytes it sent."""
    held = {piece: box(piece).clone() for piece in SOURCE.ranks[rank]}
    group, sent = connect("127.0.0.1", port, rank, 5, "gloo", 30), 0
    for source, destination, parts in exchanges():
        for bucket in buckets(parts, BUCKET_BYTES) if source == rank else ():
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            Copier(bucket, lambda part: view_in(held, part)).pack(buffer)
            group.send(buffer, len(SOURCE.ranks) + destination)
            sent += bucket.nbytes
    group.close()
    return sent


def engine(port: int, rank: int) -> list[list[float]]:
    """A destination rank, with room for its own slices; returns what they hold in the end."""
    held = {piece: torch.full(piece.size, torch.nan).bfloat16() for piece in DESTINATION.ranks[rank]}
    group = connect("127.0.0.1", port, len(SOURCE.ranks) + rank, 5, "gloo", 30)
    for source, destination, parts in exchanges():
        for bucket in buckets(parts, BUCKET_BYTES) if destination == rank else ():
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            group.receive(buffer, source)
            Copier(bucket, lambda part: view_in(held, part)).unpack(buffer)
    group.close()
    return [held[piece].flatten().tolist() for piece in DESTINATION.ranks[rank]]


def test_two_source_ranks_fill_three_destination_ranks_slice_by_slice() -> None:
    port = free_port()
    results = run(*((learner, port, rank) for rank in range(2)), *((engine, port, rank) for rank in range(3)))
    for pieces, received in zip(DESTINATION.ranks, results[2:], strict=True):
        assert received == [box(piece).to(TORCH_DTYPES[piece.dtype]).flatten().tolist() for piece in pieces]
    elements = sum(box(piece).numel() for rank in DESTINATION.ranks for piece in rank)
    assert sum(results[:2]) == 2 * elements  # bfloat16: each element went over the wire once


def pair(port: int, rank: int, act: Callable[[Group], Any], timeout: float = 30) -> Any:
    group = connect("127.0.0.1", port, rank, 2, "gloo", timeout)
    return act(group)


def killed(group: Group) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(group: Group) -> None:
    group.close()


def receives(group: Group) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        group.receive(torch.empty(1000, dtype=torch.uint8), 1)
    return str(caught.value), time.monotonic() - began


def sends(group: Group) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        group.send(torch.empty(64 << 20, dtype=torch.uint8), 1)
    return str(caught.value), time.monotonic() - began


def receives_less(group: Group) -> str:
    with pytest.raises(TransferError) as caught:
        group.receive(torch.empty(999, dtype=torch.uint8), 0)
    return str(caught.value)


def sends_more(group: Group) -> str:
    with pytest.raises(TransferError) as caught:
        group.send(torch.empty(1000, dtype=torch.uint8), 1)
    return str(caught.value)


@pytest.mark.parametrize("end", [killed, leaves])
@pytest.mark.parametrize(
    ("act", "what"), [(receives, "to receive 1000 bytes from"), (sends, "to send 67108864 bytes to")]
)
def test_a_peer_that_ends_is_an_error_at_once_that_names_it(
    end: Callable[[Group], None], act: Callable[[Group], Any], what: str
) -> None:
    port = free_port()
    (message, seconds), _ = run((pair, port, 0, act), (pair, port, 1, end))
    assert "rank 0 waited" in message
    assert f"s (limit 30 s) {what} rank 1, which has ended" in message
    assert seconds < 10


def waits(group: Group) -> str:
    """Neither sends nor receives, until the other has given up."""
    with pytest.raises(TransferError):
        group.receive(torch.empty(1, dtype=torch.uint8), 0)
    return "waited"


def test_a_peer_that_does_nothing_is_an_error_at_the_limit() -> None:
    port = free_port()
    (message, seconds), _ = run((pair, port, 0, receives, 1), (pair, port, 1, waits, 10))
    assert "(limit 1 s) to receive 1000 bytes from rank 1" in message
    assert 1 <= seconds < 5


def test_another_number_of_bytes_is_an_error_on_both_sides() -> None:
    port = free_port()
    sent, received = run((pair, port, 0, sends_more, 1), (pair, port, 1, receives_less, 1))
    assert "to send 1000 bytes to rank 1" in sent
    assert "to receive 999 bytes from rank 0" in received
    assert "cut its buckets otherwise" in sent


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_is_not_complete_in_time_is_an_error_that_says_where(rank: int) -> None:
    port = free_port()
    (error,) = run((connect, "127.0.0.1", port, rank, 2, "gloo", 0.5))
    assert isinstance(error, TransferError)
    assert f"rank {rank} waited" in str(error)
    assert f"(limit 0.5 s) for the other ranks of a group of 2 at 127.0.0.1:{port}" in str(error)


def beside_a_default_group(port: int, default_port: int, rank: int) -> tuple[float, float]:
    """What arrives over the group, and over a default group that was there before it, afterwards."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{default_port}", world_size=2, rank=rank)
    buffer, sum_of_ranks = torch.full((10,), rank, dtype=torch.uint8), torch.tensor([float(rank)])
    group = connect("127.0.0.1", port, 1 - rank, 2, "gloo", 30)  # other numbers than in the default group
    if rank == 0:
        group.send(buffer + 5, 0)
    else:
        group.receive(buffer, 1)
    group.close()
    torch.distributed.all_reduce(sum_of_ranks)
    return float(buffer[0]), float(sum_of_ranks)


def test_a_default_group_is_neither_needed_nor_disturbed() -> None:
    ports = free_port(), free_port()
    assert run(*((beside_a_default_group, *ports, rank) for rank in range(2))) == [(0, 1), (5, 1)]
