"""Grading in worker processes, which a response can hang or crash but no more than once.

A worker grades one task at a time. Some more lie ready in its socket, so that it never waits for this process, and it
says when it starts each: the deadline runs from then, by this process's clock. A worker that is over it is killed with
the one task that it had started; those behind it go to another worker. A new worker is started only when a task wants
one. No threads and no signals are used on either side.
"""

import math
import selectors
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from beamline.tasks.graders.verdict import Verdict
from beamline.tasks.pool_process import START_ATTEMPTS, GradingPoolError, Ticket, WorkerProcess
from beamline.tasks.pool_worker import GRADED, READY, SPENT, START, pack

__all__ = ["GradingPool", "GradingPoolError", "GradingTask", "Outcome", "Restarts"]


@dataclass(frozen=True, slots=True)
class GradingTask:
    """What is graded: a response against an answer, by the grader of a name."""

    grader: str
    response: str
    answer: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task. ``verdict`` is there when it was graded, ``error`` says why when it was not.

    ``seconds`` is the time in the grader; the time in the queue is never part of it.
    """

    status: Literal["graded", "timeout", "error"]
    verdict: Verdict | None
    seconds: float
    error: str | None


@dataclass(slots=True)
class Restarts:
    """How many workers were replaced: over a deadline, for the memory that they held, ended or silent by themselves."""

    timeout: int = 0
    memory: int = 0
    crash: int = 0


class GradingPool:
    """Grades tasks in up to ``workers`` processes; use it as a context, or close it.

    Args:
        workers: processes at most; one is started when a task finds the others busy.
        deadline_seconds: for one task, from when its grading starts.
        memory_mb: what one task may take beyond what its worker holds anyway, in MiB; enforced on Linux.
        graders: import path ``package.module:NAME`` of the mapping from names to graders. The pool imports it in the
            workers only.

    All calls must come from one thread that lives as long as the pool: on Linux a worker ends with the thread that
    started it.

    Raises:
        ValueError: a bound that is not positive.
        GradingPoolError: from any method: workers cannot be started (the message has what they printed) or ended, or
            the pool is closed.
    """

    def __init__(
        self, workers: int, deadline_seconds: float, memory_mb: int, graders: str = "beamline.tasks.graders:GRADERS"
    ) -> None:
        for name, value in (("workers", workers), ("deadline_seconds", deadline_seconds), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ValueError(f"GradingPool: {name} must be positive, not {value}")
        self._limit, self._deadline, self._memory_mb, self._graders = workers, deadline_seconds, memory_mb, graders
        self._queue: deque[Ticket] = deque()
        self._workers: list[WorkerProcess] = []
        self._keys: set[Hashable] = set()
        self._finished: dict[Hashable, Outcome] = {}
        self._failed_starts = 0
        self._selector: selectors.BaseSelector | None = selectors.DefaultSelector()
        self.restarts = Restarts()

    def __enter__(self) -> "GradingPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """How many tasks were submitted whose outcome :meth:`poll` has not returned."""
        return len(self._keys)

    def submit(self, key: Hashable, task: GradingTask) -> None:
        """Have a task graded; :meth:`poll` returns its outcome under the key. Does not wait.

        Raises:
            ValueError: the key is pending.
        """
        self._open()
        if key in self._keys:
            raise ValueError(f"GradingPool: {key!r} is being graded already")
        self._keys.add(key)
        self._queue.append(Ticket(key, task.grader, pack(task.grader, task.response, task.answer)))
        self._dispatch()

    def poll(self, timeout: float) -> list[tuple[Hashable, Outcome]]:
        """Outcomes as soon as there are any; none when the timeout (seconds) passes, or when nothing is pending.

        Deadlines are enforced and workers replaced in this call. A task that took longer than the deadline is a
        timeout, whether or not this was called in time.
        """
        self._open()
        until, left = time.monotonic() + timeout, timeout
        while self._keys:
            self._advance(0.0 if self._finished else left)
            left = until - time.monotonic()
            if self._finished or left <= 0:
                break
        taken = list(self._finished.items())
        self._finished.clear()
        self._keys.difference_update(key for key, _ in taken)
        return taken

    def grade_all(self, tasks: Sequence[GradingTask]) -> list[Outcome]:
        """The outcomes of tasks, in order. Those of tasks under keys of their own stay for :meth:`poll`."""
        batch = object()
        keys = [(batch, index) for index in range(len(tasks))]
        for key, task in zip(keys, tasks, strict=True):
            self.submit(key, task)
        outcomes = []
        for key in keys:
            while key not in self._finished:
                self._advance(math.inf)
            outcomes.append(self._finished.pop(key))
            self._keys.discard(key)
        return outcomes

    def close(self) -> None:
        """Kill the workers, whatever they are doing. What is pending is dropped."""
        if self._selector is None:
            return
        self._selector.close()
        self._selector = None
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._queue.clear()
        self._keys.clear()
        self._finished.clear()

    def _open(self) -> selectors.BaseSelector:
        if self._selector is None:
            raise GradingPoolError("the grading pool is closed")
        return self._selector

    def _advance(self, timeout: float) -> None:
        """One round: hand out, wait for replies up to ``timeout`` seconds (or the next deadline), enforce deadlines."""
        selector = self._open()
        self._dispatch()
        if not self._workers:
            return
        now = time.monotonic()
        next_deadline = min(worker.expires(self._deadline) for worker in self._workers)
        wait = max(min(timeout, next_deadline - now), 0.0)
        for key, events in selector.select(None if wait == math.inf else wait):
            if events & selectors.EVENT_WRITE:
                self._send(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)
        # Late is who was late before the wait: all that was said up to then has been read, however long nobody polled.
        for worker in [worker for worker in self._workers if worker.expires(self._deadline) <= now]:
            self._end_overdue(worker)

    def _dispatch(self) -> None:
        """Start workers if tasks want them, and give each task to the one that has the fewest."""
        unfinished = len(self._keys) - len(self._finished)
        while len(self._workers) < min(self._limit, unfinished):
            worker = WorkerProcess(self._memory_mb, self._graders)
            self._workers.append(worker)
            self._open().register(worker.socket, selectors.EVENT_READ, worker)
        given = set()
        while self._queue:
            able = [worker for worker in self._workers if worker.able]
            if not able:
                break
            chosen = min(able, key=lambda worker: len(worker.tickets))
            chosen.give(self._queue.popleft())
            given.add(chosen)
        for worker in given:
            self._send(worker)

    def _send(self, worker: WorkerProcess) -> None:
        worker.send()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.stuck else 0)
        if self._open().get_key(worker.socket).events != events:
            self._open().modify(worker.socket, events, worker)

    def _read(self, worker: WorkerProcess) -> None:
        replies, alive = worker.receive()
        for kind, *values in replies:
            if worker in self._workers:
                self._handle(worker, kind, values)
        if worker in self._workers and not alive:
            self._end_lost(worker)

    def _handle(self, worker: WorkerProcess, kind: str, values: list[str]) -> None:
        if kind == READY:
            worker.ready = True
        elif kind == START:
            worker.started = time.monotonic()
            worker.warm.add(worker.tickets[0].grader)
            self._failed_starts = 0
        elif kind == SPENT:
            self.restarts.memory += 1
            self._end(worker)
        else:
            worker.started = None
            self._finished[worker.tickets.popleft().key] = self._outcome(kind, float(values[0]), values[1:])

    def _outcome(self, kind: str, seconds: float, values: list[str]) -> Outcome:
        if seconds > self._deadline:
            return self._timeout(seconds)
        if kind == GRADED:
            right, *parsed = values
            return Outcome("graded", Verdict(bool(right), parsed[0] if parsed else None), seconds, None)
        return Outcome("error", None, seconds, values[0])

    def _timeout(self, seconds: float) -> Outcome:
        return Outcome("timeout", None, seconds, f"grading took longer than {self._deadline:g} seconds")

    def _end_overdue(self, worker: WorkerProcess) -> None:
        if worker.started is None:
            self._end_lost(worker, "was silent for too long")
            return
        self.restarts.timeout += 1
        self._finished[worker.tickets.popleft().key] = self._timeout(time.monotonic() - worker.started)
        self._end(worker)

    def _end_lost(self, worker: WorkerProcess, why: str | None = None) -> None:
        """A worker that ended, or does not begin. What it had started failed; what it had not goes to another one."""
        self.restarts.crash += 1
        importing, printed, failed = worker.importing, worker.printed(), None
        if worker.tickets and not importing:
            worker.tickets[0].lost += 1
            if worker.started is not None or worker.tickets[0].lost == START_ATTEMPTS:
                failed = worker.tickets.popleft()
        ended = self._end(worker)
        how = why or ended
        if failed is not None:
            seconds = 0.0 if worker.started is None else time.monotonic() - worker.started
            self._finished[failed.key] = Outcome("error", None, seconds, f"the grading worker {how}")
        if importing:
            self._count_failed_start(how, printed)

    def _count_failed_start(self, how: str, printed: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == START_ATTEMPTS:
            self._failed_starts = 0
            raise GradingPoolError(
                f"grading workers do not start: {START_ATTEMPTS} in a row failed to load the graders of "
                f"{self._graders}; the last one {how}, and printed: {printed or 'nothing'}"
            )

    def _end(self, worker: WorkerProcess) -> str:
        """Kill a worker; its tasks are the next to be handed out. Gives how it ended."""
        self._open().unregister(worker.socket)
        self._workers.remove(worker)
        self._queue.extendleft(reversed(worker.tickets))
        worker.tickets.clear()
        worker.kill()
        return worker.end()
