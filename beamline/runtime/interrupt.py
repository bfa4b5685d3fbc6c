"""SIGINT and SIGTERM: the first asks the run to stop after its step, the second stops it at once."""

import os
import signal
from types import FrameType

from beamline.errors import BeamlineError


class Interrupted(BeamlineError):  # noqa: N818  (an event, not an error)
    """The run was asked to stop, has saved, and should exit with ``code``: 128 + the signal's number."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stopped by {signal.Signals(code - 128).name}; saved, go on with checkpoint.resume=latest")
        self.exit_code = code


class Interrupt:
    """While entered, remembers the first signal; a second one acts as it would without us."""

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._remember) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._restore()
        # os.write, because a handler may run in the middle of another write to the stream
        os.write(2, b"\nstopping after this step; the same signal again stops at once\n")

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def raise_if_received(self) -> None:
        """Leave the run, once everything is saved.

        Raises:
            Interrupted: a signal came.
        """
        if self.received is not None:
            raise Interrupted(128 + self.received)
