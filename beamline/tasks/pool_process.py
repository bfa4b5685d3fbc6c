"""A worker of the grading pool, seen from the pool: the process, its socket, the tasks it was sent, its silence."""

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

from beamline.errors import BeamlineError
from beamline.tasks.pool_worker import Frames

START_SECONDS = 60.0  # for a new worker, and for the imports of a grader
WAKE_SECONDS = 10.0  # for a worker that has nothing to import to begin what was sent
START_ATTEMPTS = 3  # in a row
SENT_AHEAD = 8  # tasks at one worker: enough to hide the way there and back, few to wait behind one that hangs

_CHUNK = 1 << 18  # bytes
_GONE_SECONDS = 10.0  # for the kernel to end a killed process
_PROGRAM = (
    "import sys; fd, parent, memory, graders, *sys.path = sys.argv[1:]; "
    "from beamline.tasks.pool_worker import main; main(int(fd), int(parent), int(memory), graders)"
)


class GradingPoolError(BeamlineError):
    """Workers cannot be started or ended, or the pool is closed."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A task on its way. ``frame`` is what a worker is sent."""

    key: Hashable
    grader: str
    frame: bytes
    lost: int = 0  # how often a worker ended before it had started this task


class WorkerProcess:
    """A worker process as the pool sees it. The first of ``tickets`` is the one that it works on, or will."""

    def __init__(self, memory_mb: int, graders: str) -> None:
        self.tickets: deque[Ticket] = deque()
        self.ready = False
        self.warm: set[str] = set()  # names of the graders that it has started
        self.started: float | None = None  # when it said that it began the first ticket
        self._heard = time.monotonic()  # the last sign of life, or when it was last sent something
        self._frames = Frames()
        self._unsent = bytearray()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        given = [theirs.fileno(), os.getpid(), memory_mb, graders, *sys.path]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a grader prints is nobody's
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the pool to decide about
                env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy goes by the order of sets
            )
        except OSError as error:
            self._close()
            raise GradingPoolError(f"a grading worker cannot be started: {error}") from error
        finally:
            theirs.close()

    @property
    def stuck(self) -> bool:
        """Whether bytes wait until the socket takes more."""
        return bool(self._unsent)

    @property
    def importing(self) -> bool:
        """Whether it has not come to grade, or not yet with the grader of its next task."""
        return not self.ready or (bool(self.tickets) and self.tickets[0].grader not in self.warm)

    @property
    def able(self) -> bool:
        """Whether it may be given another ticket."""
        return self.ready and len(self.tickets) < SENT_AHEAD and len(self._unsent) < _CHUNK

    def give(self, ticket: Ticket) -> None:
        """Put a ticket behind the others; :meth:`send` sends it."""
        self.tickets.append(ticket)
        self._unsent += ticket.frame

    def send(self) -> None:
        """Send as much as the socket takes."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
                self._heard = time.monotonic()
        except BlockingIOError:
            pass  # the rest is sent when the socket takes it
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # it has ended, which reading tells

    def receive(self) -> tuple[list[list[str]], bool]:
        """The replies that have arrived, and whether more can come."""
        replies: list[list[str]] = []
        try:
            while data := self.socket.recv(_CHUNK):
                self._heard = time.monotonic()
                self._frames.feed(data)
                while (reply := self._frames.take()) is not None:
                    replies.append(reply)
        except BlockingIOError:
            return replies, True
        except ConnectionResetError:
            pass  # it has ended; what it said before is in the replies
        return replies, False

    def expires(self, deadline: float) -> float:
        """When it has to be killed, by the monotonic clock, if it stays silent until then."""
        if self.started is not None and not self._frames.partial:  # else it is done, and its long reply is on the way
            return self.started + deadline
        if self.importing:
            return self._heard + START_SECONDS
        return self._heard + WAKE_SECONDS if self.tickets else math.inf

    def kill(self) -> None:
        """Kill it and all that it started; :meth:`end` must follow."""
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses when only a zombie is left
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Wait until a killed worker is gone. Gives how it ended; its own end, if that came before the kill."""
        try:
            code = self._process.wait(_GONE_SECONDS)
        except subprocess.TimeoutExpired:
            raise GradingPoolError(
                f"grading worker {self._process.pid} is still there {_GONE_SECONDS:g} seconds after it was killed"
            ) from None
        finally:
            self._close()
        if code == -signal.SIGKILL:
            return "was killed, as the kernel does when memory runs out"
        return f"crashed: {signal.strsignal(-code)}" if code < 0 else f"ended by itself with exit code {code}"

    def printed(self) -> str:
        """The end of what it wrote to stderr while it imported; only before :meth:`end`."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), 4000, max(size - 4000, 0)).decode(errors="replace").strip()

    def _close(self) -> None:
        self.socket.close()
        self._stderr.close()
