"""A checkpoint as a folder that others read: a Hugging Face model, or an adapter in PEFT's format."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import BeamConfig

from beamline.checkpoint import (
    Checkpoint,
    CheckpointStore,
    ShardReader,
    open_checkpoint,
    remove_tree,
    rename_folder,
    verify,
)
from beamline.checkpoint.files import make_folder
from beamline.config import load_config
from beamline.config.compose import escaped
from beamline.config.schema import RunConfig
from beamline.model.beam import ModelError, tensors
from beamline.model.layout import TensorSlice
from beamline.policy import model, peft
from beamline.policy.lora import Adapters, lora_shape
from beamline.policy.weights import named_tensors
from beamline.runtime.engines import DTYPE, check_base, check_model, model_folder
from beamline.runtime.resume import run_state

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_GENERATION = "generation_config.json"


def export(config: RunConfig, checkpoint: Path, folder: Path, merge: bool = False) -> None:
    """Write what a checkpoint holds, with the tokenizer of the model it began from.

    Weights become a Hugging Face folder with that model's configuration. Adapters become an adapter in PEFT's format,
    or, with ``merge``, a Hugging Face folder too, whose weights are ``W + alpha / rank * B A`` in float32.

    The folder appears whole or not at all, and replaces one of an earlier run.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ModelError: there are no adapters to merge, or the weights beside which they were trained have changed.
    """
    opened = verify(checkpoint)
    adapters = saved_adapters(config, opened)
    if merge and adapters is None:
        raise ModelError(f"{checkpoint} holds every weight and no adapter to merge: export it without --merge")
    with _replacing(folder) as staging:
        if adapters is not None and not merge:
            peft.save(adapters, staging, config.model.path, run_state(opened).base, config.policy.dtype)
            _copy(_TOKENIZER, config, staging)
            return
        if adapters is None:
            _write_weights(config, opened.reader, staging)
        else:
            module = model.load(model_folder(config), config.policy.dtype).float()  # as it was beside the adapters
            adapters.merge_into(named_tensors(module))
            model.save(module, staging, DTYPE)
        _copy((*_TOKENIZER, _GENERATION), config, staging)


def _write_weights(config: RunConfig, reader: ShardReader, folder: Path) -> None:
    """Every weight of a checkpoint, file by file: a model need not fit into memory."""
    shapes = {spec.name: spec.shape for spec in tensors(check_model(config))}
    model.check_saved(reader, shapes.keys())
    model.write(
        BeamConfig.from_pretrained(model_folder(config)),
        lambda name: model.saved(reader, TensorSlice.whole(name, DTYPE, shapes[name])),
        folder,
        DTYPE,
    )


def export_model(path: Path, folder: Path, merge: bool = False, base: Path | None = None) -> None:
    """Write a checkpoint, or the newest one of a run, as :func:`export` does.

    ``base`` is where the model lies that training began from, if that is no longer where it was.

    Raises:
        ModelError: there is no checkpoint, there are no adapters to merge, or their base has changed.
        CheckpointError: the checkpoint is damaged.
        FileExistsError: the folder is there already; nothing of it is touched.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; give the name of a folder that is to be made")
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ModelError(f"{path} is neither a run with a checkpoint nor a checkpoint")
    moved = [] if base is None else [f"model.path={json.dumps(escaped(str(base)))}"]
    export(load_config(None, moved, saved_config(checkpoint)), checkpoint, folder, merge)


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


def saved_adapters(config: RunConfig, checkpoint: Checkpoint) -> Adapters | None:
    """The adapters of a checkpoint, whose configuration this is; None where it holds every weight.

    Raises:
        CheckpointError: it holds other adapters than those of the configuration.
        ModelError: the weights beside which they were trained have changed.
    """
    lora = lora_shape(config.policy.lora)
    if lora is None:
        return None
    check_base(config, run_state(checkpoint).base, checkpoint.path)
    adapters = Adapters(check_model(config), lora, config.policy.lora.init, config.seed)
    model.restore(named_tensors(adapters), checkpoint.reader)
    return adapters


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A hidden folder to write into; at the end it takes the place of ``folder``, and after an error it is removed."""
    staging, old = (folder.with_name(f".{folder.name}.beamline-{kind}") for kind in ("staging", "old"))
    if staging.exists():
        remove_tree(staging)
    if old.exists() and folder.exists():  # a crash came before it was removed
        remove_tree(old)
    make_folder(staging)
    try:
        yield staging
        if folder.exists():
            rename_folder(folder, old)
        rename_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if old.exists():
        remove_tree(old)


def _copy(names: Iterable[str], config: RunConfig, folder: Path) -> None:
    """Copy those files of a run's model that are there."""
    for name in names:
        source = model_folder(config) / name
        if source.exists():
            shutil.copyfile(source, folder / name)
