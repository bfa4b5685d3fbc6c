"""Reading a model folder: each rank its own slices, straight from the files."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from beamline.learner.megatron.model import Stage
from beamline.model.beam import ModelError, tensors
from beamline.policy.model import weight_files


def read_weights(folder: Path, stage: Stage) -> None:
    """Fill a stage from a Hugging Face folder (safetensors, one file or several with an index). Types are cast.

    Raises:
        ModelError: a file is missing or corrupt, a tensor is missing, unknown, misshapen or not finite.
    """
    expected = {spec.name: spec.shape for spec in tensors(stage.shape)}
    with ExitStack() as stack:
        found = dict(_stored(folder, stack))
        if unknown := sorted(found.keys() - expected.keys()):
            raise ModelError(f"{folder} holds {unknown[0]}, which this model does not have")
        if missing := sorted(expected.keys() - found.keys()):
            raise ModelError(f"{folder} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}")
        for each, view in stage.placed():
            name, stored = each.part.name, found[each.part.name]
            if tuple(stored.get_shape()) != expected[name]:
                raise ModelError(f"{folder}: {name} has shape {tuple(stored.get_shape())}, expected {expected[name]}")
            part = stored[each.part.index]
            if not bool(torch.isfinite(part).all()):
                raise ModelError(f"{folder}: {name} holds values that are not finite")
            view.copy_(part)


def _stored(folder: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Each tensor of the folder's files, of which nothing has been read yet."""
    for path in weight_files(folder):
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except SafetensorError as error:
            raise ModelError(f"{path} is corrupt: {error}; copy the model again") from error
        yield from ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  it is no mapping
