"""docs/algorithms.md has every option of the schema, with its default."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from beamline.config.advantages import Advantage
from beamline.config.keys import REQUIRED, Key, keys
from beamline.config.losses import Loss

TEXT = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
OPTIONS = [key for key in keys() if key.name.startswith("algorithm.") and not key.shape.fields]


def spelled(value: Any) -> str:
    if value is REQUIRED:
        return "required"
    return value if isinstance(value, str) else json.dumps(value)


def section_of(key: Key) -> str:
    """The part of the page about a section: ``## Policy losses: `algorithm.loss` `` for ``algorithm.loss.clip_low``."""
    top = ".".join(key.name.split(".")[:2])
    found = re.search(rf"^## [^\n]*`{top}`\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


@pytest.mark.parametrize("key", [k for k in OPTIONS if k.condition], ids=lambda k: f"{k.name} {k.condition}")
def test_a_setting_of_a_variant_stands_in_its_row(key: Key) -> None:
    variant, option = key.condition.partition("=")[2], key.name.rpartition(".")[2]
    lines = [line for line in section_of(key).splitlines() if line.startswith("| `")]
    rows = [row for row in lines if f"`{variant}`" in "|".join(row.split("|")[1:3])]
    setting = f"`{option}={spelled(key.default)}`"
    assert any(setting in row for row in rows), f"docs/algorithms.md: no row of `{variant}` has {setting}"


@pytest.mark.parametrize(
    "key", [k for k in OPTIONS if not k.condition and "enum" in k.shape.spec], ids=lambda k: k.name
)
def test_every_variant_has_a_row(key: Key) -> None:
    named = re.findall(r"`([a-z_0-9]+)`", section_of(key))
    assert set(key.shape.spec["enum"]) <= set(named)


@pytest.mark.parametrize(
    "key", [k for k in OPTIONS if not k.condition and "enum" not in k.shape.spec], ids=lambda k: k.name
)
def test_other_settings_are_named_with_their_default(key: Key) -> None:
    name = key.name.removeprefix("algorithm.")
    assert f"`{name}` ({spelled(key.default)})" in TEXT.replace("\n", " ")


@pytest.mark.parametrize(("folder", "union"), [("advantages", Advantage), ("losses", Loss)])
def test_every_algorithm_has_a_file_of_tests(folder: str, union: Any) -> None:
    names = [variant.model_fields["name"].default for variant in get_args(get_args(union)[0])]
    tests = Path(__file__).parents[1] / "algorithms" / folder
    kind = {"advantages": "advantage", "losses": "loss"}[folder]
    assert [name for name in names if not (tests / f"test_{kind}_{name}.py").exists()] == []


def test_the_page_names_no_setting_that_there_is_not() -> None:
    known = {key.name.removeprefix("algorithm.").split(".")[-1] for key in keys()}
    named = re.findall(r"`(?:[a-z_]+\.)*([a-z_]+)=[^`]+`", TEXT)
    assert set(named) <= known
