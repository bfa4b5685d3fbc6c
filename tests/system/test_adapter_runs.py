"""A run that trains adapters, by the command line: its exports, their evaluation, and training that begins from one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from beamline.policy import peft
from beamline.report import read_metrics
from beamline.starter import STARTER
from tests.system.conftest import Cli
from tests.system.runs import LORA, TINY, newest

HARD = ("data.evaluation.arithmetic.problems=24", "data.evaluation.arithmetic.levels=[4]", "evaluation.temperature=0")
"""Evaluation without chance, so that the step of a model has no part in it: problems that the starter gets wrong."""
GREEDY = ("--recipe", TINY, *(part for setting in HARD for part in ("--set", setting)))
SHORT = ("steps=1", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2", "evaluation.every=0")


@pytest.fixture(scope="module")
def exported(adapted: Path) -> Path:
    """What the run exported at its end."""
    return adapted / "export" / "global_step_3"


def rows(folder: Path) -> list[dict[str, Any]]:
    """What was answered in an evaluation, and how probable it was; without the step."""
    lines = (folder / "arithmetic.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "step"} for line in lines]


def measured(cli: Cli, of: object, out: Path) -> list[dict[str, Any]]:
    ended = cli("eval", of, *GREEDY, "--out", out)
    assert ended.code == 0, ended.err
    return rows(out)


def test_a_run_exports_an_adapter_of_the_model_that_it_began_from(exported: Path) -> None:
    found = peft.describe(exported)
    assert found.base == "starter"
    assert (found.lora.rank, found.lora.alpha, found.lora.experts) == (8, 16, "per_expert")
    assert AutoTokenizer.from_pretrained(exported).chat_template == AutoTokenizer.from_pretrained(STARTER).chat_template
    tensors = load_file(exported / "adapter_model.safetensors")
    assert all(bool(tensor.any()) for name, tensor in tensors.items() if ".self_attn." in name)


def test_export_gives_the_files_that_the_run_wrote(adapted: Path, exported: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("export", adapted, tmp_path / "out").code == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in exported.iterdir()}
    for path in exported.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("of", ["run", "checkpoint"])
def test_eval_of_a_run_gives_the_numbers_of_training(of: str, adapted: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("eval", adapted if of == "run" else newest(adapted), "--out", tmp_path).code == 0
    line = read_metrics(adapted / "metrics.jsonl")[-1]
    figures = json.loads((tmp_path / "metrics.json").read_text())
    assert figures == {"step": 3} | {key: value for key, value in line.items() if key.startswith("eval/")}
    assert rows(tmp_path) == rows(adapted / "export" / "evals" / "step_3")


def test_eval_of_an_adapter_equals_that_of_its_checkpoint(
    adapted: Path, exported: Path, tmp_path: Path, cli: Cli
) -> None:
    own, saved = measured(cli, exported, tmp_path / "own"), measured(cli, adapted, tmp_path / "saved")
    assert own == saved
    base = measured(cli, "starter", tmp_path / "base")
    assert len({row["response"] for row in own} - {row["response"] for row in base}) > 5


def test_eval_of_the_starter_is_without_adapters_whatever_the_recipe_trains(tmp_path: Path, cli: Cli) -> None:
    recipe = tmp_path / "recipe.yaml"
    lora = "policy: {lora: {rank: 8, experts: none, adapter_path: /nowhere}}\n"
    recipe.write_text(TINY.read_text() + lora)
    ended = cli("eval", "starter", *GREEDY, "--recipe", recipe, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert rows(tmp_path / "out") == measured(cli, "starter", tmp_path / "base")


def test_a_merged_model_answers_as_its_adapter_does(adapted: Path, exported: Path, tmp_path: Path, cli: Cli) -> None:
    """But where two tokens are equally probable up to rounding."""
    assert cli("export", adapted, tmp_path / "merged", "--merge").code == 0
    one, other = measured(cli, tmp_path / "merged", tmp_path / "one"), measured(cli, exported, tmp_path / "other")
    same = sum(a["response"] == b["response"] for a, b in zip(one, other, strict=True))
    assert same >= len(one) - 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert loaded.dtype == torch.float32


def test_merging_what_trained_every_weight_is_refused(tmp_path: Path, cli: Cli) -> None:
    unmeasured = ("evaluation.before_training=false", "checkpoint.export=false")
    assert cli("train", TINY, f"output={tmp_path / 'run'}", *unmeasured, *SHORT).code == 0
    ended = cli("export", tmp_path / "run", tmp_path / "out", "--merge")
    assert ended.code == 1
    assert "holds every weight and no adapter to merge: export it without --merge" in ended.err
    assert not (tmp_path / "out").exists()


def test_training_begins_from_an_adapter(exported: Path, tmp_path: Path, cli: Cli) -> None:
    settings = (f"policy.lora.adapter_path={exported}", *HARD, *SHORT, *LORA)
    ended = cli("train", TINY, *settings, f"output={tmp_path / 'run'}")
    assert ended.code == 0, ended.err
    first = rows(tmp_path / "run" / "export" / "evals" / "step_0")
    assert first == measured(cli, exported, tmp_path / "out")


def test_an_adapter_that_does_not_fit_the_recipe_is_refused(exported: Path, tmp_path: Path, cli: Cli) -> None:
    settings = (f"policy.lora.adapter_path={exported}", "policy.lora.rank=16")
    ended = cli("train", TINY, f"output={tmp_path / 'run'}", *settings)
    assert ended.code == 1
    assert ended.err.startswith("ModelError: ")
    assert "adapter_config.json: r=8, but policy.lora.rank=16" in ended.err


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """The folder of a run, and beside it its base, which the run names from there."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STARTER, "base")
    ended = cli("train", TINY, "model.path=base", "output=run", "evaluation.before_training=false", *SHORT, *LORA)
    assert ended.code == 0, ended.err
    return tmp_path / "run"


