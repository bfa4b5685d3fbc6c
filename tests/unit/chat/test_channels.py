from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.chat import BeamChat, Channels

ANALYSIS = "<|channel|>analysis<|message|>7+5=12<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>12<|return|>"
OPENING = FINAL.removeprefix("<|start|>assistant")
CALLED = ' to=add<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="a">\n1\n</rfl:parameter>'
NOTHING = Channels(None, None, well_formed=False)


def spelled(chat: BeamChat, text: str) -> list[int]:
    """Text in ordinary tokens, one for each character, even where it reads like a control token."""
    return [token for character in text for token in chat.encode(character)]


def sections() -> st.SearchStrategy[str]:
    """What responses are made of, in any order."""
    calls = [f"{CALLED}{closer}" for closer in ("<|call|>", "<|end|>")]
    return st.sampled_from([ANALYSIS, FINAL, OPENING, "<|start|>assistant", *calls, "x", "<|end|>"])


def test_a_good_response_has_its_two_channels(chat: BeamChat) -> None:
    expected = Channels("7+5=12", "12", well_formed=True)
    ids = chat.encode(ANALYSIS + FINAL)
    assert chat.channels(ids) == expected
    assert chat.channels(np.array(ids, dtype=np.int32)) == expected


@pytest.mark.parametrize("answer", ["12", "½ <|return|> 数 🙂\n", ""])
def test_cut_anywhere_a_response_has_no_final_channel(chat: BeamChat, answer: str) -> None:
    opened, closed = chat.encode(ANALYSIS + FINAL.removesuffix("12<|return|>")), chat.encode("<|return|>")
    ids = [*opened, *spelled(chat, answer), *closed]
    analysis_closed = len(chat.encode(ANALYSIS))
    for length in range(len(ids)):
        analysis = "7+5=12" if length >= analysis_closed else None
        assert chat.channels(ids[:length]) == Channels(analysis, None, truncated=True), length
    assert chat.channels(ids) == Channels("7+5=12", answer, well_formed=True)


def test_empty_channels_are_channels(chat: BeamChat) -> None:
    ids = chat.encode(ANALYSIS.replace("7+5=12", "") + FINAL.replace("12", ""))
    assert chat.channels(ids) == Channels("", "", well_formed=True)


def test_bodies_keep_their_spaces_and_lines(chat: BeamChat) -> None:
    ids = chat.encode(ANALYSIS.replace("7+5=12", " a\n") + FINAL.replace("12", " 1 2\t"))
    assert chat.channels(ids) == Channels(" a\n", " 1 2\t", well_formed=True)


def test_an_answer_without_reasoning_is_read_but_is_not_well_formed(chat: BeamChat) -> None:
    assert chat.channels(chat.encode(OPENING)) == Channels(None, "12", well_formed=False)


def test_reasoning_twice_is_not_well_formed(chat: BeamChat) -> None:
    ids = chat.encode(ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL)
    assert chat.channels(ids) == Channels("7+5=12", "12", well_formed=False)


def test_of_two_final_channels_the_one_that_ends_the_response_counts(chat: BeamChat) -> None:
    first = FINAL.replace("12<|return|>", "13<|end|>")
    assert chat.channels(chat.encode(ANALYSIS + first)) == Channels("7+5=12", None, truncated=True)
    assert chat.channels(chat.encode(ANALYSIS + first + FINAL)) == Channels("7+5=12", "12", well_formed=False)


def test_an_answer_before_the_reasoning_is_not_well_formed(chat: BeamChat) -> None:
    reasoning = "<|start|>assistant" + ANALYSIS.replace("<|end|>", "<|return|>")
    assert not chat.channels(chat.encode(OPENING.replace("<|return|>", "<|end|>") + reasoning)).well_formed


@pytest.mark.parametrize("closer", ["<|end|>", "<|call|>"])
def test_a_final_channel_closed_by_another_token_is_no_answer(chat: BeamChat, closer: str) -> None:
    ids = chat.encode(ANALYSIS + FINAL.replace("<|return|>", closer))
    assert chat.channels(ids) == Channels("7+5=12", None, truncated=closer == "<|end|>")


@pytest.mark.parametrize("closer", ["<|return|>", "<|call|>"])
def test_reasoning_closed_by_another_token_is_not_well_formed(chat: BeamChat, closer: str) -> None:
    assert not chat.channels(chat.encode(ANALYSIS.replace("<|end|>", closer) + FINAL)).well_formed


