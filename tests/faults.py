"""Fail the file operations of :mod:`beamline.checkpoint.files` one by one, to see that nothing is lost.

::

    with failing_operation() as disk:          # fails nothing, counts
        save()
    for n in range(1, disk.performed + 1):
        with pytest.raises(Crash), failing_operation(n, Crash()):
            save()
        ...                                    # whatever was there must still be there
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from beamline.checkpoint import files

CHANGES = ("open", "write", "fsync", "close", "replace", "mkdir", "unlink", "rmdir", "ftruncate")


class Crash(BaseException):
    """The machine stops: this operation and all later ones fail, and what was not synced is lost."""


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """Stands in for the module ``os``. ``trace`` has the name and path of every operation that was asked for.

    Nothing waits for the real disk: a sync only notes that the content is safe.
    """

    def __init__(self, n: int | None, error: BaseException) -> None:
        self.trace: list[tuple[str, Path]] = []
        self._n = n
        self._error = error
        self._paths: dict[int, Path] = {}
        self._unsynced: dict[int, int] = {}  # inode: a descriptor of our own, so that the inode stays alive

    @property
    def performed(self) -> int:
        """How many operations were asked for."""
        return len(self.trace)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGES:
            return real
        return lambda *args: self._operate(name, real, args)

    def settle(self, lost: bool) -> None:
        """Forget what was not synced, and truncate it when it is ``lost``."""
        for descriptor in self._unsynced.values():
            if lost:
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
        self._unsynced.clear()

    def _operate(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        about = args[1] if name == "replace" else args[0]
        self.trace.append((name, self._paths[about] if isinstance(about, int) else Path(about)))
        crash = isinstance(self._error, Crash)
        if self._n is not None and (self.performed == self._n or (crash and self.performed > self._n)):
            self._fail(name, args, crash)
        if name == "fsync":
            self._sync(args[0])
            return None
        if name == "write":
            self._note_unsynced(args[0])
        result = real(*args)
        if name == "open":
            self._paths[result] = Path(about)
        return result

    def _fail(self, name: str, args: tuple[Any, ...], crash: bool) -> None:
        if name == "close":
            os.close(args[0])
        if name == "write" and self.performed == self._n:
            self._note_unsynced(args[0])
            os.write(args[0], args[1][: len(args[1]) // 2])
        if crash:
            self.settle(lost=True)
        raise self._error

    def _note_unsynced(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if inode not in self._unsynced:
            self._unsynced[inode] = os.dup(descriptor)

    def _sync(self, descriptor: int) -> None:
        own = self._unsynced.pop(os.fstat(descriptor).st_ino, None)
        if own is not None:
            os.close(own)


@contextmanager
def failing_operation(n: int | None = None, error: BaseException | None = None) -> Iterator[Disk]:
    """Let the n-th operation (from 1; None = none) raise ``error``: an OSError fails alone, a :class:`Crash` for good.

    A failing write leaves half of its bytes behind. Yields the :class:`Disk` that counts the operations.
    """
    disk = Disk(n, error if error is not None else Crash())
    with patch.object(files, "os", disk):
        try:
            yield disk
        finally:
            disk.settle(lost=False)
