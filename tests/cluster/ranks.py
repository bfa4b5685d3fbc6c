"""Ranks of a learner over Megatron-Core as processes on the CPU, over gloo.

Megatron-Core asks torch.cuda for the device that new tensors are to be on. Here the answer is the CPU.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest
import torch

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "transformers.models.beam.modeling_beam", "megatron.core.parallel_state"])
LIMIT = timedelta(seconds=120)


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}


def on_cpu() -> pytest.MonkeyPatch:
    """Have Megatron-Core put its tensors on the CPU, until what is given here is undone."""
    from megatron.core.pipeline_parallel import schedules

    class OnCpu:
        """torch, but for where tensors without a place go."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def zeros(*sizes: Any, **settings: Any) -> torch.Tensor:
            return torch.zeros(*sizes, **settings | {"device": "cpu"})

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(schedules, "torch", OnCpu())
    return patch


def on_ranks(size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``job(*arguments)`` gives on each of so many ranks, which are in one process group."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, PROCESSES) as pool:
        futures = [pool.submit(_rank, rank, size, f"{folder}/store", job, arguments) for rank in range(size)]
        return [future.result(LIMIT.total_seconds()) for future in futures]


def _rank(rank: int, size: int, store: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
    )
    on_cpu()
    try:
        return job(*arguments)
    finally:
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
