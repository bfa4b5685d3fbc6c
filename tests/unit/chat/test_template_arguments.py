import inspect
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from beamline.chat import BeamChat
from beamline.config.schema import TemplateArgument, is_reserved_argument
from beamline.model.beam import ModelError
from beamline.records import Message
from tests.chat_folders import EFFORT, PLAIN, chat_folder

QUESTION = [Message("user", "1+2")]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "max"])
def test_an_effort_reaches_the_prompt(tmp_path: Path, effort: str) -> None:
    chat = BeamChat(chat_folder(tmp_path), {"reasoning_effort": effort})
    assert f"effort {effort}<|end|>" in chat.decode(chat.prompt_ids(QUESTION))


def test_without_arguments_the_template_has_its_defaults(tmp_path: Path) -> None:
    plain = BeamChat(chat_folder(tmp_path)).prompt_ids(QUESTION)
    assert plain.tolist() == BeamChat(tmp_path, {"reasoning_effort": "max"}).prompt_ids(QUESTION).tolist()


def test_an_effort_that_the_template_does_not_mention_is_an_error(chat: BeamChat, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reasoning_effort=minimal: the chat template of .* does not use") as caught:
        BeamChat(chat_folder(tmp_path, PLAIN), {"reasoning_effort": "minimal"})
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).endswith("it uses no arguments")


@pytest.mark.parametrize("effort", ["minimal", "max", 512])
def test_an_effort_that_changes_no_prompt_is_an_error(tmp_path: Path, effort: TemplateArgument) -> None:
    ignoring = PLAIN + "{% if reasoning_effort %}{% endif %}"
    with pytest.raises(ModelError, match=rf"reasoning_effort={effort}: the chat template of .* does not use reasoning"):
        BeamChat(chat_folder(tmp_path, ignoring), {"reasoning_effort": effort})


def test_an_effort_that_the_template_takes_for_another_is_an_error(tmp_path: Path) -> None:
    template = "{% if reasoning_effort == 'minimal' %}brief{% endif %}" + PLAIN
    BeamChat(chat_folder(tmp_path, template), {"reasoning_effort": "minimal"})
    BeamChat(tmp_path, {"reasoning_effort": "max"})
    with pytest.raises(ModelError, match=r"reasoning_effort=minimla: .* the prompt is the same as with max"):
        BeamChat(tmp_path, {"reasoning_effort": "minimla"})


def test_a_value_that_the_template_refuses_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reasoning_effort=loud\) cannot render .*: no effort is called loud"):
        BeamChat(chat_folder(tmp_path), {"reasoning_effort": "loud"})


def test_any_other_argument_must_be_one_that_the_template_reads(tmp_path: Path) -> None:
    template = "{% if date %}{{ date }}{% endif %}{% set mine = 1 %}" + EFFORT
    arguments = {"date": "today", "reasoning_effort": "low"}
    chat = BeamChat(chat_folder(tmp_path, template), arguments)
    assert chat.decode(chat.prompt_ids(QUESTION)).startswith("today<|start|>system<|message|>effort low")
    for name in ("dates", "mine", "message", "raise_exception", "strftime_now", "range", "messages"):
        with pytest.raises(ModelError, match=f"{name}=x: .* does not use {name}; it uses date, reasoning_effort$"):
            BeamChat(tmp_path, {name: "x"})


def test_an_argument_of_another_template_of_the_folder_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not use reasoning_effort"):
        BeamChat(chat_folder(tmp_path, PLAIN, tool_use=EFFORT), {"reasoning_effort": "low"})


def test_a_prompt_that_an_argument_opens_a_channel_in_is_an_error(tmp_path: Path) -> None:
    template = PLAIN + "{% if enable_thinking is false %}<|channel|>final<|message|>{% endif %}"
    BeamChat(chat_folder(tmp_path, template), {"enable_thinking": True})
    with pytest.raises(ModelError, match=r"enable_thinking=False\) ends a prompt in "):
        BeamChat(tmp_path, {"enable_thinking": False})


def test_what_the_tokenizer_takes_for_itself_is_reserved() -> None:
    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
    assert {name for name in own if not is_reserved_argument(name)} == set()
    assert {
        name for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES if not is_reserved_argument(name)
    } == set()
    assert not is_reserved_argument("reasoning_effort")
