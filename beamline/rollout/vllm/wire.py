"""Messages over a socket, between this process and an engine process: whole ones, in order, and nobody waits by it."""

import fcntl
import math
import socket
import struct
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from queue import SimpleQueue

from beamline.records.codec import encode
from beamline.rollout.vllm.messages import Command, Report

_SIZE = struct.Struct("<Q")  # bytes of the message that follows
_MOST = 1 << 36  # bytes of a message; what announces more is none
_SMALL = 1 << 16  # bytes up to which a message is sent together with its size
_PATIENCE = 0.2  # seconds for which what is at hand is still taken in when the time is over


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection, which wait for each other.

    Their numbers are above those of the standard streams, which a program may have closed, and which a new process
    gets anew; a default timeout that somebody has set for sockets is not theirs.
    """
    ends = []
    for end in socket.socketpair():
        with end:
            high = socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
        high.setblocking(True)
        ends.append(high)
    return ends[0], ends[1]


class WireError(ValueError):
    """What came is no message."""


class Inbox:
    """Receives. What has come of a message is kept until the rest has: a side that stops halfway blocks nobody."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(_SIZE.size)  # of a size or of a message, in turn
        self._filled, self._is_size = 0, True

    @property
    def partial(self) -> int:
        """Bytes that have come of a message that is not complete; 0 between two."""
        return self._filled if self._is_size else self._filled + _SIZE.size

    def next(self, timeout: float | None) -> bytearray | None:
        """The next message, or None if it is not complete in ``timeout`` seconds; without one it is waited for.

        Raises:
            EOFError: the other side is gone; half a message is lost with it.
            WireError: what came is no message.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if self._receive():
                if (message := self._completed()) is not None:
                    return message
                if time.monotonic() > end + _PATIENCE:
                    return None
            elif not wait([self._connection], None if timeout is None else max(0.0, end - time.monotonic())):
                return None

    def _receive(self) -> bool:
        """Take in what there is; False if there is nothing."""
        try:
            with memoryview(self._buffer)[self._filled :] as rest:
                received = self._connection.recv_into(rest, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it is gone, and has not read everything
            received = 0
        if not received:
            raise EOFError
        self._filled += received
        return True

    def _completed(self) -> bytearray | None:
        """The message, if it is complete."""
        while self._filled == len(self._buffer):
            done, was_size = self._buffer, self._is_size
            size = _SIZE.unpack(done)[0] if was_size else _SIZE.size
            if size > _MOST:
                raise WireError(f"a message of {size} bytes is announced")
            self._buffer, self._filled, self._is_size = bytearray(size), 0, not was_size
            if not was_size:
                return done
        return None


class Outbox:
    """Sends, from a thread of its own, so that no one waits for the other side to read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Command | Report) -> None:
        """Send a message when all before it are sent. Nothing happens if the other side is gone: reading tells."""
        self._messages.put(encode(message))

    def close(self, timeout: float | None) -> None:
        """Wait up to ``timeout`` seconds until everything is sent or the other side is gone."""
        self._messages.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                size = _SIZE.pack(len(message))
                if len(message) <= _SMALL:
                    self._connection.sendall(size + message)
                else:
                    self._connection.sendall(size)
                    self._connection.sendall(message)
        except OSError:  # the other side is gone, or is to notice that nothing comes any more
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