def test_a_base_is_found_from_where_training_began_or_where_it_is_said_to_be(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    adapter = beside / "export" / "global_step_1"
    assert peft.describe(adapter).base == "base"
    found = measured(cli, adapter, tmp_path / "found")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    lost = cli("eval", adapter, *GREEDY)
    assert lost.code == 1
    assert "belongs to the model base, and that is no folder; say where it is with --set model.path=DIR" in lost.err
    ended = cli("eval", adapter, *GREEDY, "--set", f"model.path={tmp_path / 'base'}", "--out", tmp_path / "said")
    assert ended.code == 0, ended.err
    assert rows(tmp_path / "said") == found


def test_nothing_is_made_of_adapters_beside_a_base_that_has_changed(beside: Path, tmp_path: Path, cli: Cli) -> None:
    weights = bytearray((tmp_path / "base" / "model.safetensors").read_bytes())
    weights[-2] ^= 1  # the last bit of the last weight
    (tmp_path / "base" / "model.safetensors").write_bytes(weights)
    for command in (
        ("export", beside, "out"),
        ("export", beside, "out", "--merge"),
        ("eval", beside),
        ("eval", beside / "export" / "global_step_1", *GREEDY),
    ):
        ended = cli(*command)
        assert ended.code == 1
        assert "was trained beside another model than the one in base now" in ended.err
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_was_made_elsewhere_is_evaluated_beside_the_base_that_it_names(
    exported: Path, tmp_path: Path, cli: Cli
) -> None:
    """Other programs do not write what tells whether the base is still the same."""
    adapter = Path(shutil.copytree(exported, tmp_path / "adapter"))
    tensors = {name: tensor.clone() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert peft.describe(adapter).base_sha256 == ""
    assert measured(cli, adapter, tmp_path / "one") == measured(cli, exported, tmp_path / "other")
