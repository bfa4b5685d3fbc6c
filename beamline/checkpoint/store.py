"""The checkpoints of a run: saved whole or not at all, found again after any crash, kept as long as asked."""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from beamline.checkpoint.errors import CheckpointError
from beamline.checkpoint.files import TRASH, make_folder, remove_tree, rename_folder, write_atomic, write_json
from beamline.checkpoint.manifest import Manifest, has_manifest, read_manifest, write_manifest
from beamline.checkpoint.shards import RUN_STATE, ShardWriter

_STAGING = ".staging"
_REPLACED = ".replaced"
_LATEST = "latest"


class CheckpointStore:
    """The checkpoint directory of one run; ``keep`` newest checkpoints stay, 0 = all. One process writes to it.

    A checkpoint is written to a hidden folder and takes the name ``global_step_<n>`` when all of it is on disk, so
    that a folder of that name with a manifest is complete. The manifests alone decide which checkpoint is the newest.
    The file ``latest`` repeats the answer for people and scripts; a crash may leave it one save behind.

    When a step is saved again, its old folder is kept as ``.global_step_<n>.replaced`` until the new one stands.

    Raises:
        ValueError: ``keep`` is negative.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 0:
            raise ValueError(f"CheckpointStore.keep must be 0 (all) or more, not {keep}")
        self.directory = directory
        self.keep = keep

    def save(self, step: int, run_state: Mapping[str, Any], write: Callable[[ShardWriter], None]) -> Path:
        """Write a checkpoint, make it the newest, then remove those beyond ``keep``. Returns its folder.

        ``write`` writes the tensors; ``run_state`` is plain data, stored as JSON. If this raises, the newest
        checkpoint is the one before or, once its folder has its name, the new one; saving again works either way.

        Raises:
            OSError: the disk fails or is full; the message names the file.
            CheckpointError: a folder with the name of the new checkpoint is there, and is no checkpoint.
            ValueError: ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"save: step must be 0 or more, not {step}")
        target = self.directory / f"global_step_{step}"
        make_folder(self.directory)
        self._tidy()
        if target.exists() and not has_manifest(target):
            raise CheckpointError(f"{target} is in the way and is not a checkpoint: move it, or use another directory")
        with ExitStack() as undo:
            staging = self.directory / f".{target.name}{_STAGING}"
            undo.callback(_remove_if_possible, staging)
            self._write(staging, step, run_state, write)
            self._commit(staging, target)
            undo.pop_all()
        write_atomic(self.directory / _LATEST, [f"{step}\n".encode()])
        self._tidy()
        self._retain()
        return target

    def latest(self) -> Path | None:
        """The checkpoint that was saved last, or None; changes nothing on disk.

        Raises:
            CheckpointError: a checkpoint's manifest is damaged, so that the newest is not known.
        """
        saved = [(read_manifest(folder).serial, folder) for folder in self._folders()]
        return max(saved)[1] if saved else None

    def _write(
        self, staging: Path, step: int, run_state: Mapping[str, Any], write: Callable[[ShardWriter], None]
    ) -> None:
        make_folder(staging)
        writer = ShardWriter(staging, rank=0)
        write(writer)
        digest = write_json(staging / f"{RUN_STATE}.json", run_state)
        serial = 1 + max((manifest.serial for _, manifest in self._readable()), default=0)
        files = {**writer.digests, f"{RUN_STATE}.json": digest}
        write_manifest(staging, Manifest(step=step, serial=serial, files=files))

    def _commit(self, staging: Path, target: Path) -> None:
        if target.exists():
            rename_folder(target, target.with_name(f".{target.name}{_REPLACED}"))
        rename_folder(staging, target)

    def _tidy(self) -> None:
        """End what a crash interrupted: put a replaced folder back or remove it; remove unfinished and half-removed."""
        for replaced in self._hidden(_REPLACED):
            if _original(replaced).exists():
                remove_tree(replaced)
            else:
                rename_folder(replaced, _original(replaced))
        for suffix in (_STAGING, TRASH):
            for folder in self._hidden(suffix):
                remove_tree(folder)

    def _retain(self) -> None:
        if self.keep == 0:
            return
        for folder, _ in sorted(self._readable(), key=lambda item: item[1].serial)[: -self.keep]:
            remove_tree(folder)

    def _folders(self) -> list[Path]:
        visible = [p for p in self.directory.glob("global_step_*") if re.fullmatch(r"global_step_\d+", p.name)]
        return [folder for folder in visible + self._hidden(_REPLACED) if has_manifest(folder)]

    def _readable(self) -> list[tuple[Path, Manifest]]:
        readable = []
        for folder in self._folders():
            with suppress(CheckpointError):  # an old damaged neighbour must not stop a save; latest() reports it
                readable.append((folder, read_manifest(folder)))
        return readable

    def _hidden(self, suffix: str) -> list[Path]:
        return sorted(self.directory.glob(f".global_step_*{suffix}"))


def _original(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(".").removesuffix(_REPLACED))


def _remove_if_possible(folder: Path) -> None:
    with suppress(OSError):
        remove_tree(folder)
