"""Memory that two processes of one machine see: one makes it, the other attaches to it by a few bytes. Linux only."""

import mmap
import os
from collections.abc import Collection
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from beamline.records import codec
from beamline.transfer.plan import TransferError


class SharedMemory(Protocol):
    """``buffer`` (uint8 ``[nbytes]``) is the same memory in both processes; ``descriptor`` is what one attaches by.

    Nothing orders the two processes' accesses: who writes tells the other when it is done.
    """

    buffer: Tensor
    descriptor: bytes

    def close(self) -> None:
        """Give it back: it goes once both sides have closed it, or ended, and let go of their views of it."""


class _OnHost(msgspec.Struct, tag=True, frozen=True):
    """A file in memory that process ``pid`` has open as ``file``; ``device`` and ``inode`` tell it from any other."""

    pid: int
    file: int
    device: int
    inode: int
    nbytes: int


class _OnCuda(msgspec.Struct, tag=True, frozen=True):
    """A CUDA allocation as :func:`torch.multiprocessing.reductions.reduce_tensor` describes it, on the GPU ``uuid``."""

    uuid: str
    nbytes: int
    storage: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class _Descriptor(msgspec.Struct, frozen=True):
    place: _OnHost | _OnCuda


def host_memory(nbytes: int) -> SharedMemory:
    """Memory of the host, taken at once.

    Raises:
        TransferError: the machine has not so much left.
    """
    available = _available()
    if nbytes > available:
        raise TransferError(
            f"shared memory of {nbytes} bytes is asked for and the machine has {available} left; use smaller buckets, "
            "or end what else takes its memory"
        )
    # A file without a name, not a segment in /dev/shm: the kernel frees it with the last process that has it, however
    # that ends, so that nothing can be left behind; no size of /dev/shm (64 MB in a container) limits it; and no
    # resource tracker of an attaching process takes it away. Processes of one user reach it under /proc.
    file = os.memfd_create("beamline")
    os.posix_fallocate(file, 0, nbytes)
    found = os.fstat(file)
    place = _OnHost(os.getpid(), file, found.st_dev, found.st_ino, nbytes)
    return _Memory(_mapped(file, nbytes), place, file)


def cuda_memory(nbytes: int, device: torch.device) -> SharedMemory:
    """Memory of a GPU. Close it after the other side has: the GPU keeps what is still attached to.

    One process may attach, once: CUDA counts one reader for each description.
    """
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    _, described = reduce_tensor(buffer)
    _, _, _, _, _, _, index, storage, storage_bytes, storage_offset, _, *shared = described
    counter, counter_offset, event, event_sync = shared
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    place = _OnCuda(uuid, nbytes, storage, storage_bytes, storage_offset, counter, counter_offset, event, event_sync)
    return _Memory(buffer, place)


def attach(descriptor: bytes) -> SharedMemory:
    """The memory that another process described (:func:`host_memory`: or this one).

    Raises:
        TransferError: it is gone, or on a GPU that this process does not see.
        msgspec.ValidationError: the bytes describe no memory.
    """
    place = codec.decode(descriptor, _Descriptor).place
    return _Memory(_host_buffer(place) if isinstance(place, _OnHost) else _cuda_buffer(place), place)


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that this process sees, by its own index."""
    return [gpu_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def gpu_of(device: torch.device) -> str:
    """The UUID of a GPU; empty for any other device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def memory_for(nbytes: int, device: torch.device, gpus: Collection[str]) -> SharedMemory:
    """Memory on ``device`` if that is one of ``gpus``, which the other process sees; else memory of the host.

    Raises:
        TransferError: the machine has not so much memory left.
    """
    if device.type == "cuda" and gpu_of(device) in gpus:
        return cuda_memory(nbytes, device)
    return host_memory(nbytes)


class _Memory:
    """``file`` is what the owner of host memory keeps open for others to attach."""

    def __init__(self, buffer: Tensor, place: _OnHost | _OnCuda, file: int | None = None) -> None:
        self.buffer = buffer
        self.descriptor = codec.encode(_Descriptor(place))
        self._file = file

    def close(self) -> None:
        """Let go of the buffer, which is empty from now on; a second time changes nothing."""
        on_cuda = self.buffer.is_cuda
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if on_cuda:
            torch.cuda.ipc_collect()  # frees what was shared and has no reader left


def _available() -> int:
    """Bytes of memory that can be taken without swapping."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def _mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)  # holds the mapping for as long as it lives


def _host_buffer(place: _OnHost) -> Tensor:
    gone = f"process {place.pid} no longer has the shared memory of {place.nbytes} bytes that it described"
    try:
        file = os.open(f"/proc/{place.pid}/fd/{place.file}", os.O_RDWR)
    except FileNotFoundError as error:
        raise TransferError(f"{gone}: it has ended or closed it") from error
    try:
        found = os.fstat(file)
        if (found.st_dev, found.st_ino, found.st_size) != (place.device, place.inode, place.nbytes):
            raise TransferError(f"{gone}: its file {place.file} is another one now")
        return _mapped(file, place.nbytes)
    finally:
        os.close(file)


def _cuda_buffer(place: _OnCuda) -> Tensor:
    """The same allocation under this process's own index of the GPU, as vLLM's IPC weight transfer maps it."""
    seen = visible_gpus()
    if place.uuid not in seen:
        raise TransferError(
            f"the shared memory is on GPU {place.uuid}, and this process sees {seen}: both sides must be given the "
            "same GPU (CUDA_VISIBLE_DEVICES), or exchange weights through a group"
        )
    buffer: Tensor = rebuild_cuda_tensor(
        Tensor,
        (place.nbytes,),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        seen.index(place.uuid),
        place.storage,
        place.storage_bytes,
        place.storage_offset,
        False,
        place.counter,
        place.counter_offset,
        place.event,
        place.event_sync,
    )
    return buffer
