"""Instructions around a problem: put on, taken off, and nothing else touched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.data.wording import AFTER, BEFORE, bare, dapo

OTHERS = (
    r"Solve the following math problem step by step. The last line of your response should be of the form "
    r"Answer: \boxed{$Answer} where $Answer is the answer to the problem.",
    r"Solve the following math problem step by step. The last line of your response must be of the form "
    r"Answer: \boxed{$Answer} (without quotes) where $Answer is the answer to the problem.",
    r"Solve the following math problem step by step. The last line of your response should be of the form "
    r"'Answer: $Answer' (without quotes) where $Answer is the answer to the problem.",
)


def test_the_wording_of_dapo() -> None:
    assert dapo("How many?") == (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nHow many?\n\nRemember to put your "
        'answer on its own line after "Answer:".'
    )


@given(st.text().filter(lambda text: text == text.strip() and text))
def test_what_is_put_on_can_be_taken_off(text: str) -> None:
    assert bare(dapo(text)) == bare(text)
    assert dapo(dapo(text)) == dapo(text)


@pytest.mark.parametrize("before", OTHERS)
def test_other_editions_are_known_and_become_the_one(before: str) -> None:
    text = f"{before}\n\nHow many?\n\n{AFTER}"
    assert bare(text) == "How many?"
    assert dapo(text) == dapo("How many?")


def test_each_half_is_taken_off_alone_too() -> None:
    assert bare(f"{BEFORE}\n\nHow many?") == "How many?"
    assert bare(f"How many?\n\n{AFTER}\n") == "How many?"


@pytest.mark.parametrize(
    "text",
    [
        "How many?",
        f"She said: {BEFORE} How many?",
        f"{AFTER} How many?",
        f"How many? {AFTER} Or how much?",
        f"{BEFORE}\n\n{AFTER}",
        BEFORE,
        AFTER,
        "Solve the following math problem step by step. How many?",
        " Answer: 3 ",
    ],
)
def test_other_text_comes_back_as_it_is(text: str) -> None:
    assert bare(text) == text
