"""The few file operations that everything durable goes through.

Every change of the disk is a call of ``os`` in this module, so that a test can fail each of them in turn
(``tests/faults.py``). After a failure or a crash a file holds its old or its new content, never a mixture.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamline.checkpoint.errors import CheckpointError

Bytes = bytes | memoryview | np.ndarray[Any, np.dtype[Any]]

TRASH = ".trash"
"""Suffix of a hidden folder that is being deleted."""

_BLOCK = 8 << 20  # bytes; a block is hashed and written while it is in the processor's cache
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file must be: its ``size`` in bytes and the hexadecimal ``sha256`` of its content."""

    size: int
    sha256: str


def write_atomic(path: Path, chunks: Iterable[Bytes]) -> FileDigest:
    """Write a file whole or not at all, and wait until it is on disk; its folder must exist.

    The chunks go to a hidden temporary file beside ``path`` (arrays in C order) and are hashed on the way; then the
    file is synced, renamed, and the folder synced. One writer at a time for each path.

    Raises:
        OSError: with the number of the first failure; the message names ``path``. The temporary file is removed when
            the disk still allows it. ``path`` holds its old content, or the new one if only the last sync failed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with ExitStack() as undo:
        undo.callback(_unlink_if_possible, temporary)
        digest = _write_synced(temporary, path, chunks)
        with _explained("write", path):
            os.replace(temporary, path)
        undo.pop_all()
    fsync_dir(path.parent)
    return digest


def write_json(path: Path, value: Mapping[str, Any]) -> FileDigest:
    """Write plain data as JSON, atomically. Keys must be strings; tuples come back as lists.

    Raises:
        TypeError: a value is not plain data, or a number is not finite.
        OSError: as for :func:`write_atomic`.
    """
    try:
        text = json.dumps(dict(value), indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{path} can hold plain data with finite numbers only: {error}") from error
    return write_atomic(path, [text.encode() + b"\n"])


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: there is no such file, or it does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; the checkpoint is incomplete") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object, found a {type(value).__name__}")
    return value


def hash_file(path: Path) -> FileDigest:
    """Size and hash of a file as it is on disk now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(file.tell(), digest.hexdigest())


def make_folder(path: Path) -> None:
    """Create a folder and its parents, each synced into its parent; one that exists is left as it is.

    Raises:
        OSError: the folder cannot be created, or the path is a file.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    with _explained("create", path):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise
    fsync_dir(path.parent)


def make_empty_folder(path: Path) -> None:
    """Create a folder and its parents for what is written next; one that exists has to be empty.

    Raises:
        FileExistsError: something is in it.
        OSError: as for :func:`make_folder`.
    """
    make_folder(path)
    there = min(path.iterdir(), default=None)
    if there is not None:
        raise FileExistsError(f"{there} is there already; give an empty folder, or a name that is free")


def rename_folder(source: Path, target: Path) -> None:
    """Give a folder another name beside its old one, at once, and wait until that is on disk.

    Raises:
        OSError: the target exists and is not empty, or the disk fails.
    """
    with _explained("create", target):
        os.replace(source, target)
    fsync_dir(target.parent)


def remove_tree(path: Path) -> None:
    """Delete a folder. It takes a hidden name first, so that a half-removed one is never taken for a whole one.

    After a crash the rest lies under ``.<name>.trash``; calling this with that name ends the work.

    Raises:
        OSError: there is no such folder, or the disk fails.
    """
    trash = path if path.suffix == TRASH else path.with_name(f".{path.name.removeprefix('.')}{TRASH}")
    if trash != path:
        if os.path.lexists(trash):
            _delete(trash)
        rename_folder(path, trash)
    _delete(trash)


def fsync_dir(path: Path) -> None:
    """Wait until the names in a folder (created, renamed, removed) are on disk."""
    with _explained("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_synced(temporary: Path, path: Path, chunks: Iterable[Bytes]) -> FileDigest:
    size, sha256 = 0, hashlib.sha256()
    with _explained("write", path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for chunk in chunks:  # outside of _explained: errors of whoever makes the chunks are their own
            for block in _blocks(chunk):
                sha256.update(block)
                size += len(block)
                with _explained("write", path):
                    _write_all(descriptor, block)
        with _explained("write", path):
            os.fsync(descriptor)
    finally:
        with _explained("write", path):
            os.close(descriptor)
    return FileDigest(size, sha256.hexdigest())


def _blocks(chunk: Bytes) -> Iterator[memoryview]:
    raw = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data if isinstance(chunk, np.ndarray) else chunk
    flat = memoryview(raw).cast("B")
    for start in range(0, len(flat), _BLOCK):
        yield flat[start : start + _BLOCK]


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        os.unlink(path)
        return
    for child in list(path.iterdir()):
        _delete(child)
    os.rmdir(path)


def _unlink_if_possible(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)


@contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    """Raise an OSError again with the path that it is about; ``os.write`` and ``os.fsync`` know only a number."""
    try:
        yield
    except OSError as error:
        advice = "; free space there, or use a folder on another disk" if error.errno in _NO_SPACE else ""
        raise OSError(error.errno, f"cannot {action} {path}: {error.strerror}{advice}") from error
