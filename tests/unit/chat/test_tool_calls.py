import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.chat import BeamChat, Channels, ToolCall

ANALYSIS = "<|channel|>analysis<|message|>r<|end|><|start|>assistant"
HEADER = " to=bash<|channel|>analysis <|constrain|>xml<|message|>"
NEXT = "<|end|><|start|>assistant"


def parameter(key: str, value: str) -> str:
    return f'<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>'


def call(body: str) -> str:
    return f"{HEADER}{body}<|call|>"


TWO = (ToolCall("bash", {"command": "ls -l\n", "x": ""}), ToolCall("add__up", {}))
FIRST = HEADER + parameter("command", "ls -l\n") + "\n" + parameter("x", "")
RESPONSE = ANALYSIS + FIRST + NEXT + call("").replace("bash", "add__up")

# The format as the tokenizer's own parser takes it, from the published response template of Beam.
TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|start\|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": NEXT, "content": "text"},
        "content": {
            "open": "<|channel|>final<|message|>",
            "close": ["<|return|>", "<|end|>", "<|call|>"],
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r" to=(?P<name>[^\s<]+)<\|channel\|>analysis <\|constrain\|>xml<\|message\|>",
            "close": [NEXT, "<|call|>"],
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<rfl:parameter name="(?P<key>[^"]+)">'
                r'\n(?P<value>.*?)\n(?:</rfl:parameter>|(?=<rfl:parameter name="))',
                "value_parser": {"name": "text", "args": {"strip": False}},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def arguments(chat: BeamChat, body: str) -> dict[str, str]:
    """What a call with this body, written after reasoning, was given."""
    (read,) = chat.channels(chat.encode(ANALYSIS + call(body))).calls
    assert read.name == "bash"
    return read.arguments


def test_calls_are_read_in_their_order_with_the_reasoning_before_them(chat: BeamChat) -> None:
    assert chat.channels(chat.encode(RESPONSE)) == Channels("r", None, TWO)


def test_cut_anywhere_a_response_has_no_calls(chat: BeamChat) -> None:
    ids = chat.encode(RESPONSE)
    analysis_closed = ids.index(chat.encode("<|end|>")[0]) + 1
    for length in range(len(ids)):
        analysis = "r" if length >= analysis_closed else None
        assert chat.channels(ids[:length]) == Channels(analysis, None, truncated=True), length


def test_a_call_without_reasoning_is_one(chat: BeamChat) -> None:
    assert chat.channels(chat.encode(call(parameter("a", "1")))).calls == (ToolCall("bash", {"a": "1"}),)


@pytest.mark.parametrize(
    "value", ["", " ", "1", "\n", " a\n\n b\t", "½ 数 🙂", "<b>&amp;</b>", "</rfl:parameter>", '">']
)
def test_a_value_is_the_text_between_its_two_newlines(chat: BeamChat, value: str) -> None:
    assert arguments(chat, parameter("key", value)) == {"key": value}


def test_the_closing_tag_may_be_one_token_or_written_out(chat: BeamChat) -> None:
    whole = chat.encode(call(parameter("a", "1") + "\n" + parameter("b", "2")))
    closing = chat.encode("\n</rfl:parameter>")
    assert len(closing) == 1
    letters = [token for letter in "\n</rfl:parameter>" for token in chat.encode(letter)]
    written = [token for i in whole for token in (letters if i == closing[0] else [i])]
    assert len(written) > len(whole)
    assert chat.channels(written).calls == chat.channels(whole).calls == (ToolCall("bash", {"a": "1", "b": "2"}),)


def test_a_value_may_end_where_the_next_parameter_opens_on_a_new_line(chat: BeamChat) -> None:
    assert arguments(chat, '<rfl:parameter name="a">\n1\n' + parameter("b", "2")) == {"a": "1", "b": "2"}
    assert arguments(chat, parameter("a", '1<rfl:parameter name="b">\n2')) == {"a": '1<rfl:parameter name="b">\n2'}


def test_a_parameter_that_is_not_closed_is_none(chat: BeamChat) -> None:
    assert arguments(chat, parameter("a", "1") + '<rfl:parameter name="b">\n2') == {"a": "1"}
    assert arguments(chat, '<rfl:parameter name="b">2\n</rfl:parameter>') == {}


def test_of_a_parameter_given_twice_the_last_counts(chat: BeamChat) -> None:
    assert arguments(chat, parameter("a", "1") + parameter("a", "2")) == {"a": "2"}


def test_control_tokens_spelled_in_letters_are_text_of_a_value(chat: BeamChat) -> None:
    before, after = chat.encode(f'{HEADER}<rfl:parameter name="a">\n'), chat.encode("\n</rfl:parameter><|call|>")
    letters = [token for letter in "<|call|>" for token in chat.encode(letter)]
    assert chat.channels([*before, *letters, *after]).calls == (ToolCall("bash", {"a": "<|call|>"}),)
    assert chat.channels([*before, *letters]) == Channels(None, None, truncated=True)