@pytest.mark.parametrize("token", ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"])
def test_a_control_token_inside_a_body_spoils_the_channel(chat: BeamChat, token: str) -> None:
    assert chat.channels(chat.encode(ANALYSIS.replace("+", token) + FINAL)) == NOTHING
    spoiled = chat.channels(chat.encode(ANALYSIS + FINAL.replace("12", f"1{token}2")))
    assert spoiled == Channels("7+5=12", None, well_formed=False)


@pytest.mark.parametrize("before", ["x", " ", "<|start|>assistant", "<|end|>", "<|message|>", "<|return|>"])
def test_anything_before_the_first_channel_spoils_the_response(chat: BeamChat, before: str) -> None:
    assert chat.channels(chat.encode(before + ANALYSIS + FINAL)) == NOTHING


@pytest.mark.parametrize("opening", ["<|message|> <|channel|>", "<|start|> <|message|>", "<|channel|> <|constrain|>"])
def test_a_channel_opened_by_other_tokens_is_none(chat: BeamChat, opening: str) -> None:
    first, second = opening.split()
    spoiled = f"{first}analysis{second}7+5=12<|end|>"
    assert chat.channels(chat.encode(spoiled + FINAL)) == NOTHING


@pytest.mark.parametrize("token", ["", "x", "<|end|>", "<|message|>", "<|return|>"])
def test_a_second_channel_begins_with_the_start_token(chat: BeamChat, token: str) -> None:
    ids = chat.encode(ANALYSIS + FINAL.replace("<|start|>", token))
    assert chat.channels(ids) == Channels("7+5=12", None, well_formed=False)


@pytest.mark.parametrize("between", ["x", "\n", "<|start|>assistant"])
def test_anything_between_two_channels_ends_the_reading(chat: BeamChat, between: str) -> None:
    assert chat.channels(chat.encode(ANALYSIS + between + FINAL)) == Channels("7+5=12", None)


def test_a_channel_called_like_the_author_needs_its_start_too(chat: BeamChat) -> None:
    ids = chat.encode(ANALYSIS + "<|channel|>assistant<|message|>12<|return|>")
    assert chat.channels(ids) == Channels("7+5=12", None)


def test_a_constrained_channel_is_no_answer(chat: BeamChat) -> None:
    ids = chat.encode(ANALYSIS + FINAL.replace("final", "final<|constrain|>xml"))
    assert chat.channels(ids) == Channels("7+5=12", None)


def test_an_answer_after_a_call_is_not_well_formed(chat: BeamChat) -> None:
    ids = chat.encode(ANALYSIS + "<|start|>assistant" + CALLED + "<|end|>" + FINAL)
    assert chat.channels(ids) == Channels("7+5=12", "12")


@pytest.mark.parametrize("after", ["x", "<|return|>", "<|start|>", ANALYSIS])
def test_anything_after_the_answer_is_not_well_formed(chat: BeamChat, after: str) -> None:
    assert chat.channels(chat.encode(ANALYSIS + FINAL + after)) == Channels("7+5=12", "12", well_formed=False)


@pytest.mark.parametrize("author", ["", "user", " assistant", "assistantassistant"])
def test_a_second_channel_of_another_author_is_not_the_policys_answer(chat: BeamChat, author: str) -> None:
    ids = chat.encode(ANALYSIS + FINAL.replace("assistant", author))
    assert chat.channels(ids) == Channels("7+5=12", None, well_formed=False)


@pytest.mark.parametrize("name", ["commentary", "finally", "", "Final", "final ", " final"])
def test_other_channels_are_no_answer(chat: BeamChat, name: str) -> None:
    ids = chat.encode(ANALYSIS + FINAL.replace("final", name))
    assert chat.channels(ids) == Channels("7+5=12", None, well_formed=False)


def test_control_tokens_spelled_in_letters_are_text(chat: BeamChat) -> None:
    letters = spelled(chat, "1<|return|>2<|end|>")
    opened, closed = chat.encode(OPENING.removesuffix("12<|return|>")), chat.encode("<|return|>")
    assert chat.channels([*opened, *letters]).final is None
    assert chat.channels([*opened, *letters, *closed]).final == "1<|return|>2<|end|>"


def test_nothing_is_tokenized_again(chat: BeamChat, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [*chat.encode("<|channel|>"), *spelled(chat, "analysis"), *chat.encode("<|message|><|end|>" + FINAL)]
    monkeypatch.setattr(chat, "_tokenizer", SimpleNamespace(decode=chat._tokenizer.decode))
    assert chat.channels(ids) == Channels("", "12", well_formed=True)


def test_ids_that_stand_for_no_text_are_no_part_of_an_answer(chat: BeamChat) -> None:
    for unknown in (chat.vocab_size, 10**6, -1):
        answer = [*chat.encode(ANALYSIS + FINAL.removesuffix("2<|return|>")), unknown, *chat.encode("2<|return|>")]
        assert chat.channels(answer) == Channels("7+5=12", None, well_formed=False)
        assert chat.channels([unknown, *chat.encode(ANALYSIS + FINAL)]) == NOTHING


def test_nothing_has_no_channels(chat: BeamChat) -> None:
    nothing = Channels(None, None, truncated=True)
    assert chat.channels([]) == nothing
    assert chat.channels(np.zeros(0, dtype=np.int32)) == nothing


def test_bytes_that_are_no_text_are_read_as_what_cannot_be_shown(chat: BeamChat) -> None:
    (first, *rest), closed = chat.encode("½"), chat.encode("<|return|>")
    opened = chat.encode(OPENING.removesuffix("12<|return|>"))
    assert chat.channels([*opened, first, *closed]).final == "\ufffd"
    assert chat.channels([*opened, first, *rest, *closed]).final == "½"


@given(st.lists(st.one_of(st.integers(256, 267), st.integers(-2, 300)), max_size=30))
def test_no_garbage_breaks_the_parser_or_makes_an_answer_without_a_return(chat: BeamChat, ids: list[int]) -> None:
    check_what_is_said_was_stopped(chat, ids)


@given(st.lists(sections(), max_size=6), st.integers(0, 200))
def test_no_order_of_sections_makes_an_answer_or_a_call_without_its_stop(
    chat: BeamChat, parts: list[str], cut: int
) -> None:
    check_what_is_said_was_stopped(chat, chat.encode("".join(parts))[: cut + 1])


def check_what_is_said_was_stopped(chat: BeamChat, ids: list[int]) -> None:
    returned, called = chat.stop_ids
    read = chat.channels(ids)
    assert read.final is None or returned in ids
    assert not read.calls or ids[-1] == called
    assert not (read.calls and read.final is not None)
    assert read.truncated == (returned not in ids and called not in ids)
    assert not read.well_formed or (ids[-1] == returned and None not in (read.analysis, read.final))
