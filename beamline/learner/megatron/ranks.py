"""All ranks of the learner do what the first one says, at the same time."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from beamline.errors import BeamlineError


class RankFailedError(BeamlineError, RuntimeError):
    """A rank of the learner failed at what all were asked for; its traceback is in the text."""


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What one of ours raised goes on as it is; of anything else there is the traceback."""

    error: BeamlineError | FloatingPointError | None
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
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_seconds))

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """What the method gives, on each rank.

        Raises:
            BeamlineError, FloatingPointError: a rank raised it.
            RankFailedError: a rank raised something else.
            RuntimeError: a rank has ended, or did not take part in time; it has written why.
        """
        self._broadcast(_Call(name, arguments))
        results = self._gather(self._result(name, arguments))
        failures = [(rank, each) for rank, each in enumerate(results) if isinstance(each, _Failure)]
        for rank, failure in failures:
            raise failure.error or RankFailedError(f"rank {rank} of the learner: {failure.traceback}")
        return results

    def serve(self) -> None:
        """Do what the first rank says, until it says stop."""
        while (call := self._broadcast(None)) is not None:
            self._gather(self._result(call.name, call.arguments))

    def stop(self) -> None:
        """Have the others return from :meth:`serve`."""
        self._broadcast(None)

    def _result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        method: Callable[..., Any] = getattr(self._target, name)
        try:
            return method(*arguments)
        except (BeamlineError, FloatingPointError) as error:
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
        dist.gather_object(result, results, dst=0, group=self._control)
        return results or []
