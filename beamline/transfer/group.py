"""Buckets from rank to rank between processes that live apart: a process group of its own, beside any other."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from beamline.transfer.plan import TransferError


class Meeting(msgspec.Struct, frozen=True):
    """Where ranks of a source and of a destination meet, as arguments of :func:`connect`.

    The first ``sources`` numbers of the group are those of the source, the others those of the destination.
    """

    address: str
    port: int
    sources: int
    size: int
    backend: Literal["gloo", "nccl"]
    seconds: float

    def join(self, number: int) -> "Group":
        """Meet the others as rank ``number`` of all.

        Raises:
            TransferError: they are not there in time.
        """
        return connect(self.address, self.port, number, self.size, self.backend, self.seconds)


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def connect(
    address: str, port: int, rank: int, size: int, backend: Literal["gloo", "nccl"], timeout_seconds: float
) -> "Group":
    """Join the group of ``size`` ranks that meets at ``address:port``, where rank 0 listens; waits for all of them.

    Nothing of ``torch.distributed``'s default group is used or changed, so that an engine that has one can join.
    ``timeout_seconds`` holds for this wait and for every later one; an address that does not answer at all is given up
    after up to twice as long.

    Raises:
        TransferError: the others are not there in time.
    """
    began, timeout = time.monotonic(), timedelta(seconds=timeout_seconds)
    try:
        store = TCPStore(address, port, size, is_master=rank == 0, timeout=timeout)
        group = _BACKENDS[backend](store, rank, size, timeout)
    except RuntimeError as error:
        waited = f"waited {time.monotonic() - began:.1f} s (limit {timeout_seconds:g} s)"
        raise TransferError(
            f"rank {rank} {waited} for the other ranks of a group of {size} at {address}:{port} and did not find them: "
            f"{_first_line(error)}; see that all {size} were started, reach that address and are given the same size"
        ) from error
    return Group(group, store, rank, timeout_seconds)


class Group:
    """A rank's place in the group. Every send meets the receive that its peer calls, in the order of the calls.

    Buffers are flat uint8: on the host with gloo, on the rank's GPU with nccl. After an error the group is of no use.
    """

    def __init__(self, group: Any, store: Store, rank: int, timeout_seconds: float) -> None:
        self._group = group
        self._store = store  # the group finds its peers through it, with nccl as late as at the first exchange
        self._rank = rank
        self._timeout_seconds = timeout_seconds

    def send(self, buffer: Tensor, to: int) -> None:
        """Hand ``buffer`` to rank ``to``; returns when it may be written again.

        Raises:
            TransferError: the peer ended, did not receive in time, or receives another number of bytes.
        """
        self._exchange(self._group.send, buffer, to, f"to send {len(buffer)} bytes to")

    def receive(self, buffer: Tensor, source: int) -> None:
        """Fill ``buffer`` with what rank ``source`` sends; returns when it is there.

        Raises:
            TransferError: the peer ended, did not send in time, or sends another number of bytes.
        """
        self._exchange(self._group.recv, buffer, source, f"to receive {len(buffer)} bytes from")

    def close(self) -> None:
        """Leave the group; whoever still waits for this rank gets an error."""
        self._group.abort()

    def _exchange(self, operation: Callable[..., Any], buffer: Tensor, peer: int, what: str) -> None:
        began = time.monotonic()
        # The size as the tag: gloo fills a longer buffer in part and ends the process over a shorter one; so the two
        # never meet, and both sides are told. nccl takes no tags.
        tag = len(buffer) % (1 << 31)
        try:
            # With a limit of its own, nccl's wait too is one of the host, and not only of the stream.
            operation([buffer], peer, tag).wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            waited = f"waited {time.monotonic() - began:.1f} s (limit {self._timeout_seconds:g} s)"
            raise TransferError(
                f"rank {self._rank} {waited} {what} rank {peer}, which has ended, is late, or has cut its buckets "
                f"otherwise: {_first_line(error)}; see the log of rank {peer}"
            ) from error


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # its watchdog ends the whole process; the error of a wait comes first
    return ProcessGroupNCCL(store, rank, size, options)


_BACKENDS: dict[str, Callable[[Store, int, int, timedelta], Any]] = {"gloo": _gloo, "nccl": _nccl}


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
