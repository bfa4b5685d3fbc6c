"""The controller's end of one engine process."""

import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, assert_never

import msgspec

from beamline.errors import BeamlineError
from beamline.records import Key
from beamline.records.codec import decode
from beamline.rollout.vllm.faults import STACK, root_cause
from beamline.rollout.vllm.messages import (
    Abort,
    Answer,
    Command,
    Failed,
    Finished,
    Progress,
    Report,
    Start,
    Started,
    Stop,
    Submit,
)
from beamline.rollout.vllm.process import SHOW_STACK
from beamline.rollout.vllm.wire import Inbox, Outbox, WireError, pair

T = TypeVar("T")

SAY_SECONDS = 10.0  # between two words about an engine that starts
STOP_SECONDS = 10.0  # for an engine to end when it is asked to, and again when it gets SIGTERM

_GLANCE_SECONDS = 0.2  # between two looks at whether the process lives, which its socket does not always tell
_EXIT_SECONDS = 10.0  # from the end of the connection to that of the process
_KILL_SECONDS = 30.0  # for the kernel to end what was killed: a GPU's driver takes its time
_STACK_SECONDS = 2.0  # for a process that hangs to say where
_LOG_BYTES = 1 << 20  # at most, from the end of a log
_ATTENTION_SECONDS = (
    1.0  # that pass between two looks, at most: what is longer, this process did not run, or had not asked
)
_START_NUMBER = 0

_OF_TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)
"""What torchrun sets for each of its processes."""

_STAGES = (
    ("Starting to load model", "loading weights"),
    ("checkpoint shards", "loading weights"),
    ("Model loading took", "measuring memory"),
    ("Starting torch.compile", "compiling kernels: the first start on a machine takes minutes, later ones do not"),
    ("Compiling a graph", "compiling kernels: the first start on a machine takes minutes, later ones do not"),
    ("torch.compile took", "measuring memory"),
    ("Capturing CUDA graphs", "capturing graphs"),
    ("Graph capturing finished", "finishing its start"),
)
"""What vLLM 0.33 logs while it starts, and what it means."""

# The kernel ends an engine when the *thread* that started it ends: that one has to live as long as this process.
_LAUNCHER = ThreadPoolExecutor(1, "engine launcher")


def _renew_launcher() -> None:
    """In a forked process, which has no threads."""
    global _LAUNCHER
    _LAUNCHER = ThreadPoolExecutor(1, "engine launcher")


os.register_at_fork(after_in_child=_renew_launcher)


