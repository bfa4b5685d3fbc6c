"""A worker of the grading pool: grades one task after the other, and says when it starts each.

It runs in a process of its own and imports little, so that a new one is there at once. Tasks come in and replies go out
over one socket, in order, as frames of texts (:func:`pack`). Replies, by their first text:

``ready``                            the graders are found; sent once
``start``                            the grading of the next task begins now
``graded``, seconds, right, parsed   ``right`` is ``1`` or empty; ``parsed`` is missing for None
``error``, seconds, message          the grader raised
``spent``                            a task ran out of memory, or left too much of it behind; the worker ends

A reply goes out together with the ``start`` of the next task, or before the worker waits: what was graded is never lost
with the task that ends the worker.
"""

import ctypes
import importlib
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

READY, START, GRADED, ERROR, SPENT = "ready", "start", "graded", "error", "spent"

# Responses and answers that a grader judges before its first task, so that no task pays for what is imported at first
# use: one pair needs sympy where there is algebra, one math-verify.
WARM_UP = (
    (r"Answer: \boxed{\sin(1)^2 + \cos(1)^2 + 1}", "2"),
    (r"Answer: \boxed{1}", r"\lim_{x \to 0} \frac{\sin x}{x}"),
)

_SIZE = struct.Struct("<Q")
_CHUNK = 1 << 18  # bytes
_MESSAGE = 500  # characters of an exception's text

Grader = Callable[[str, str], Any]


def pack(*texts: str) -> bytes:
    """A frame. Any texts are carried as they are, lone surrogates included."""
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    body = b"".join(_SIZE.pack(len(part)) + part for part in parts)
    return _SIZE.pack(len(body)) + body


class Frames:
    """Frames out of a stream of bytes that was cut anywhere."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def partial(self) -> bool:
        """Whether bytes are left over, once :meth:`take` gives None: a frame is on its way."""
        return bool(self._bytes)

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self._bytes += data

    def take(self) -> list[str] | None:
        """The texts of the next frame, or None while it is not complete."""
        if len(self._bytes) < _SIZE.size:
            return None
        end = _SIZE.size + _SIZE.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        texts, at = [], _SIZE.size
        while at < end:
            start = at + _SIZE.size
            at = start + _SIZE.unpack_from(self._bytes, at)[0]
            texts.append(self._bytes[start:at].decode("utf-8", "surrogatepass"))
        del self._bytes[:end]
        return texts


class Connection:
    """The worker's end of the socket. Waits in the kernel; what is unsent goes out before it does."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._frames = Frames()
        self._unsent = bytearray()

    def put(self, frame: bytes) -> None:
        """Keep a frame for the next :meth:`flush`."""
        self._unsent += frame

    def flush(self) -> None:
        """Send what was put."""
        while self._unsent:
            del self._unsent[: os.write(self._descriptor, self._unsent)]

    def receive(self) -> list[str] | None:
        """The next frame, or None when the pool has hung up."""
        while (texts := self._frames.take()) is None:
            self.flush()
            data = os.read(self._descriptor, _CHUNK)
            if not data:
                return None
            self._frames.feed(data)
        return texts


class Memory:
    """The address space of this process. Not on Linux its size is 0 and it has no limit: only Linux enforces one."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None  # proc(5)

    def size(self) -> int:
        """Its bytes now."""
        return 0 if self._statm is None else int(os.pread(self._statm, 64, 0).split()[0]) * resource.getpagesize()

    @contextmanager
    def limited(self, growth: int) -> Iterator[None]:
        """Let it grow by ``growth`` bytes and no more: what asks for more gets a MemoryError."""
        if self._statm is None:
            yield
            return
        before = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([self.size() + growth, *limits]), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


class Worker:
    """Grades what it receives. ``growth`` is the memory that a task may take, in bytes."""

    def __init__(self, connection: Connection, graders: Mapping[str, Grader], growth: int) -> None:
        self._connection = connection
        self._graders = graders
        self._growth = growth
        self._warm: dict[str, Grader] = {}
        self._memory = Memory()
        self._size = 0  # after the last warm-up
        self._told, self._silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)

    def serve(self) -> None:
        """Work until the pool hangs up, or too much memory is held."""
        self._connection.put(pack(READY))
        while (task := self._connection.receive()) is not None:
            name, response, answer = task
            grader = self._warm.get(name) or self._warmed(name)
            self._connection.put(pack(START))
            self._connection.flush()
            reply, exhausted = self._grade(grader, response, answer)
            self._connection.put(reply)
            del task, response
            if exhausted or self._memory.size() - self._size > self._growth:
                self._connection.put(pack(SPENT))
                self._connection.flush()
                return

    def _warmed(self, name: str) -> Grader:
        """A grader that has imported what it needs. What is printed meanwhile reaches the pool if the worker ends."""
        self._connection.flush()
        os.dup2(self._told, 2)
        if name not in self._graders:
            raise SystemExit(f"there is no grader {name!r}; there are {', '.join(sorted(self._graders))}")
        for response, answer in WARM_UP:
            self._graders[name](response, answer)
        os.dup2(self._silent, 2)
        self._size = self._memory.size()
        self._warm[name] = self._graders[name]
        return self._graders[name]

    def _grade(self, grader: Grader, response: str, answer: str) -> tuple[bytes, bool]:
        """The reply, and whether the grader ran out of memory."""
        exhausted = False
        start = time.perf_counter()
        try:
            with self._memory.limited(self._growth):
                verdict = grader(response, answer)
            seconds = repr(time.perf_counter() - start)
            parsed = () if verdict.parsed is None else (verdict.parsed,)
            return pack(GRADED, seconds, "1" if verdict.correct else "", *parsed), exhausted
        except MemoryError:
            message, exhausted = f"the grader needed more than {self._growth >> 20} MB of memory", True
        except Exception as error:  # noqa: BLE001  whatever a grader raises is the outcome of its task
            message = f"{type(error).__name__}: {error}"[:_MESSAGE]
        return pack(ERROR, repr(time.perf_counter() - start), message), exhausted


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even in the middle of a computation.

    Only on Linux. Elsewhere a worker ends once it next reads from its socket.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(pr_set_pdeathsig, int(signal.SIGKILL)) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the kernel knew
        raise SystemExit("the process that wanted grades has ended")


def main(descriptor: int, parent: int, memory_mb: int, graders: str) -> None:
    """Serve the pool at the other end of a socket.

    ``graders`` is the import path, ``package.module:NAME``, of a mapping from names to graders.
    """
    end_with_parent(parent)
    os.set_inheritable(descriptor, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    module, _, name = graders.partition(":")
    found = getattr(importlib.import_module(module), name)
    Worker(Connection(descriptor), found, memory_mb << 20).serve()
