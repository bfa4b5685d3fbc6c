"""What a command is given to look at: a run, a checkpoint, an adapter or a model, with its settings and weights."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from beamline.checkpoint import open_checkpoint
from beamline.checkpoint.manifest import has_manifest
from beamline.config import load_config
from beamline.config.compose import escaped
from beamline.config.policy import LoraConfig
from beamline.config.schema import RunConfig
from beamline.model.beam import ModelError
from beamline.policy import model, peft
from beamline.policy.lora import Adapters, lora_shape
from beamline.policy.weights import named_tensors
from beamline.runtime.determinism import make_deterministic
from beamline.runtime.engines import check_model, load_adapters, load_module, model_folder
from beamline.runtime.export import find_checkpoint, saved_adapters, saved_config
from beamline.runtime.resume import run_state
from beamline.starter import SETTINGS


class Weights(NamedTuple):
    """A module, and the adapters beside it."""

    module: nn.Module
    adapters: Adapters | None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at: its settings, where it stands, and where its weights lie.

    ``checkpoint`` is None for a model or adapter; ``run`` is the folder of the run that was named, None for anything
    else.
    """

    name: str
    config: RunConfig
    checkpoint: Path | None
    run: Path | None
    step: int
    problems_drawn: int

    def weights(self) -> Weights:
        """The weights of sampler and learner.

        Raises:
            ModelError, CheckpointError: they cannot be read.
        """
        module = load_module(self.config)
        if self.checkpoint is None:
            return Weights(module, load_adapters(self.config))
        return self._saved(module, self.checkpoint)

    def other_weights(self, now: Weights) -> tuple[str, Weights] | None:
        """Those of the run's checkpoint before this one, or else a base without its adapters, and what they are."""
        before = None if self.checkpoint is None else _before(self.checkpoint, self.step)
        if before is not None:
            step, path = before
            module = now.module if now.adapters is not None else load_module(self.config)
            return f"step {step}", self._saved(module, path)
        return None if now.adapters is None else ("without adapters", Weights(now.module, None))

    def _saved(self, module: nn.Module, checkpoint: Path) -> Weights:
        """Those of a checkpoint, read into a module or into adapters beside it."""
        opened = open_checkpoint(checkpoint)
        adapters = saved_adapters(self.config, opened)
        if adapters is None:
            model.restore(named_tensors(module), opened.reader)
        return Weights(module, adapters)


def find_subject(name: str, settings: Sequence[str], recipe: Path | None = None) -> Subject:
    """What a name stands for: a run, a checkpoint, an adapter's folder, a model folder, or a packaged model.

    Its settings are the checkpoint's, the packaged model's or the defaults; ``recipe`` and ``settings`` replace them.
    Threads and deterministic algorithms are set from here on.

    Raises:
        ModelError, ConfigError, CheckpointError: it cannot be used.
    """
    path = Path(name)
    checkpoint = find_checkpoint(path)
    run = path if (path / "metrics.jsonl").is_file() else None
    if checkpoint is None and run is not None:
        raise ModelError(f"{name} is a run that has no checkpoint yet: there are no weights to look at")
    base, asked, lora = _described(name, checkpoint)
    # As overrides, so that a recipe's own model does not take the place of the one that was asked for.
    fixed = asked | {f"policy.lora.{key}": value for key, value in lora.model_dump(mode="json").items()}
    config = load_config(recipe, [*(f"{k}={json.dumps(escaped(v))}" for k, v in fixed.items()), *settings], base)
    if peft.is_adapter(path) and not model_folder(config).is_dir():
        raise ModelError(
            f"{name} belongs to the model {config.model.path}, and that is no folder; "
            "say where it is with --set model.path=DIR"
        )
    check_model(config)
    make_deterministic(config.runtime.threads)
    if checkpoint is None:
        return Subject(name, config, None, None, 0, 0)
    if lora_shape(config.policy.lora) != lora_shape(lora):  # nothing may be taken from what was trained, or added
        raise ModelError(f"{checkpoint} has the adapters of policy.lora={lora}, which no other settings can change")
    opened = open_checkpoint(checkpoint)
    return Subject(name, config, checkpoint, run, opened.step, run_state(opened).problems_drawn)


def _described(name: str, checkpoint: Path | None) -> tuple[Mapping[str, Any], dict[str, Any], LoraConfig]:
    """The settings that lie lowest, those that say which model was asked for, and its adapters."""
    if checkpoint is not None:
        base = saved_config(checkpoint)
        saved = load_config(None, base=base)
        return base, {"model.path": saved.model.path, "policy.dtype": saved.policy.dtype}, saved.policy.lora
    if not peft.is_adapter(Path(name)):
        return SETTINGS.get(name, {}), {"model.path": name, "policy.dtype": "float32"}, LoraConfig()
    found = peft.describe(Path(name))
    asked: dict[str, Any] = {"model.path": found.base, "policy.dtype": "float32"}
    if found.base_dtype == "bfloat16":
        asked |= {"policy.dtype": "bfloat16", "policy.parity": False}
    lora = LoraConfig.model_construct(  # held against its bounds with all other settings
        rank=found.lora.rank,
        alpha=found.lora.alpha,
        targets=list(found.lora.targets or ()),
        experts=found.lora.experts,
        adapter_path=Path(name),
    )
    return SETTINGS.get(found.base, {}), asked, lora


def _before(checkpoint: Path, step: int) -> tuple[int, Path] | None:
    """The newest of the checkpoints beside this one that are of an earlier step."""
    beside = [
        (int(match[1]), path)
        for path in checkpoint.resolve().parent.glob("global_step_*")
        if (match := re.fullmatch(r"global_step_(\d+)", path.name)) and has_manifest(path)
    ]
    return max((found for found in beside if found[0] < step), default=None)
