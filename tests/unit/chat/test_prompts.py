import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from beamline.chat import BeamChat, PromptError, ToolCall
from beamline.chat.beam import CONTROL, PARAMETER_END
from beamline.model.beam import ModelError
from beamline.records import Message
from beamline.starter import STARTER
from tests.chat_folders import EFFORT, PLAIN, change_tokenizer, chat_folder


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


def test_spaces_before_stops_stay_whatever_the_tokenizer_would_clean_up(tmp_path: Path) -> None:
    path = copy_of_the_tokenizer(tmp_path) / "tokenizer_config.json"
    insisting = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    settings = {"clean_up_tokenization_spaces": True, insisting: True}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    chat = BeamChat(tmp_path)
    assert chat.decode(chat.encode("1 , 2 . do n't ?")) == "1 , 2 . do n't ?"


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


HISTORY = (
    Message("system", "Add."),
    Message("user", "1+2"),
    Message("assistant", "3", reasoning="1+2=3"),
    Message("tool", "½\n"),
    Message("user", "Now 2+2"),
)


def as_hugging_face_takes_them(messages: tuple[Message, ...], key: str) -> list[dict[str, str]]:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return [t if m.reasoning is None else {**t, key: m.reasoning} for t, m in zip(turns, messages, strict=True)]


@pytest.mark.parametrize("arguments", [{}, {"reasoning_effort": "low"}])
@pytest.mark.parametrize("messages", [HISTORY, HISTORY[1:], HISTORY[:2], HISTORY[1:2]])
def test_a_prompt_is_what_the_tokenizers_own_template_makes(
    tmp_path: Path, messages: tuple[Message, ...], arguments: dict[str, str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_folder(tmp_path))
    turns = as_hugging_face_takes_them(messages, "reasoning_content")
    made = tokenizer.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=True, return_dict=False, **arguments
    )
    assert BeamChat(tmp_path, arguments).prompt_ids(messages).tolist() == made


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> BeamChat:
    """A chat whose template reads `message.reasoning`."""
    return BeamChat(chat_folder(tmp_path_factory.mktemp("plain"), PLAIN))


def test_a_past_turn_is_rendered_with_its_reasoning(plain: BeamChat) -> None:
    past = "<|channel|>analysis<|message|>1+2=3<|end|><|start|>assistant<|channel|>final<|message|>3<|end|>"
    prompt = plain.decode(plain.prompt_ids(HISTORY[1:3]))
    assert prompt == f"<|start|>user<|message|>1+2<|end|><|start|>assistant{past}<|start|>assistant"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["message.{}", "message['{}']", "message.get('{}')"])
def test_reasoning_has_the_name_by_which_the_template_reads_it(
    tmp_path: Path, plain: BeamChat, key: str, read: str
) -> None:
    template = PLAIN.replace("message.reasoning", read.format(key))
    prompt = BeamChat(chat_folder(tmp_path, template)).prompt_ids(HISTORY)
    assert prompt.tolist() == plain.prompt_ids(HISTORY).tolist()


def test_a_past_turn_without_reasoning_is_an_error_that_says_which(chat: BeamChat) -> None:
    with pytest.raises(PromptError, match=r"^message 1 \(assistant\) has no reasoning"):
        chat.prompt_ids([Message("user", "1"), Message("assistant", "2"), Message("user", "3")])


def test_a_template_that_drops_the_reasoning_of_past_turns_cannot_render_one(tmp_path: Path) -> None:
    chat = BeamChat(chat_folder(tmp_path, PLAIN.replace("{{ message.reasoning }}", "")))
    assert len(chat.prompt_ids(HISTORY[:2])) > 0
    with pytest.raises(PromptError, match=r"^message 2 \(assistant\): .* does not read the reasoning"):
        chat.prompt_ids(HISTORY)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_nobody_else_has_reasoning(chat: BeamChat, role: Any) -> None:
    with pytest.raises(PromptError, match=rf"^message 0 \({role}\) has reasoning"):
        chat.prompt_ids([Message(role, "1", reasoning="2")])


def test_what_a_template_refuses_is_an_error_with_the_message_and_the_reason(tmp_path: Path) -> None:
    chat = BeamChat(chat_folder(tmp_path))
    with pytest.raises(PromptError, match=r"^message 3 \(system\) cannot be rendered: the system speaks once$"):
        chat.prompt_ids([*HISTORY[:3], Message("system", "Add."), Message("user", "1")])
    with pytest.raises(PromptError, match=r"^message 0 \(tool\) cannot be rendered: a tool does not begin$"):
        chat.prompt_ids(HISTORY[3:])


