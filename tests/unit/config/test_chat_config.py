from pathlib import Path
from typing import Any

import pytest

from beamline.config import ConfigError, load_config, to_yaml
from beamline.config.compose import differences
from beamline.config.schema import RunConfig

EFFORT = "chat.template_arguments.reasoning_effort"


def test_a_run_has_no_template_arguments_unless_it_sets_some() -> None:
    assert RunConfig().chat.template_arguments == {}


@pytest.mark.parametrize(
    ("text", "value"), [("low", "low"), ("none", "none"), ("512", 512), ("0.5", 0.5), ("true", True), ("'1'", "1")]
)
def test_an_override_sets_one_argument_as_yaml_reads_it(text: str, value: Any) -> None:
    config = load_config(None, ["chat.template_arguments.other=x", f"{EFFORT}={text}"])
    assert config.chat.template_arguments == {"other": "x", "reasoning_effort": value}
    assert type(config.chat.template_arguments["reasoning_effort"]) is type(value)


def test_arguments_survive_yaml_and_count_as_settings(tmp_path: Path) -> None:
    config = load_config(None, ["chat.template_arguments={reasoning_effort: none, count: 1, share: 1.0, flag: false}"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    assert differences(again, load_config(None, [f"{EFFORT}=low"]))[0] == (EFFORT, "none", "low")


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "tokenize", "eos_token"])
def test_an_argument_that_a_run_sets_itself_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^chat.template_arguments: {name} cannot be set"):
        load_config(None, [f"chat.template_arguments.{name}=x"])


@pytest.mark.parametrize("value", ["[1]", "null", "{a: 1}"])
def test_a_value_that_is_no_scalar_is_one_error(value: str) -> None:
    with pytest.raises(ConfigError, match=r"expected text or true or false or integer or number$") as caught:
        load_config(None, [f"{EFFORT}={value}"])
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].key == EFFORT


def test_a_name_that_no_template_could_use_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"arguments\.reasoning-effort: 'reasoning-effort' is no name that can stand here",
    ):
        load_config(None, ["chat.template_arguments.reasoning-effort=low"])
