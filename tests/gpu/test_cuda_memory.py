"""Memory of one GPU in two processes, and buckets there. Run on a machine with a GPU; skipped elsewhere."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from beamline.model.layout import TensorSlice
from beamline.transfer.buckets import Copier, buckets, checksum
from beamline.transfer.memory import cuda_memory, gpu_of, memory_for, visible_gpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda", 0)
ATTACHER = """
import sys, torch
from beamline.transfer.memory import attach
memory = attach(bytes.fromhex(sys.argv[1]))
print(int(memory.buffer.sum()), memory.buffer.device)
memory.buffer.fill_(2)
torch.cuda.synchronize()
memory.close()
"""


def test_another_process_sees_and_writes_the_same_bytes_and_closing_gives_them_back() -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    memory = cuda_memory(5 << 20, DEVICE)
    memory.buffer.fill_(1)
    torch.cuda.synchronize()
    seen = subprocess.run(
        [sys.executable, "-c", ATTACHER, memory.descriptor.hex()], capture_output=True, text=True, check=False
    )
    assert seen.stdout == f"{5 << 20} cuda:0\n", seen.stderr
    assert (memory.buffer == 2).all()
    memory.close()
    assert torch.cuda.memory_allocated(DEVICE) == before


def test_memory_is_on_the_gpu_only_where_the_other_process_sees_it() -> None:
    for gpus, on_gpu in (([gpu_of(DEVICE)], True), (["GPU-of-another-machine"], False), ([], False)):
        memory = memory_for(1 << 10, DEVICE, gpus)
        assert memory.buffer.is_cuda == on_gpu
        memory.close()
    assert visible_gpus()[0] == gpu_of(DEVICE)


def parts_and_views() -> tuple[list[TensorSlice], dict[str, Tensor]]:
    """A stack of experts, tensors of their own, and views with gaps and across; fp32 here, bfloat16 on the wire."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(8, 4, 6, generator=generator).to(DEVICE)
    views = {f"stacked {i}": stack[i] for i in range(8)}
    for i in range(8):
        views[f"alone {i}"] = torch.randn(5, 3, generator=generator).to(DEVICE)
        views[f"across {i}"] = torch.randn(5, 3, generator=generator).to(DEVICE).T
        views[f"columns {i}"] = torch.randn(5, 8, generator=generator).to(DEVICE)[:, 1:4]
    return [TensorSlice.whole(name, "bfloat16", tuple(view.shape)) for name, view in views.items()], views


def test_a_bucket_on_the_gpu_is_what_it_is_on_the_host() -> None:
    parts, views = parts_and_views()
    (bucket,) = buckets(parts, 1 << 20)
    there = torch.empty(bucket.nbytes, dtype=torch.uint8, device=DEVICE)
    here = torch.empty(bucket.nbytes, dtype=torch.uint8)
    Copier(bucket, lambda part: views[part.name]).pack(there)
    Copier(bucket, lambda part: views[part.name].cpu()).pack(here)
    assert torch.equal(there.cpu(), here)
    for buffer in (there, here):  # into the GPU from either
        received = {name: torch.zeros_like(view) for name, view in views.items()}
        Copier(bucket, lambda part, received=received: received[part.name]).unpack(buffer)  # type: ignore[misc]
        assert all(torch.equal(received[name], view.bfloat16().float()) for name, view in views.items())


def test_the_checksum_is_the_same_on_gpu_and_host() -> None:
    for view in parts_and_views()[1].values():
        assert checksum(view, "bfloat16") == checksum(view.cpu(), "bfloat16")