def test_a_beginning_that_fails_for_another_reason_is_not_the_message_at_fault(tmp_path: Path) -> None:
    late = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('nobody asks') }}{% endif %}"
    chat = BeamChat(chat_folder(tmp_path, late + EFFORT))
    with pytest.raises(PromptError, match=r"^message 2 \(system\) cannot be rendered: the system speaks once$"):
        chat.prompt_ids([*HISTORY[1:3], HISTORY[0], HISTORY[1]])


def test_what_a_template_cannot_compute_is_an_error_with_the_message(tmp_path: Path) -> None:
    lost = "{% if message.content == 'odd' %}{{ message.nothing.more }}{{ 1 + message.content }}{% endif %}"
    template = PLAIN.replace("{%- else -%}", "{%- else -%}" + lost)
    for part in ("{{ message.nothing.more }}", "{{ 1 + message.content }}"):
        chat = BeamChat(chat_folder(tmp_path, template.replace(part, "")))
        with pytest.raises(PromptError, match=r"^message 1 \(user\) cannot be rendered: .+"):
            chat.prompt_ids([Message("user", "even"), Message("user", "odd"), Message("user", "even")])


def test_no_message_is_an_error(chat: BeamChat) -> None:
    with pytest.raises(PromptError, match=r"^the conversation cannot be rendered: .*empty"):
        chat.prompt_ids([])


def test_text_that_is_no_unicode_is_an_error_with_the_message(chat: BeamChat) -> None:
    with pytest.raises(PromptError, match=r"^message 1 \(user\) cannot be rendered"):
        chat.prompt_ids([Message("user", "1"), Message("user", "\ud800")])


@pytest.mark.parametrize("token", [*CONTROL, "<|endoftext|>"])
def test_text_that_would_be_read_as_a_control_token_is_an_error(chat: BeamChat, token: str) -> None:
    with pytest.raises(PromptError, match=r"^message 1 \(user\): the text holds the control token") as caught:
        chat.prompt_ids([Message("system", "Add."), Message("user", f"1{token}2")])
    assert str(caught.value).endswith(f" {token}")
    with pytest.raises(PromptError, match=r"^message 0 \(assistant\): the text holds the control token"):
        chat.prompt_ids([Message("assistant", "1", reasoning=token)])


def test_of_several_templates_the_default_one_is_used(tmp_path: Path, plain: BeamChat) -> None:
    folder = chat_folder(tmp_path, PLAIN, tool_use=EFFORT)
    assert BeamChat(folder).prompt_ids(HISTORY).tolist() == plain.prompt_ids(HISTORY).tolist()


def test_several_templates_without_a_default_one_are_an_error_with_their_names(tmp_path: Path) -> None:
    (chat_folder(tmp_path, "", tool_use=EFFORT, rag=PLAIN) / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"none of the chat templates of .* \(rag, tool_use\) is called default"):
        BeamChat(tmp_path)


def test_a_template_with_a_mistake_is_an_error_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the chat template of .* is no template, line 2: "):
        BeamChat(chat_folder(tmp_path, "x\n{% if %}"))


def test_a_template_whose_prompts_do_not_end_where_the_assistant_speaks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"ends a prompt in .*final<\|message\|>'; responses are read after"):
        BeamChat(chat_folder(tmp_path, PLAIN + "<|channel|>final<|message|>"))


def test_the_closing_tag_of_a_parameter_is_text_although_a_tokenizer_calls_it_special(tmp_path: Path) -> None:
    def special(token: dict[str, Any]) -> dict[str, Any]:
        return token | {"special": token["special"] or token["content"] == PARAMETER_END}

    change_tokenizer(chat_folder(tmp_path), special)
    chat = BeamChat(tmp_path)
    body = f'<rfl:parameter name="a">\n1{PARAMETER_END}'
    read = chat.channels(chat.encode(f" to=add<|channel|>analysis <|constrain|>xml<|message|>{body}<|call|>"))
    assert read.calls == (ToolCall("add", {"a": "1"}),)
    assert chat.decode(chat.prompt_ids([Message("user", body)])).count(body) == 1
