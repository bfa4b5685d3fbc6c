"""Ranks read a model folder, each its slices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beamline.model.beam import ModelError
from beamline.policy import model
from beamline.policy.weights import named_tensors
from tests.cluster.ranks import on_ranks
from tests.tiny_beam import beam_config, random_beam


def differing(folder: Path, sizes: dict[str, int], weights: dict[str, torch.Tensor]) -> list[str]:
    """The tensors of which a rank has read anything else than what is theirs."""
    from beamline.learner.megatron.mesh import Mesh
    from beamline.learner.megatron.model import Stage, initialize

    mesh = Mesh(**sizes)
    initialize(mesh)
    stage = Stage(beam_config(), mesh, "float32", torch.device("cpu"))
    stage.read(folder)
    pairs = ((each.part, view, weights[each.part.name][each.part.index]) for each, view in stage.placed())
    return [part.name for part, view, expected in pairs if not torch.equal(view, expected)]


@pytest.mark.parametrize("shard_bytes", [30_000, 1 << 40])
def test_each_rank_reads_its_slices_of_one_file_or_of_several(tmp_path: Path, shard_bytes: int) -> None:
    module = random_beam()
    weights = {name: tensor.clone() for name, tensor in named_tensors(module).items()}
    model.write(module.config, weights.__getitem__, tmp_path, "float32", shard_bytes)  # type: ignore[arg-type]
    sizes = {"tensor": 2, "expert": 2, "pipeline": 2}
    assert on_ranks(4, differing, tmp_path, sizes, weights) == [[]] * 4


def lacking(stored: dict[str, Any]) -> None:
    del stored["lm_head.weight"]


def unknown(stored: dict[str, Any]) -> None:
    stored["other.weight"] = torch.zeros(2)


def misshapen(stored: dict[str, Any]) -> None:
    stored["lm_head.weight"] = torch.zeros(2, 2)


def infinite(stored: dict[str, Any]) -> None:
    stored["lm_head.weight"][0, 0] = torch.inf


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lacking, "lacks 1 of 142 tensors, first lm_head.weight"),
        (unknown, "holds other.weight, which this model does not have"),
        (misshapen, r"lm_head.weight has shape \(2, 2\), expected \(64, 32\)"),
        (infinite, "lm_head.weight holds values that are not finite"),
    ],
)
def test_a_folder_that_is_not_this_model_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    model.save(random_beam(), tmp_path, "float32")
    stored = load_file(tmp_path / "model.safetensors")
    spoil(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        on_ranks(1, differing, tmp_path, {}, {})


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    model.save(random_beam(), tmp_path, "float32")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "gone"}}))
    with pytest.raises(ModelError, match="gone is missing"):
        on_ranks(1, differing, tmp_path, {}, {})
