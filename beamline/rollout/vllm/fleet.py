"""The engine processes of a sampler, together: started side by side, asked together, replaced when one fails."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeVar

from beamline.rollout.vllm.replica import EngineFailedError, Launch, Replica

T = TypeVar("T")


class Fleet:
    """Engine processes that all hold the same weights. They start here; that takes until the slowest is ready.

    Args:
        launches: how each is started, and started again.
        max_restarts: how often an engine is replaced, over all of them, before a failure ends everything.
        say: is told, in a line each, what engines do while they start and why one failed.

    Raises:
        EngineFailedError: an engine could not be started.
    """

    def __init__(self, launches: Sequence[Launch], max_restarts: int, say: Callable[[str], None]) -> None:
        self._launches, self._max_restarts, self._say = launches, max_restarts, say
        self._numbers = count(1)
        self.restarts = 0
        self.replicas: list[Replica] = []
        try:
            self.replicas += (Replica(launch, say) for launch in launches)
            for replica in self.replicas:
                self._await(replica)
        except BaseException:
            self.close()
            raise

    def number(self) -> int:
        """A number for a command."""
        return next(self._numbers)

    def ask(self, replica: int, command: Callable[[int], Any], kind: type[T]) -> T:
        """Have one engine do something; ``command`` makes it from its number.

        Raises:
            EngineFailedError: it failed.
        """
        return self.replicas[replica].ask(command(self.number()), kind)

    def wait(self, timeout: float) -> None:
        """Until an engine has something to report, or ``timeout`` seconds are over."""
        wait([replica.connection for replica in self.replicas], timeout)

    def replace(self, replica: int, error: EngineFailedError) -> None:
        """Start an engine again that has failed, as it was at its start: without the weights that it was given since.

        One that fails in its start is started again, too.

        Raises:
            EngineFailedError: that was done too often already, or it refuses to start.
        """
        while True:
            if self.restarts >= self._max_restarts:
                times = f"{self.restarts} engines were started again before it (rollout.vllm.max_restarts)"
                raise EngineFailedError(f"{error}\n{times}") from error
            self.restarts += 1
            self._say(f"{error}\nit is started again ({self.restarts} of at most {self._max_restarts} times)")
            try:
                self.replicas[replica] = Replica(self._launches[replica], self._say)
                self._await(self.replicas[replica])
            except EngineFailedError as again:
                if again.hopeless:
                    raise
                error = again
            else:
                return

    def _await(self, replica: Replica) -> None:
        self._say(f"engine {replica.name} is ready: {replica.ready()}")

    def close(self) -> None:
        """End all processes, side by side: one that does not listen is given its seconds only once."""
        if not self.replicas:
            return
        endings = [Thread(target=_end, args=(replica,), name="engine end") for replica in self.replicas]
        for ending in endings:
            ending.start()
        for ending in endings:
            ending.join()


def _end(replica: Replica) -> None:
    with suppress(EngineFailedError):  # that the kernel does not end one keeps none of the others alive
        replica.stop()