class EngineFailedError(BeamlineError, RuntimeError):
    """An engine process failed, died, hung or could not be started; nothing of it runs any more.

    ``hopeless``: it refused something that another engine would refuse too.
    """

    def __init__(self, text: str, hopeless: bool = False) -> None:
        super().__init__(text)
        self.hopeless = hopeless


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine process is started.

    ``command`` is its program and arguments, after which the number of its socket comes; ``arguments`` are those of
    :class:`~beamline.rollout.vllm.messages.Start`; ``environment`` is laid over what it has from this process
    (:func:`inherited`). Output is appended to ``log``, whose name without its ending is that of the engine. A start may
    take ``start_seconds``; later the engine may be without a new token or an awaited answer for ``token_seconds``.
    """

    command: tuple[str, ...]
    arguments: dict[str, Any]
    environment: dict[str, str]
    log: Path
    start_seconds: float
    token_seconds: float


class Replica:
    """One engine process, from its start to its end. It is launched at once; :meth:`ready` waits for it.

    Not for use by several threads. ``say`` is told, in a line, what the engine is doing while it starts.

    Raises:
        EngineFailedError: the program cannot be run.
    """

    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self.name = launch.log.stem
        self._launch, self._say = launch, say
        self._looked, self._now = time.monotonic(), 0.0  # seconds in which this process paid attention
        self._answered = self._moved = 0.0
        self._finished: list[Finished] = []
        self._asked: dict[int, str] = {}  # what each number stands for, until the answer is fetched
        self._answers: dict[int, bytes] = {}
        self._tokens = 0
        self._open: set[Key] = set()  # requests in flight
        self._last_words: Failed | None = None
        self._end: str | None = None  # how it ended, once that is known
        self._failure: EngineFailedError | None = None
        self._closed = False
        ours, theirs = pair()
        try:
            self._process, self._log_start = _LAUNCHER.submit(_launch, launch, theirs.fileno()).result()
        except OSError as error:
            ours.close()
            raise EngineFailedError(f"engine {self.name} cannot be started: {error}") from error
        finally:
            theirs.close()
        self.connection = ours
        """For :func:`multiprocessing.connection.wait`, over several replicas: when it is ready, so is :meth:`take`."""
        self.prepared_for: object = None
        """The delivery of weights that it has got ready for, which needs not announce itself again."""
        self._inbox, self._outbox = Inbox(ours), Outbox(ours)
        self.send(Start(_START_NUMBER, launch.arguments))

    @property
    def pid(self) -> int:
        """The process, and its group, to which the engine's workers belong."""
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests that were submitted and have neither finished nor been aborted."""
        return len(self._open)

    @property
    def tokens(self) -> int:
        """Tokens drawn since the start, as far as they have been reported."""
        return self._tokens

    def ready(self) -> Started:
        """Wait until the engine is built, and say what it does meanwhile.

        Raises:
            EngineFailedError: it failed, or took longer than ``start_seconds``.
        """
        said = 0.0
        self._listen(0.0)
        while _START_NUMBER not in self._answers:
            doing = stage(self._log())
            self._verify(0.0, self._launch.start_seconds, f"its start, {doing}")
            if self._now - said >= SAY_SECONDS:
                said = self._now
                self._say(f"engine {self.name}: {doing} ({said:.0f} s)")
            self._listen(_GLANCE_SECONDS)
        return self._decoded(_START_NUMBER, Started)

    def send(self, command: Command) -> None:
        """Send a command; never waits. Numbers are the caller's: each at most once, from 1 on.

        That the engine is gone is noticed by whatever waits for it next.
        """
        self._outbox.put(command)
        match command:
            case Submit(asked):
                if not self._open:
                    self._moved = self._now
                self._open.update(each.request.key for each in asked)
            case Abort(keys=keys):
                self._open.difference_update(keys)
            case _:
                pass
        if not isinstance(command, Submit | Stop):
            self._asked[command.number] = type(command).__name__

    def answer(self, number: int, kind: type[T]) -> T:
        """Wait for the answer to the command ``number``. What finishes meanwhile stays for :meth:`take`.

        Raises:
            EngineFailedError: the engine failed, or answered nothing for ``token_seconds``.
        """
        since = self._now
        self._listen(0.0)
        while number not in self._answers:
            awaited = f"the answer to {self._asked[number]}"
            self._verify(max(since, self._answered), self._launch.token_seconds, awaited)
            self._listen(_GLANCE_SECONDS)
        return self._decoded(number, kind)

    def ask(self, command: Any, kind: type[T]) -> T:
        """Send a command that has a number and wait for its answer, as :meth:`answer` does."""
        self.send(command)
        return self.answer(command.number, kind)

    def take(self, timeout: float) -> list[Finished]:
        """What has finished; waits up to ``timeout`` seconds for the first of it.

        Raises:
            EngineFailedError: the engine failed, or requests are in flight and no token came for ``token_seconds``.
                What had finished before is given first, by a call of its own.
        """
        end = time.monotonic() + timeout
        self._listen(0.0)  # before the clock is looked at: this process may have been busy with something else for long
        while not self._finished:
            since = self._moved if self._open else math.inf
            self._verify(since, self._launch.token_seconds, f"a token of {self.in_flight} requests in flight")
            left = end - time.monotonic()
            if left <= 0:
                break
            self._listen(min(left, _GLANCE_SECONDS))
        finished, self._finished = self._finished, []
        return finished

    def stop(self) -> None:
        """End the process: ask it to, then SIGTERM, then SIGKILL, to all of its group. Nothing happens if it has ended.

        Raises:
            EngineFailedError: the kernel could not end it.
        """
        self._outbox.put(Stop())
        if not self._exits(STOP_SECONDS):
            _signal_group(self.pid, signal.SIGTERM)
            self._exits(STOP_SECONDS)
        if left := self._close():
            raise EngineFailedError(f"engine {self.name} was stopped, but {left}")

    def _listen(self, timeout: float) -> None:
        """Take in what has come; wait up to ``timeout`` seconds for the first of it."""
        self._attend()
        if self._end is not None:
            return
        ended = self._process.poll() is not None  # looked at first: all that it sent is there to be read then
        last, partial = time.monotonic() + timeout + _GLANCE_SECONDS, self._inbox.partial
        try:
            while (message := self._inbox.next(timeout)) is not None:
                self._attend()
                report: Report = decode(message, Report)  # type: ignore[arg-type]  # mypy: a union is no type
                self._note(report)
                timeout = 0.0
                if time.monotonic() > last and not ended:  # there is more than can be taken in
                    return
        except EOFError:
            ended = True
        except (msgspec.MsgspecError, WireError) as error:
            self._end = f"sent what is no report: {error}"
            return
        self._attend()
        if self._inbox.partial > partial:  # while a long report arrives, no other can come
            self._moved = self._answered = self._now
        if self._last_words:
            self._end = "failed"
        elif ended:
            self._end = self._ending()

    def _attend(self) -> None:
        """Let our clock go on, which stands still while nobody asks, or while all processes are stopped."""
        now = time.monotonic()
        self._now += min(now - self._looked, _ATTENTION_SECONDS)
        self._looked = now

    def _decoded(self, number: int, kind: type[T]) -> T:
        asked = self._asked.pop(number)
        try:
            return decode(self._answers.pop(number), kind)
        except msgspec.MsgspecError as error:
            self._end = f"sent what is no answer to {asked}: {error}"
            raise self._failed(self._end) from error

    def _note(self, report: Report) -> None:
        now = self._now
        match report:
            case Answer(number, value):
                self._answers[number] = value
                self._answered = self._moved = now
            case Finished(completions):
                self._finished.append(report)
                self._open.difference_update(each.key for each in completions)
                self._moved = now
            case Progress(tokens):
                if tokens > self._tokens:
                    self._tokens, self._moved = tokens, now
            case Failed():
                self._last_words = report
            case _:
                assert_never(report)

    def _verify(self, since: float, seconds: float, awaited: str) -> None:
        """Raise if the engine has ended, or if what is awaited ``since`` then has not come in ``seconds``."""
        if self._end is not None:
            raise self._failed(self._end)
        waited = self._now - since
        if waited > seconds:
            self._show_stack()
            self._end = f"hangs: {waited:.1f} s have passed without {awaited}"
            raise self._failed(self._end)

    def _failed(self, end: str) -> EngineFailedError:
        """The error to raise; whatever is left of the process is ended first."""
        if self._failure is None:
            left = self._close()
            words = self._last_words or Failed("")
            cause = root_cause(f"{self._log()}\n{words.traceback}", end)
            text = "\n".join(filter(None, [f"engine {self.name} {end}", cause, left, f"its log: {self._launch.log}"]))
            self._failure = EngineFailedError(text, words.hopeless)
        return self._failure

    def _ending(self) -> str:
        """How the process ended, after its connection has or because it was seen to."""
        if not self._exits(_EXIT_SECONDS):
            return f"closed its connection, but had not ended {_EXIT_SECONDS:g} s later"
        code = self._process.returncode
        names = {each.value: each.name for each in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"

    def _exits(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _show_stack(self) -> None:
        """Have the process write to its log where it is."""
        os.kill(self.pid, SHOW_STACK)
        end = time.monotonic() + _STACK_SECONDS
        before, log = "", self._log()
        while (STACK not in log or log != before) and time.monotonic() < end:  # it is written line by line
            time.sleep(_STACK_SECONDS / 40)
            before, log = log, self._log()

    def _log(self) -> str:
        """What this process has written to its log."""
        try:
            with self._launch.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _LOG_BYTES))
                return file.read().decode(errors="replace")
        except OSError:  # somebody removed it; how the engine ended is known all the same
            return ""

    def _close(self) -> str:
        """Kill what is left of the process's group; gives a complaint if the kernel does not end it."""
        if self._closed:
            return ""
        self._closed = True
        _signal_group(self.pid, signal.SIGKILL)
        end = time.monotonic() + _KILL_SECONDS
        while (left := _running(self.pid)) and time.monotonic() < end:
            time.sleep(0.01)
        if not left:
            self._process.wait()
        with suppress(OSError):  # it has ended; nobody waits for who else may hold its end
            self.connection.shutdown(socket.SHUT_RDWR)
        self._outbox.close(_EXIT_SECONDS)
        self.connection.close()
        return f"processes {left} are still there {_KILL_SECONDS:g} s after they were killed" if left else ""


def stage(log: str) -> str:
    """What an engine that wrote this while it starts is doing."""
    line, doing = max(_STAGES, key=lambda each: log.rfind(each[0]))
    return doing if line in log else "beginning"


def _launch(launch: Launch, descriptor: int) -> tuple["subprocess.Popen[bytes]", int]:
    """The process, and where its part of the log begins, in bytes."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with launch.log.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            [*launch.command, str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[descriptor],
            start_new_session=True,  # away from the terminal's Ctrl-C, and to be ended with all that it starts
            env=inherited(os.environ) | launch.environment,
        )
        return process, start


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an engine has from this process: none by which torchrun tells it which rank it is.

    An engine would take itself for a rank of the learner's process group.
    """
    return {name: value for name, value in environment.items() if not _OF_TORCHRUN.fullmatch(name)}


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses when only a zombie is left
        os.killpg(group, number)


def _running(group: int) -> list[int]:
    """The processes of a group, without those that have ended and wait for their parent to notice; on Linux."""
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):  # proc(5): pid (name) state ppid pgrp ...
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, pgrp = status.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                pids.append(int(status.parent.name))
    return pids
