"""The manifest makes a folder a checkpoint: it is written last, and lists every other file with size and hash."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from beamline.checkpoint.errors import CheckpointError
from beamline.checkpoint.files import FileDigest, hash_file, read_json, write_atomic
from beamline.checkpoint.shards import GROUPS, MANIFEST, RUN_STATE, SHARDS, ShardReader

FORMAT = 1
"""Version of the folder's format."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of.

    ``serial`` counts the saves of a checkpoint directory. It orders checkpoints by age, which steps do not: a run
    that goes back to step 10 saves step 15 after another run's step 20.
    """

    format: int = FORMAT
    step: int
    serial: int
    files: dict[str, FileDigest]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: ``run_state`` is what the run saved, ``reader`` gives the tensors."""

    path: Path
    step: int
    run_state: dict[str, Any]
    reader: ShardReader


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint after checking that every file is there with its size.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, or files are missing, of another size, or do not belong there.
    """
    manifest = read_manifest(path)
    _refuse(path, _wrong_sizes(path, manifest))
    return Checkpoint(path, manifest.step, read_json(path / f"{RUN_STATE}.json"), ShardReader(path))


def verify(path: Path) -> Checkpoint:
    """Open a checkpoint after comparing the hash of every file too; reads all of it.

    Raises:
        CheckpointError: as for :func:`open_checkpoint`, or the content of a file has changed.
    """
    checkpoint = open_checkpoint(path)
    problems = []
    for name, expected in read_manifest(path).files.items():
        found = hash_file(path / name)
        if found != expected:
            problems.append(f"{name}: expected sha256 {expected.sha256}, found {found.sha256}")
    _refuse(path, problems)
    return checkpoint


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder that is otherwise complete."""
    write_atomic(_manifest_path(folder), [msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"])


def has_manifest(folder: Path) -> bool:
    """Whether a folder claims to be a checkpoint."""
    return _manifest_path(folder).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of a format that this version does not know.
    """
    path = _manifest_path(folder)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {path.name}. Give the path of a global_step_... folder"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Move the folder {folder} away to go on from an earlier checkpoint"
        ) from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}; this version of beamline reads format {FORMAT}")
    return manifest


def _manifest_path(folder: Path) -> Path:
    return folder / f"{MANIFEST}.json"


def _wrong_sizes(path: Path, manifest: Manifest) -> list[str]:
    problems = []
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name}: missing, expected {expected.size} bytes")
        elif file.stat().st_size != expected.size:
            problems.append(f"{name}: expected {expected.size} bytes, found {file.stat().st_size}")
    shards = [file for group in GROUPS for file in sorted((path / group).glob(SHARDS))]
    names = [file.relative_to(path).as_posix() for file in shards]
    problems.extend(
        f"{name}: not in the manifest, so not of this checkpoint" for name in names if name not in manifest.files
    )
    return problems


def _refuse(path: Path, problems: list[str]) -> None:
    if problems:
        listed = "\n  ".join(problems)
        raise CheckpointError(
            f"{path} is damaged, {len(problems)} of its files are wrong; use another checkpoint:\n  {listed}"
        )
