"""Giving device memory back, and taking it again with what it held."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Offload:
    """Tensors that can leave their device for the host's memory and come back; views of them stay valid.

    The host's memory (pinned, where there is a GPU) is taken at the first sleep and kept for the next ones.

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
            pinned = any(tensor.is_cuda for tensor in self._kept)
            self._host = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in self._kept]
        for tensor, host in zip(self._kept, self._host, strict=True):
            host.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for tensor in (*self._kept, *self._dropped):
            tensor.untyped_storage().resize_(0)
        if torch.cuda.is_available():
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
