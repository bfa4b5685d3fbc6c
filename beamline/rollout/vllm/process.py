"""An engine process: it takes commands, steps its engine while there is work, and reports.

Started as ``python -m beamline.rollout.vllm.process FD``, where FD is its end of a pair of sockets; see
:class:`~beamline.rollout.vllm.replica.Replica` for the other end.
"""

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol, assert_never

from beamline.errors import BeamlineError
from beamline.records import Completion, Key
from beamline.records.codec import decode, encode
from beamline.rollout.vllm import messages
from beamline.rollout.vllm.messages import (
    Answer,
    Asked,
    Command,
    DeviceMemory,
    Failed,
    Finished,
    Loaded,
    Memory,
    Prepared,
    Progress,
    Started,
    Stop,
)
from beamline.rollout.vllm.wire import Inbox, Outbox
from beamline.tasks.pool_worker import end_with_parent
from beamline.transfer.group import Meeting
from beamline.transfer.plan import Shares

SHOW_STACK = signal.SIGUSR1
"""An engine process that gets it writes where it is to its log, even if it hangs."""

_PROGRESS_SECONDS = 0.25  # between two reports of it


class Engine(Protocol):
    """What an engine process drives: vLLM (``engine.py``), or a stub in tests. All calls return when they are done."""

    started: Started

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""

    def submit(self, asked: Sequence[Asked]) -> None:
        """Begin with requests."""

    def step(self) -> tuple[list[Completion], int]:
        """One pass over the batch: what ended with it, and how many tokens were drawn."""

    def abort(self, keys: Collection[Key]) -> list[Completion]:
        """Partials of requests; keys of such that have ended already are passed over."""

    def prepare(self, shares: Shares, bucket_bytes: int) -> Prepared:
        """Where each part goes is found once, for all loads to come."""

    def join(self, meeting: Meeting) -> None:
        """Meet the learner's ranks in a group."""

    def fill(self, bucket: int, memory: Sequence[Sequence[bytes]] | None) -> None:
        """Copy a bucket of every pair of ranks, out of this memory or out of the group, to where its parts belong."""

    def finish(self, version: int) -> Loaded:
        """All buckets are there."""

    def sleep(self, level: int) -> DeviceMemory:
        """Give memory back."""

    def wake(self, what: Collection[Memory]) -> DeviceMemory:
        """Take it again."""

    def stop(self) -> None:
        """End orderly."""


class _Service:
    """Commands and steps in turn, once there is an engine."""

    def __init__(self, engine: Engine, inbox: Inbox, outbox: Outbox) -> None:
        self._engine, self._inbox, self._outbox = engine, inbox, outbox
        self._tokens, self._reported = 0, time.monotonic()

    def run(self) -> None:
        """Until the controller says stop, or is gone."""
        while self._obey():
            if self._engine.busy:
                self._step()
        self._engine.stop()

    def _obey(self) -> bool:
        """Carry out what has come; wait for a command when there is nothing to step for. False if it is over."""
        while command := _next(self._inbox, 0.0 if self._engine.busy else None):
            if isinstance(command, Stop):
                return False
            self._carry_out(command)
        return True

    def _carry_out(self, command: Command) -> None:
        engine, answer = self._engine, self._answer
        match command:
            case messages.Submit(asked):
                engine.submit(asked)
            case messages.Abort(number, keys):
                answer(number, engine.abort(keys))
            case messages.Prepare(number, shares, bucket_bytes):
                answer(number, engine.prepare(shares, bucket_bytes))
            case messages.Join(number, meeting):
                engine.join(meeting)
                answer(number, None)
            case messages.Fill(number, bucket, memory):
                engine.fill(bucket, memory)
                answer(number, None)
            case messages.Finish(number, version):
                answer(number, engine.finish(version))
            case messages.Sleep(number, level):
                answer(number, engine.sleep(level))
            case messages.Wake(number, what):
                answer(number, engine.wake(what))
            case messages.Start() | Stop():
                raise ValueError(f"{command} to an engine that has been started")
            case _:
                assert_never(command)

    def _answer(self, number: int, value: object) -> None:
        self._outbox.put(Answer(number, encode(value)))

    def _step(self) -> None:
        completions, tokens = self._engine.step()
        self._tokens += tokens
        if completions:
            self._outbox.put(Finished(completions))
        now = time.monotonic()
        if now - self._reported >= _PROGRESS_SECONDS or not self._engine.busy:
            self._outbox.put(Progress(self._tokens))
            self._reported = now


def serve(connection: socket.socket, build: Callable[[dict[str, Any]], Engine]) -> None:
    """Build an engine as the first command says, and drive it until :class:`Stop` or until the controller is gone.

    Raises:
        SystemExit: the engine failed. Its traceback has been printed and reported.
    """
    inbox, outbox = Inbox(connection), Outbox(connection)
    try:
        command = _next(inbox, None)
        if isinstance(command, Stop):
            return
        if not isinstance(command, messages.Start):
            raise ValueError(f"the first command must be Start, not {command}")
        engine = build(command.arguments)
        outbox.put(Answer(command.number, encode(engine.started)))
        _Service(engine, inbox, outbox).run()
    except Exception as error:  # noqa: BLE001  whatever it is, the controller must know
        with suppress(OSError):  # the disk may be full; the controller must know all the same
            traceback.print_exc()
        text = traceback.format_exc().encode(errors="backslashreplace").decode()  # it may quote what is no text
        outbox.put(Failed(text, hopeless=isinstance(error, BeamlineError)))
        outbox.close(None)  # the controller may be busy; if it ends, so does this process
        raise SystemExit(1) from None


def _next(inbox: Inbox, timeout: float | None) -> Command | None:
    """The next command, or None if there is none in time; a controller that is gone wants it to stop."""
    try:
        message = inbox.next(timeout)
    except EOFError:
        return Stop()
    return None if message is None else decode(message, Command)  # type: ignore[arg-type]  # mypy: a union is no type


def attach(descriptor: int) -> socket.socket:
    """Make this process an engine process, which ends with its controller and not by Ctrl-C.

    ``descriptor`` is its end of the pair of sockets.
    """
    end_with_parent(os.getppid())  # a parent that is gone already is noticed by the first read
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    connection.set_inheritable(False)  # or workers would keep it open
    os.register_at_fork(after_in_child=connection.close)  # and so would those that are forked
    faulthandler.enable()
    faulthandler.register(SHOW_STACK, all_threads=False)
    return connection


def main() -> None:
    """Serve vLLM at the end of the socket whose number is the last argument."""

    def build(arguments: dict[str, Any]) -> Engine:
        from beamline.rollout.vllm.engine import VllmEngine

        return VllmEngine(arguments)

    serve(attach(int(sys.argv[-1])), build)


if __name__ == "__main__":
    main()