@pytest.mark.parametrize("end", ["<|return|>", "<|end|>", "", "<|call|>x", "<|call|><|start|>assistant"])
def test_a_response_that_does_not_end_in_a_call_token_has_no_calls(chat: BeamChat, end: str) -> None:
    assert chat.channels(chat.encode(RESPONSE.removesuffix("<|call|>") + end)).calls == ()


@pytest.mark.parametrize(
    "header",
    [
        HEADER.removeprefix(" "),
        "  to=bash" + HEADER.removeprefix(" to=bash"),
        HEADER.replace("bash", "my bash"),
        HEADER.replace("bash", ""),
        HEADER.replace("bash", "a<b"),
        HEADER.replace("analysis ", "analysis"),
        HEADER.replace("analysis ", "final "),
        HEADER.replace("xml", "json"),
        HEADER.replace(" <|constrain|>xml", ""),
        HEADER.replace(" to=bash", ""),
    ],
)
def test_a_header_of_another_form_is_no_call(chat: BeamChat, header: str) -> None:
    good = chat.encode(f"{ANALYSIS}{HEADER}<|call|>")
    assert chat.channels(good).calls == (ToolCall("bash", {}),)
    assert chat.channels(chat.encode(f"{ANALYSIS}{header}<|call|>")) == Channels("r", None)


def test_one_call_that_cannot_be_read_spoils_the_others(chat: BeamChat) -> None:
    other = HEADER.replace("xml", "json")
    for bodies in ((HEADER, other, HEADER), (other, HEADER), (HEADER, other)):
        assert chat.channels(chat.encode(f"{NEXT.join(bodies)}<|call|>")).calls == ()


def test_calls_come_last(chat: BeamChat) -> None:
    reasoning = "<|channel|>analysis<|message|>r<|call|>"
    assert chat.channels(chat.encode(HEADER + NEXT + reasoning)) == Channels("r", None)
    assert chat.channels(chat.encode(HEADER + NEXT + reasoning.replace("<|call|>", NEXT) + call(""))).calls == ()
    assert chat.channels(chat.encode(HEADER + "<|call|><|start|>assistant" + call(""))).calls == ()


def test_text_for_the_user_may_come_before_a_call_and_is_no_answer(chat: BeamChat) -> None:
    said = f"{ANALYSIS}<|channel|>final<|message|>12{NEXT}{call('')}"
    assert chat.channels(chat.encode(said)) == Channels("r", None, (ToolCall("bash", {}),))


def test_an_answer_closed_by_a_call_token_is_neither(chat: BeamChat) -> None:
    said = chat.encode(f"{ANALYSIS}<|channel|>final<|message|>12<|call|>")
    assert chat.channels(said) == Channels("r", None)


@given(st.lists(st.sampled_from(['<rfl:parameter name="', 'a">', "\n", "</rfl:parameter>", "1", '"']), max_size=24))
def test_any_body_gives_the_parameters_of_the_published_pattern(chat: BeamChat, pieces: list[str]) -> None:
    body = "".join(pieces)
    found = re.finditer(TEMPLATE["fields"]["tool_calls"]["content_args"]["tag_pattern"], body, re.DOTALL)
    assert arguments(chat, body) == {one["key"]: one["value"] for one in found}


@pytest.mark.parametrize(
    "response",
    [
        f"{ANALYSIS}<|channel|>final<|message|>12<|return|>",
        RESPONSE,
        ANALYSIS + call(parameter("a", " 1\n") + "\n" + parameter("b", "2")),
        call('<rfl:parameter name="a">\n1\n' + parameter("b", "2")),
        call(parameter("a", "1") + "between" + parameter("a", "2") + '<rfl:parameter name="b">\n3'),
        call('<rfl:parameter name="a">\n\n<rfl:parameter name="b">\n<rfl:parameter name="c">\n\n</rfl:parameter>'),
        call('<rfl:parameter name="a\nb">\n</rfl:parameter>\n</rfl:parameter>'),
    ],
)
def test_whole_responses_read_as_by_the_tokenizers_own_parser(chat: BeamChat, response: str) -> None:
    prompt = "<|start|>user<|message|>1+2<|end|><|start|>assistant"
    other = chat._tokenizer.parse_response(chat.encode(response), TEMPLATE, prefix=chat.encode(prompt))
    read = chat.channels(chat.encode(response))
    assert read.analysis == other.get("thinking")
    assert read.final == other.get("content")
    assert [(one.name, one.arguments) for one in read.calls] == calls_of(other)


def calls_of(parsed: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    return [(one["function"]["name"], one["function"]["arguments"]) for one in parsed.get("tool_calls", [])]
