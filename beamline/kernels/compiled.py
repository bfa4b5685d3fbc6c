"""Compiling kernels: numba, without the interpreter lock, cached on disk by the hash of all kernel sources."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba.extending
from numba.core import config

from beamline.errors import BeamlineError

F = TypeVar("F", bound=Callable[..., Any])


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
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
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
        compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before
    return compiled


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that kernels call, and that emits its own instructions."""
    return numba.extending.intrinsic(function)
