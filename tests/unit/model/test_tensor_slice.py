import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.model.layout import TensorSlice

SHAPE = (4, 3, 5)


def box(start: tuple[int, ...], stop: tuple[int, ...], name: str = "w") -> TensorSlice:
    return TensorSlice(name, "float32", SHAPE, start, stop)


@st.composite
def boxes(draw: st.DrawFn) -> TensorSlice:
    start = tuple(draw(st.integers(0, n - 1)) for n in SHAPE)
    return box(start, tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, SHAPE, strict=True)))


def test_the_whole_tensor_is_a_slice() -> None:
    whole = TensorSlice.whole("w", "bfloat16", (2, 3))
    assert (whole.start, whole.stop, whole.size) == ((0, 0), (2, 3), (2, 3))


def test_a_scalar_has_one_slice() -> None:
    scalar = TensorSlice.whole("s", "float32", ())
    assert scalar.intersect(scalar) == scalar
    assert scalar.within(scalar) == ()


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        ((0, 0, 0), (4, 3, 6)),
        ((-1, 0, 0), (4, 3, 5)),
        ((0, 2, 0), (4, 2, 5)),
        ((0, 2, 0), (4, 1, 5)),
    ],
)
def test_a_box_that_is_empty_or_leaves_the_tensor_is_an_error(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"of w \(4, 3, 5\) is empty or out of bounds"):
        box(start, stop)


def test_a_box_of_other_dimensions_is_an_error() -> None:
    with pytest.raises(ValueError, match="longer"):
        box((0, 0), (4, 3))


def test_boxes_that_only_touch_share_nothing() -> None:
    assert box((0, 0, 0), (2, 3, 5)).intersect(box((2, 0, 0), (4, 3, 5))) is None


@given(a=boxes(), b=boxes())
def test_the_intersection_holds_exactly_the_shared_elements(a: TensorSlice, b: TensorSlice) -> None:
    marks = np.zeros(SHAPE, np.int8)
    marks[a.index] += 1
    marks[b.index] += 1
    shared = a.intersect(b)
    found = np.zeros(SHAPE, np.int8)
    if shared is not None:
        found[shared.index] = 1
        assert shared.size == found[shared.index].shape
    assert np.array_equal(found == 1, marks == 2)
    assert shared == b.intersect(a)


@given(a=boxes(), b=boxes())
def test_within_finds_the_part_in_the_buffer_of_a_larger_slice(a: TensorSlice, b: TensorSlice) -> None:
    part = a.intersect(b)
    if part is not None:
        tensor = np.arange(np.prod(SHAPE)).reshape(SHAPE)
        for outer in (a, b):
            assert np.array_equal(tensor[outer.index][part.within(outer)], tensor[part.index])


def test_slices_of_different_tensors_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"w .* and v .* are not the same tensor"):
        box((0, 0, 0), SHAPE).intersect(box((0, 0, 0), SHAPE, name="v"))
    with pytest.raises(ValueError, match=r"w \(4, 3, 5\) and w \(4, 3\) are not the same tensor"):
        box((0, 0, 0), SHAPE).intersect(TensorSlice.whole("w", "float32", (4, 3)))


def test_types_may_differ_and_the_first_ones_stays() -> None:
    low = TensorSlice.whole("w", "bfloat16", SHAPE)
    assert low.intersect(box((0, 0, 0), (1, 1, 1))) == TensorSlice("w", "bfloat16", SHAPE, (0, 0, 0), (1, 1, 1))
