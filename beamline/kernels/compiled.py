"""Compiling kernels: numba, without the interpreter lock, cached on disk by the hash of all kernel sources."""

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba.extending
from filelock import FileLock, Timeout
from numba.core import config

from beamline.errors import BeamlineError

F = TypeVar("F", bound=Callable[..., Any])


_LOCK_SECONDS = 120


class CacheFolderError(BeamlineError, OSError):
    """There is no place for compiled kernels."""


def cache_folder(package: Path) -> Path:
    """The folder for machine code of the kernels that a package has now; made if it is not there.

    Raises:
        CacheFolderError: it cannot be written. numba would go on silently beside the sources, without the hash.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("kernels/**/*.py")):
        digest.update(path.read_bytes())
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:  # a user without a home
        raise CacheFolderError(f"there is no place for compiled kernels ({error}); set XDG_CACHE_HOME") from error
    folder = home / "beamline" / "kernels" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CacheFolderError(
            f"compiled kernels are kept in {folder}, which cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can"
        ) from error
    return folder


_FOLDER = str(cache_folder(Path(__file__).parent.parent))


def first_use() -> bool:
    """Whether nothing has been compiled yet of the kernels as they are."""
    return next(Path(_FOLDER).rglob("*.nbc"), None) is None


def kernel(function: F) -> F:
    """Compile at the first call of each signature; IEEE arithmetic, no reordering.

    numba's own cache looks only at the file of a function, and would keep machine code into which an older helper of
    another file was inlined. So every state of the sources has a folder of its own.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = _FOLDER
    try:
        compiled: Any = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before
    cache = compiled._cache
    cache.load_overload, cache.save_overload = _explained(cache.load_overload), _explained(cache.save_overload)
    return cast(F, compiled)


def _explained(access: Callable[..., Any]) -> Callable[..., Any]:
    """An access to the cache, one process at a time: numba's own gives two that write at once the same file name."""

    def locked(*arguments: Any) -> Any:
        try:
            with FileLock(f"{_FOLDER}/lock", timeout=_LOCK_SECONDS):
                return access(*arguments)
        except Timeout as error:
            raise CacheFolderError(
                f"another process has held {_FOLDER}/lock for {_LOCK_SECONDS} s, which takes milliseconds as a rule; "
                "is one stopped (state T in `ps`)? End it, or set XDG_CACHE_HOME to another folder"
            ) from error
        except OSError as error:
            raise CacheFolderError(f"cannot read or write compiled kernels in {_FOLDER}: {error}") from error
        except (EOFError, pickle.UnpicklingError) as error:
            raise CacheFolderError(
                f"compiled kernels in {_FOLDER} are damaged ({error}); delete that folder"
            ) from error

    return locked


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that kernels call, and that emits its own instructions."""
    return numba.extending.intrinsic(function)
