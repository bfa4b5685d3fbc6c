"""A checkpoint as a Hugging Face model folder."""

import shutil
from pathlib import Path

from beamline.checkpoint import open_checkpoint, remove_tree
from beamline.config.schema import RunConfig
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
    module = load_module(config)
    model.restore(module, open_checkpoint(checkpoint).reader)
    staging = folder.with_name(f".{folder.name}.staging")
    if staging.exists():
        remove_tree(staging)
    staging.mkdir(parents=True)
    model.save(module, staging, DTYPE)
    for name in _COPIED:
        source = model_folder(config) / name
        if source.exists():
            shutil.copyfile(source, staging / name)
    if folder.exists():
        remove_tree(folder)
    staging.rename(folder)
