"""Ranks of a learner over Megatron-Core on GPUs: one each over NCCL, or all on the first, which NCCL refuses.

Those of a single GPU exchange through the host, by gloo; all else is as with a GPU for each.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import wraps
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed

LIMIT = timedelta(seconds=240)
COLLECTIVES = (
    "all_gather_into_tensor", "reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base", "all_reduce",
    "all_to_all_single", "broadcast",
)  # fmt: skip


class Done:
    """What a call that does not wait would give."""

    def wait(self, *_: Any) -> bool:
        return True


def through_the_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose tensors are copied to the host and back."""

    @wraps(collective)
    @torch.no_grad()
    def call(*arguments: Any, async_op: bool = False, **named: Any) -> Any:
        given = [*arguments, *named.values()]
        moved = {id(each): each.cpu() for each in given if isinstance(each, Tensor) and each.is_cuda}
        on_host = [moved.get(id(each), each) for each in given]
        collective(*on_host[: len(arguments)], **dict(zip(named, on_host[len(arguments) :], strict=True)))
        for each in given:
            if id(each) in moved:
                each.copy_(moved[id(each)])
        return Done()

    return call


def exchange(operations: Sequence[distributed.P2POp]) -> list[Any]:
    """``batch_isend_irecv`` through the host."""
    tensors = [operation.tensor.cpu() for operation in operations]
    works = [
        operation.op(tensor, operation.peer, operation.group)
        for operation, tensor in zip(operations, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    for operation, tensor in zip(operations, tensors, strict=True):
        if operation.op is distributed.irecv:
            operation.tensor.copy_(tensor)
    return []


def on_gpus(size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``job(*arguments)`` gives on each of so many ranks, which compile nothing: that takes each a minute."""
    apart = torch.cuda.device_count() >= size
    with (
        patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"),
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, get_context("spawn")) as pool,
    ):
        futures = [pool.submit(_rank, number, size, apart, f"{folder}/store", job, arguments) for number in range(size)]
        return [future.result(LIMIT.total_seconds()) for future in futures]


def _rank(number: int, size: int, apart: bool, store: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.cuda.set_device(number if apart else 0)
    if not apart:  # before Megatron-Core takes them
        for name in COLLECTIVES:
            setattr(distributed, name, through_the_host(getattr(distributed, name)))
        distributed.batch_isend_irecv = exchange  # type: ignore[assignment]
    backend = "nccl" if apart else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=number, world_size=size, timeout=LIMIT)
    try:
        return job(*arguments)
    finally:
        distributed.destroy_process_group()
