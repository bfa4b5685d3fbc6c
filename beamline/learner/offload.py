"""Giving device memory back, and taking it again with what it held."""

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Offload:
    """Tensors that can leave their device for the host's memory and come back; views of them stay valid.

    The host's memory is taken at the first sleep and kept for the next ones.

    Args:
        kept: whose content is wanted again.
        dropped: whose content is not; it is 0 afterwards.
    """

    def __init__(self, kept: Sequence[Tensor], dropped: Sequence[Tensor]) -> None:
        self._kept, self._dropped = kept, dropped
        self._host: list[Tensor] = []
        self._sizes = [tensor.untyped_storage().size() for tensor in (*kept, *dropped)]
        self._asleep = False

    def sleep(self) -> None:
        """Free the tensors' memory; again does nothing."""
        if self._asleep:
            return
        if not self._host:
            self._host = [self._host_memory(tensor) for tensor in self._kept]
        for tensor, host in zip(self._kept, self._host, strict=True):
            host.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for tensor in (*self._kept, *self._dropped):
            tensor.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch._C._cuda_clearCublasWorkspaces()  # small, and each holds on to a large piece of memory
            torch.cuda.empty_cache()
        self._asleep = True

    def wake(self) -> None:
        """Take the memory again, with its content; again does nothing."""
        if not self._asleep:
            return
        for tensor, size in zip((*self._kept, *self._dropped), self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
        for tensor, host in zip(self._kept, self._host, strict=True):
            tensor.copy_(host, non_blocking=True)
        for tensor in self._dropped:
            tensor.zero_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._asleep = False

    def _host_memory(self, tensor: Tensor) -> Tensor:
        """Memory of the host for a tensor, pinned for one on a GPU.

        torch's own would be of the next power of two, and pinned page by page as they first appear, by one thread:
        many times slower than pages, huge ones where the system has them, that all threads have touched before.

        Raises:
            RuntimeError: it cannot be pinned.
        """
        if not tensor.is_cuda:
            return torch.empty_like(tensor, device="cpu")
        memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(memory, dtype=torch.uint8).zero_()
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        weakref.finalize(self, _unpin, memory, host.data_ptr())
        return host.view(tensor.dtype).view(tensor.shape)


def _unpin(_: mmap.mmap, address: int) -> None:
    """Let go of memory, which is held until then."""
    torch.cuda.cudart().cudaHostUnregister(address)
