from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from beamline.config import RunConfig, differences, load_config, to_yaml
from beamline.config.schema import ArithmeticSource, DataConfig, FileSource, ModelConfig


def test_yaml_loads_again_to_an_equal_configuration(tmp_path: Path) -> None:
    sets = {"on": FileSource(path=Path("a b/#c")), "1e5": ArithmeticSource(levels=[1, 5]), "7": ArithmeticSource()}
    config = RunConfig(
        name="1e-5", output=Path("é"), data=DataConfig(train=FileSource(path=Path("x")), evaluation=sets)
    )
    recipe = tmp_path / "config.yaml"
    recipe.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(recipe) == config


@example("\\${a}")
@example("\\\\${")
@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="$${}\\:.,'\"# a1é", max_size=12))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    recipe = tmp_path_factory.getbasetemp() / "text.yaml"
    recipe.write_text(to_yaml(RunConfig(model=ModelConfig(path=text))), encoding="utf-8")
    assert load_config(recipe).model.path == text


def test_yaml_is_complete_and_in_the_order_of_the_schema() -> None:
    def keys(values: object) -> object:
        return [(key, keys(value)) for key, value in values.items()] if isinstance(values, dict) else None

    assert keys(yaml.safe_load(to_yaml(RunConfig()))) == keys(RunConfig().model_dump())


def test_equal_configurations_have_no_differences() -> None:
    assert differences(RunConfig(steps=3), RunConfig(steps=3)) == []


def test_differences_are_dotted_keys_with_both_values() -> None:
    a = RunConfig.model_validate({"steps": 3, "output": "x", "learner": {"optimizer": {"lr": 1}}})
    b = RunConfig.model_validate({"steps": 4, "output": "y", "learner": {"optimizer": {"lr": 2}}})
    assert differences(a, b) == [("output", "x", "y"), ("steps", 3, 4), ("learner.optimizer.lr", 1.0, 2.0)]


def test_a_key_that_one_side_lacks_is_none_there() -> None:
    other = RunConfig(data=DataConfig(train=FileSource(path=Path("x"))))
    assert differences(RunConfig(), other) == [
        ("data.train.source", "arithmetic", "file"),
        ("data.train.problems", 2048, None),
        ("data.train.levels", [3], None),
        ("data.train.path", None, "x"),
    ]
