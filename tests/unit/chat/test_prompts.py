import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from beamline.chat import BeamChat
from beamline.chat.beam import CONTROL
from beamline.model.beam import ModelError
from beamline.records import Message
from beamline.starter import STARTER


def copy_of_the_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(STARTER / name, folder)
    return folder


def test_a_prompt_ends_where_the_assistant_speaks(chat: BeamChat) -> None:
    prompt = chat.prompt_ids([Message("user", "1+2")])
    assert chat.decode(prompt) == "<|start|>user<|message|>1+2<|end|><|start|>assistant"
    assert prompt.dtype == np.int32
    assert prompt.ndim == 1


def test_every_message_is_a_turn_in_its_order(chat: BeamChat) -> None:
    prompt = chat.prompt_ids([Message("system", "Add."), Message("user", "1+2"), Message("tool", "3")])
    turns = "<|start|>system<|message|>Add.<|end|><|start|>user<|message|>1+2<|end|><|start|>tool<|message|>3<|end|>"
    assert chat.decode(prompt) == turns + "<|start|>assistant"


def test_control_tokens_of_a_prompt_are_single_ids(chat: BeamChat) -> None:
    prompt = chat.prompt_ids([Message("user", "1")]).tolist()
    start, message, end = (chat.encode(token) for token in ("<|start|>", "<|message|>", "<|end|>"))
    assert [*prompt[:1], *prompt[2:3], *prompt[4:6]] == [*start, *message, *end, *start]
    assert len(prompt) == 7


@pytest.mark.parametrize("text", ["", " ", "\n", "½ + ¼ – 数 🙂", "a\0b"])
def test_any_text_comes_back_from_its_ids(chat: BeamChat, text: str) -> None:
    assert chat.decode(chat.encode(text)) == text


def test_a_response_ends_with_the_answer_or_with_a_call(chat: BeamChat) -> None:
    assert chat.stop_ids == (*chat.encode("<|return|>"), *chat.encode("<|call|>"))


def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no usable tokenizer") as caught:
        BeamChat(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_tokenizer_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    (copy_of_the_tokenizer(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        BeamChat(tmp_path)


def test_a_tokenizer_of_another_family_is_an_error_with_the_tokens_it_lacks(tmp_path: Path) -> None:
    path = copy_of_the_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] not in CONTROL[1:3]]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"lacks Beam's control tokens <\|channel\|>, <\|message\|>$"):
        BeamChat(tmp_path)


def test_a_tokenizer_without_a_chat_template_is_an_error(tmp_path: Path) -> None:
    (copy_of_the_tokenizer(tmp_path) / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        BeamChat(tmp_path)
