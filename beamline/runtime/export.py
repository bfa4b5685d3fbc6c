"""A checkpoint as a Hugging Face model folder."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beamline.checkpoint import CheckpointStore, open_checkpoint, remove_tree, rename_folder, verify
from beamline.config import load_config
from beamline.config.compose import escaped
from beamline.config.schema import RunConfig
from beamline.model.beam import ModelError
from beamline.policy import model
from beamline.runtime.engines import DTYPE, load_module, model_folder

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)


def export(config: RunConfig, checkpoint: Path, folder: Path) -> None:
    """Write the weights of a checkpoint, with the configuration and tokenizer of the model it began from.

    The folder appears whole or not at all, and replaces one of an earlier run.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    reader = verify(checkpoint).reader
    module = load_module(config)
    model.restore(module, reader)
    staging = folder.with_name(f".{folder.name}.staging")
    if staging.exists():
        remove_tree(staging)
    staging.mkdir(parents=True)
    try:
        model.save(module, staging, DTYPE)
        for name in _COPIED:
            source = model_folder(config) / name
            if source.exists():
                shutil.copyfile(source, staging / name)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        rename_folder(folder, old)
    rename_folder(staging, folder)
    if old.exists():
        remove_tree(old)


def export_model(path: Path, folder: Path) -> None:
    """Write a checkpoint, or the newest one of a run, as a Hugging Face folder.

    Raises:
        ModelError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged.
        FileExistsError: the folder is there already; nothing of it is touched.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; give the name of a folder that is to be made")
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ModelError(f"{path} is neither a run with a checkpoint nor a checkpoint")
    export(load_config(None, base=saved_config(checkpoint)), checkpoint, folder)


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path names: itself, or the newest one of a run or of a folder of checkpoints."""
    if (path / "manifest.json").is_file():
        return path
    recipe = path / "config.yaml"
    elsewhere = load_config(recipe).checkpoint.dir if recipe.is_file() else None
    directories = [path, elsewhere or path / "checkpoints"]
    found = (CheckpointStore(directory, keep=0).latest() for directory in directories)
    return next((checkpoint for checkpoint in found if checkpoint is not None), None)


def saved_config(checkpoint: Path) -> Mapping[str, Any]:
    """The configuration that a checkpoint was made under, as plain data."""
    saved: Mapping[str, Any] = escaped(open_checkpoint(checkpoint).run_state.get("config", {}))
    return saved
