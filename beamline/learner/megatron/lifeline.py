"""No rank of the learner outlives another: whoever waits for one that has died waits for ever, at worst."""

import os
import selectors
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

GRACE_SECONDS = 10.0  # from the end of another rank to that of this one: for an error of its own to say more
_NUMBER = struct.Struct("<I")
_KEY = "beamline/lifeline"


class Lifeline:
    """Ends this process when a rank that it depends on has ended, wherever this one is: every rank on the first.

    For ranks of one machine, in a process group. A peer that has died is an error at once for whoever waits for it over
    gloo. NCCL notices nothing, and a rank that is busy does not look. So each rank keeps a connection to the first one,
    which the kernel closes with its process.

    Args:
        rank: the number of this one.
        size: how many they are.
        seconds: for all of them to be there.

    Raises:
        TimeoutError: they are not.
    """

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        store = _get_default_store()
        self._rank, self._closed = rank, threading.Event()
        self._peers = _others(store, size, seconds) if rank == 0 else {0: _first(store, rank, seconds)}
        if self._peers:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def close(self) -> None:
        """Look no longer: from here on ranks end on their own."""
        self._closed.set()
        for peer in self._peers.values():
            with suppress(OSError):  # the other one has gone already
                peer.shutdown(socket.SHUT_RDWR)  # which ends the wait of the thread

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, number)
            ended = sorted(key.data for key, _ in selector.select())  # nothing is ever sent
        if not self._closed.wait(GRACE_SECONDS):
            end_at_once(f"rank {self._rank} of the learner ends, because rank {ended[0]} has; see what that one wrote")


def end_at_once(reason: str) -> None:
    """End this process from any thread, wherever its main one waits."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


def _others(store: Store, size: int, seconds: float) -> dict[int, socket.socket]:
    end, peers = time.monotonic() + seconds, dict[int, socket.socket]()
    with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
        store.set(_KEY, str(server.getsockname()[1]))
        while len(peers) < size - 1:
            server.settimeout(max(0.001, end - time.monotonic()))
            peer, _ = server.accept()
            peer.settimeout(max(0.001, end - time.monotonic()))
            (number,) = _NUMBER.unpack(peer.recv(_NUMBER.size, socket.MSG_WAITALL))
            peer.settimeout(None)
            peers[number] = peer
    return peers


def _first(store: Store, rank: int, seconds: float) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", int(store.get(_KEY))), timeout=seconds)
    peer.sendall(_NUMBER.pack(rank))
    peer.settimeout(None)
    return peer
