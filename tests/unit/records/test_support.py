from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.records import Support

ENTRIES = [[3, 1], [], [5], [], [0, 2, 4, 6]]
LISTS = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=6)


def support(entries: list[list[int]]) -> Support:
    return Support.of([np.array(entry, np.int32) for entry in entries])


def entries_of(made: Support) -> list[list[int]]:
    return [made[place].tolist() for place in range(len(made))]


def types(made: Support) -> tuple[Any, Any]:
    return made.ids.dtype, made.borders.dtype


def test_entries_lie_end_to_end() -> None:
    made = support(ENTRIES)
    assert made.ids.tolist() == [3, 1, 5, 0, 2, 4, 6]
    assert made.borders.tolist() == [0, 2, 2, 3, 3, 7]
    assert made.sizes.tolist() == [2, 0, 1, 0, 4]
    assert len(made) == 5
    assert entries_of(made) == ENTRIES


def test_an_unrestricted_support_has_places_without_ids() -> None:
    assert entries_of(Support.unrestricted(3)) == [[], [], []]
    assert len(Support.unrestricted(0)) == 0


@given(LISTS, LISTS)
def test_a_part_of_what_was_joined_is_what_it_was_before(first: list[list[int]], second: list[list[int]]) -> None:
    whole = Support.joined([support(first), Support.unrestricted(2), support(second)])
    assert entries_of(whole) == [*first, [], [], *second]
    end = len(whole)
    assert entries_of(whole.take(np.arange(end - len(second), end))) == second


@given(LISTS, st.data())
def test_places_are_taken_in_the_order_given(entries: list[list[int]], data: Any) -> None:
    places = data.draw(st.lists(st.integers(0, len(entries) - 1), max_size=8)) if entries else []
    assert entries_of(support(entries).take(np.array(places, np.int64))) == [entries[place] for place in places]


def test_types_are_those_of_the_record_even_of_nothing() -> None:
    expected = (np.dtype(np.int32), np.dtype(np.int64))
    made = [
        support(ENTRIES),
        support([]),
        Support.unrestricted(2),
        Support.joined([]),
        support(ENTRIES).take(np.arange(2)),
    ]
    assert {types(one) for one in made} == {expected}


@given(LISTS, st.data())
def test_a_token_is_allowed_if_its_entry_has_it_or_is_empty(entries: list[list[int]], data: Any) -> None:
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=len(entries), max_size=len(entries)))
    expected = [not entry or token in entry for entry, token in zip(entries, tokens, strict=True)]
    assert support(entries).allows(np.array(tokens, np.int64)).tolist() == expected


@pytest.mark.parametrize("borders", [[], [0], [1, 3], [0, 2], [0, 4], [0, 2, 1, 3]])
def test_borders_that_do_not_rise_from_0_to_the_number_of_ids_are_an_error(borders: list[int]) -> None:
    with pytest.raises(ValueError, match=r"Support\.borders must rise from 0 to 3"):
        Support(np.array([1, 2, 3], np.int32), np.array(borders, np.int64))
