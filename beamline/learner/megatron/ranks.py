"""All ranks of the learner do what the first one says, at the same time."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Timer
from typing import Any

import torch.distributed as dist

from beamline.errors import BeamlineError
from beamline.learner.megatron.lifeline import end_at_once

FAILED_SECONDS = 60.0  # from the failure of a rank to its end, if the others do not come to an end of the call


class RankFailedError(BeamlineError, RuntimeError):
    """A rank of the learner failed at what all were asked for, or has ended."""


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What the user can mend goes on as it is, as in one process; of anything else there is the traceback."""

    error: BeamlineError | FloatingPointError | OSError | None
    traceback: str


class Ranks:
    """The ranks of the default process group. The first one calls, the others :meth:`serve`.

    Args:
        target: whose methods are called, on each rank its own.
        deadline_seconds: longest time that ranks wait for each other to take part in a call. It must exceed that of
            whatever the first one does between two calls.
    """

    def __init__(self, target: Any, deadline_seconds: float) -> None:
        self._target, self._size, self._rank = target, dist.get_world_size(), dist.get_rank()
        self._deadline_seconds = deadline_seconds
        self.broken = False
        """Whether a call was left before all had answered: nothing can be asked any more."""
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_seconds))

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """What the method gives, on each rank.

        Raises:
            BeamlineError, FloatingPointError, OSError: a rank raised it.
            RankFailedError: a rank raised something else, has ended, or did not take part in time.
        """
        if self.broken:
            raise RankFailedError(
                f"ranks of the learner cannot be asked for {name}: an earlier call was left half done"
            )
        self.broken = True  # for as long as it lasts: it may be left by Ctrl-C, too
        try:
            self._broadcast(_Call(name, arguments))
            results = self._gather(self._result(name, arguments))
        except RuntimeError as error:
            raise RankFailedError(f"{name}: another rank of the learner {self._silent(error)}") from error
        self.broken = False
        failures = [(rank, each) for rank, each in enumerate(results) if isinstance(each, _Failure)]
        for rank, failure in failures:
            raise failure.error or RankFailedError(f"rank {rank} of the learner: {failure.traceback}")
        return results

    def serve(self) -> None:
        """Do what the first rank says, until it says stop.

        Raises:
            RankFailedError: it has ended without that, or says nothing any more.
        """
        try:
            while (call := self._broadcast(None)) is not None:
                self._gather(self._result(call.name, call.arguments))
        except RuntimeError as error:
            self.broken = True
            raise RankFailedError(f"rank {self._rank} of the learner: the first one {self._silent(error)}") from error

    def stop(self) -> None:
        """Have the others return from :meth:`serve`. Where a call was left half done they cannot; they end."""
        if not self.broken:
            with suppress(RuntimeError):  # one that has ended needs not be told
                self._broadcast(None)

    def _silent(self, error: RuntimeError) -> str:
        first = str(error).partition("\n")[0]
        return f"has ended, or has said nothing for {self._deadline_seconds:.0f} s ({first}); see what it wrote"

    def _result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        method: Callable[..., Any] = getattr(self._target, name)
        try:
            return method(*arguments)
        except (BeamlineError, FloatingPointError, OSError) as error:
            return _Failure(error, "")
        except Exception:  # noqa: BLE001  whatever it is, the first rank must know
            # Written down at once: if the others wait for this rank inside of the call, nothing is gathered any more.
            text = traceback.format_exc()
            print(f"rank {self._rank} of the learner, {name}: {text}", file=sys.stderr, flush=True)
            return _Failure(None, text)

    def _broadcast(self, call: _Call | None) -> _Call | None:
        if self._size == 1:
            return call
        box = [call]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def _gather(self, result: Any) -> list[Any]:
        if self._size == 1:
            return [result]
        results: list[Any] | None = [None] * self._size if self._rank == 0 else None
        with self._limited(result):
            dist.gather_object(result, results, dst=0, group=self._control)
        return results or []

    @contextmanager
    def _limited(self, result: Any) -> Iterator[None]:
        """Wait for the others no longer than it takes them to end a call, where this rank has failed in it.

        They may wait for it inside of the call, as long as half an hour; it ends, and they with it (``lifeline.py``).
        """
        if not (isinstance(result, _Failure) and result.error is None):
            yield
            return
        timer = Timer(FAILED_SECONDS, end_at_once, [f"rank {self._rank} of the learner ends: it failed, and they wait"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
