"""Messages over a socket, between this process and an engine process: whole ones, in order, and nobody waits by it."""

import math
import socket
import struct
import threading
import time
from multiprocessing.connection import wait
from queue import SimpleQueue

from beamline.records.codec import encode
from beamline.rollout.vllm.messages import Command, Report

_SIZE = struct.Struct("<Q")  # bytes of the message that follows
_CHUNK = 1 << 20  # bytes that are received at a time


class Inbox:
    """Receives. What has come of a message is kept until the rest has: a side that stops halfway blocks nobody."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._bytes = connection, bytearray()
        self._received = -math.inf

    @property
    def grew(self) -> float:
        """When, by the monotonic clock, the last part came of a message that is not complete; else minus infinity."""
        return self._received if self._bytes else -math.inf

    def next(self, timeout: float | None) -> bytes | None:
        """The next message, or None if it is not complete in ``timeout`` seconds; without one it is waited for.

        Raises:
            EOFError: the other side is gone; half a message is lost with it.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (message := self._whole()) is None:
            left = None if timeout is None else max(0.0, end - time.monotonic())
            if not wait([self._connection], left):
                return None
            try:
                data = self._connection.recv(_CHUNK)
            except ConnectionResetError:  # it is gone, and has not read everything
                data = b""
            if not data:
                raise EOFError
            self._bytes += data
            self._received = time.monotonic()
        return message

    def _whole(self) -> bytes | None:
        if len(self._bytes) < _SIZE.size:
            return None
        end = _SIZE.size + _SIZE.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        with memoryview(self._bytes) as view:
            message = bytes(view[_SIZE.size : end])
        del self._bytes[:end]
        return message


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

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until everything is sent or the other side is gone."""
        self._messages.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._connection.sendall(_SIZE.pack(len(message)) + message)
        except (BrokenPipeError, ConnectionResetError):
            pass
