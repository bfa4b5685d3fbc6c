"""What a mathematician says about a response, against what the graders say."""

import pytest

from beamline.tasks.graders import GRADERS, unusable_answer
from tests.unit.tasks.graders.table import Case, rows
from tests.unit.tasks.graders.table_attacks import ATTACKS
from tests.unit.tasks.graders.table_collections import COLLECTIONS
from tests.unit.tasks.graders.table_commitment import COMMITMENT
from tests.unit.tasks.graders.table_dapo import DAPO
from tests.unit.tasks.graders.table_hostile import HOSTILE, STATEMENTS
from tests.unit.tasks.graders.table_integer import INTEGER
from tests.unit.tasks.graders.table_numbers import NUMBERS
from tests.unit.tasks.graders.table_sentences import SENTENCES
from tests.unit.tasks.graders.table_symbols import SYMBOLS

MATH = (*COMMITMENT, *NUMBERS, *SYMBOLS, *COLLECTIONS, *HOSTILE, *STATEMENTS, *SENTENCES, *ATTACKS)

# Right answers that are refused, because accepting them would let wrong ones pass.
KNOWN_REFUSALS = {
    ("Answer: 3+i4", "3+4i"),  # a number behind a letter is read as a slip
    ("Answer - 34", "34"),  # or is it minus 34?
    ("If n = 17, the answer is 34.", "34"),  # or is it another answer otherwise?
    ("Answer: 34 (thirty-four)", "34"),  # number words are not compared
    ("Answer: 5/9 (about 55.6%)", "5/9"),  # roundings in brackets are not compared
    ("Answer: 34, not 35", "34"),  # denials are not understood
    ("Answer: 3{,}5", "3.5"),  # a decimal comma separates elsewhere
    ("Answer: 90°", "\\frac{\\pi}{2}"),  # degrees are a unit, not a factor
}


def test_math_accepts_nothing_wrong_and_refuses_only_what_is_listed() -> None:
    table = [*rows(MATH), *((response, truth, True) for response, truth in KNOWN_REFUSALS)]
    judged = [(row, GRADERS["math"](row[0], row[1]).correct) for row in table]
    accepted_wrongly = [row[:2] for row, correct in judged if correct and not row[2]]
    refused_wrongly = [row[:2] for row, correct in judged if row[2] and not correct]
    assert accepted_wrongly == []
    assert set(refused_wrongly) == KNOWN_REFUSALS
    assert len(table) > 1_700
    assert len(refused_wrongly) <= 0.01 * sum(right for _, _, right in table)


@pytest.mark.parametrize("truth", sorted({case.truth for case in MATH}))
def test_every_expected_answer_of_the_table_can_be_judged(truth: str) -> None:
    # congruences are compared as texts only, which is too little to promise
    assert (unusable_answer("math", truth) is None) == ("pmod" not in truth)


@pytest.mark.parametrize(("grader", "cases"), [("integer", INTEGER), ("dapo_strict", DAPO)])
def test_the_other_graders_agree_with_their_table(grader: str, cases: tuple[Case, ...]) -> None:
    verdicts = {row: GRADERS[grader](row[0], row[1]).correct for row in rows(cases)}  # type: ignore[index]
    assert [row for row, correct in verdicts.items() if correct != row[2]] == []
    assert len(verdicts) > 30


def test_integer_accepts_no_response_that_math_holds_for_wrong() -> None:
    case = COMMITMENT[0]
    assert [response for response in case.wrong if GRADERS["integer"](response, case.truth).correct] == []
