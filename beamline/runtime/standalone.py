"""Commands that work on a model without training it: evaluation and export."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from beamline.chat import BeamChat
from beamline.checkpoint import CheckpointStore, open_checkpoint
from beamline.config import load_config
from beamline.config.compose import escaped
from beamline.config.schema import FileSource, RunConfig
from beamline.data import DataError, ProblemSet, load, within_limit
from beamline.evaluate import evaluate
from beamline.model.beam import ModelError
from beamline.policy import model
from beamline.runtime.console import RunConsole
from beamline.runtime.determinism import make_deterministic
from beamline.runtime.engines import load_module, model_folder, sampler_of
from beamline.runtime.export import export


def evaluate_model(
    name: str, files: Sequence[Path], recipe: Path | None, settings: Sequence[str], out: Path | None
) -> dict[str, float]:
    """Evaluate a run's newest checkpoint, a checkpoint, a model folder or ``starter``, and print the figures.

    Settings are the checkpoint's own, or the defaults; ``recipe`` and ``settings`` replace them.

    Raises:
        ModelError, DataError, ConfigError, CheckpointError: the model, data or settings cannot be used.
    """
    checkpoint = find_checkpoint(Path(name))
    base = {} if checkpoint is None else _saved_config(checkpoint)
    path = name if checkpoint is None else base["model"]["path"]
    # As an override, so that a recipe's own model does not take the place of the one that was asked for.
    config = load_config(recipe, [f"model.path={json.dumps(escaped(path))}", *settings], base)
    make_deterministic(config.runtime.threads)
    module, step = load_module(config), 0
    if checkpoint is not None:
        opened = open_checkpoint(checkpoint)
        model.restore(module, opened.reader)
        step = opened.step
    chat = BeamChat(model_folder(config))
    sets = _problem_sets(config, files, chat)
    with RunConsole(config.steps, config.steps) as console:
        metrics = evaluate(config, sets, sampler_of(config, module, step), chat, step, console, out)
        for problems in sets.values():
            for excluded in problems.excluded:
                console.print(f"left out of {problems.name}, {excluded.where}: {excluded.reason}")
        for key, value in metrics.items():
            console.print(f"{key:<50} {value:.4f}")
    return metrics


def export_model(path: Path, folder: Path) -> None:
    """Write a checkpoint, or the newest one of a run, as a Hugging Face folder.

    Raises:
        ModelError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ModelError(f"{path} is neither a run with a checkpoint nor a checkpoint")
    export(load_config(None, base=_saved_config(checkpoint)), checkpoint, folder)


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path names: itself, or the newest one of a run or of a folder of checkpoints."""
    if (path / "manifest.json").is_file():
        return path
    for directory in (path, path / "checkpoints"):
        if (directory / "latest").is_file():
            return CheckpointStore(directory, keep=0).latest()
    return None


def _saved_config(checkpoint: Path) -> Mapping[str, Any]:
    saved: Mapping[str, Any] = open_checkpoint(checkpoint).run_state["config"]
    return saved


def _problem_sets(config: RunConfig, files: Sequence[Path], chat: BeamChat) -> dict[str, ProblemSet]:
    named = {file.stem: file for file in files}
    if len(named) < len(files):
        raise DataError(f"problem files need different names, their sets are named so: {', '.join(map(str, files))}")
    sources = {name: FileSource(path=file) for name, file in named.items()} or config.data.evaluation
    limit = config.rollout.max_prompt_tokens
    return {
        name: within_limit(load(name, source, config.seed, "eval"), lambda p: len(chat.prompt_ids(p.messages)), limit)
        for name, source in sources.items()
    }
