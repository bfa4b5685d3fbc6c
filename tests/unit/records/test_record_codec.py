import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from beamline.records import (
    Completion,
    Experience,
    Grade,
    Group,
    Key,
    Message,
    Problem,
    Request,
    Rollout,
    SamplingParams,
    Support,
    Turn,
    pack,
)
from beamline.records.codec import decode, encode
from tests.samples import make_grade, make_group, make_problem, make_rollout

KEY = Key("eval", 3, "a problem – with any text", 2, attempt=1)
ROUTES = np.arange(6 * 2 * 2).reshape(6, 2, 2)
SHARP = SamplingParams(9, 0.5, 0.9, 4, 0.1, 2, (7, 8), record_support=True)
ROLLOUT = make_rollout(routes=ROUTES.astype(np.uint16) * 1000, grade=make_grade(-1.0, overlong=-0.5))
SUPPORT = Support(np.array([4, 2, 9], np.int32), np.array([0, 2, 2, 2, 3, 3, 3, 3]))
RECORDED = dataclasses.replace(ROLLOUT, support=SUPPORT)

RECORDS = [
    KEY,
    Message("system", "ü\n\0"),
    make_problem(level=3, nested={"list": [1, 2.5, None, True, "x"]}),
    SHARP,
    Request(KEY, np.array([1, 2, 3], np.int32), SHARP),
    Completion(KEY, np.array([5], np.int32), np.array([-0.1], np.float32), np.zeros(1, np.int32), None, "length"),
    Completion(
        KEY, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), ROUTES.astype(np.uint8), "abort"
    ),
    SUPPORT,
    Support.unrestricted(0),
    Completion(KEY, *(np.zeros(7, t) for t in ("i4", "f4", "i4")), None, "stop", SUPPORT),
    RECORDED,
    pack([Experience(RECORDED, 0.5), Experience(ROLLOUT, 1.0)]),
    Turn("tool", 3, 9),
    Grade(True, 0.75, {"answer": 1.0, "overlong": -0.25}, "timeout", well_formed=True, parsed="12"),
    make_rollout(),
    ROLLOUT,
    Group(make_problem(), (ROLLOUT, make_rollout(sample=1)), np.array([0.1, -0.1])),
    make_group(),
    Experience(ROLLOUT, -0.3, trained=False),
    pack([Experience(ROLLOUT, 0.5), Experience(ROLLOUT, 1.0)]),
    pack([Experience(make_rollout(routes=ROUTES.astype(np.uint8)), 0.5)]),
    pack([Experience(make_rollout(), 0.5)]),
]


def assert_same(a: Any, b: Any) -> None:
    """Equality of records down to types, array shapes and bits."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, list | tuple):
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was(record: Any) -> None:
    assert_same(decode(encode(record), type(record)), record)


def test_containers_of_records_come_back_in_order() -> None:
    rollouts = [make_rollout(sample=n, routes=ROUTES.astype(np.uint8)) for n in range(3)]
    assert_same(decode(encode(rollouts), list[Rollout]), rollouts)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_keep_their_width(dtype: type[np.unsignedinteger]) -> None:
    routes = np.full((6, 1, 1), np.iinfo(dtype).max, dtype)
    back = decode(encode(make_rollout(routes=routes)), Rollout).routes
    assert_same(back, routes)


def test_views_and_other_memory_orders_arrive_as_what_they_show() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (values.T, values[::2, ::-1], np.asfortranarray(values), np.array(3.0)):
        back = decode(encode(view), np.ndarray)
        assert (back.dtype, back.shape) == (view.dtype, view.shape)
        assert np.array_equal(back, view)


def test_byte_order_travels_with_the_array() -> None:
    for order in "<>":
        array = np.array([1, 2**30], dtype=f"{order}i4")
        assert_same(decode(encode(array), np.ndarray), array)


def test_values_that_are_not_finite_survive() -> None:
    assert_same(decode(encode(np.array([np.nan, np.inf, -0.0])), np.ndarray), np.array([np.nan, np.inf, -0.0]))


@pytest.mark.parametrize(
    "value", [object(), {1, 2j}, np.array([object()]), [np.array(["a", None], dtype=object)], np.float32(1)]
)
def test_what_is_neither_record_nor_array_nor_plain_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot encode"):
        encode(value)


def test_bytes_of_another_record_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(KEY), SamplingParams)


def test_a_value_of_the_wrong_type_is_refused_with_its_place() -> None:
    data = msgspec.msgpack.encode({"split": "train", "step": "one", "problem": "p", "sample": 0, "attempt": 0})
    with pytest.raises(msgspec.ValidationError, match=r"\$\.step"):
        decode(data, Key)


def test_a_support_that_contradicts_itself_is_refused() -> None:
    data = msgspec.msgpack.decode(encode(SUPPORT))
    with pytest.raises(msgspec.ValidationError, match="must rise from 0 to 3"):
        decode(msgspec.msgpack.encode(data | {"borders": data["ids"]}), Support)


def test_bounds_hold_for_decoded_records_too() -> None:
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        decode(msgspec.msgpack.encode({"max_tokens": 4, "temperature": -1.0}), SamplingParams)


@pytest.mark.parametrize(
    "array",
    [
        ["<i4", [3], b"\0" * 8],  # shorter than its shape
        ["|O", [1], b"\0" * 8],  # pointers
        ["no type", [1], b"\0"],
        ["<i4", [1]],
        b"\0\0\0\0",
    ],
)
def test_an_array_that_contradicts_itself_is_refused(array: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(array), np.ndarray)


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_truncated_bytes_are_refused(cut: int) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(encode(ROLLOUT)[:cut], Rollout)


def test_problems_are_decoded_as_problems_not_as_dictionaries() -> None:
    problem = decode(encode(make_problem()), Problem)
    assert isinstance(problem.messages[0], Message)
    assert problem.text == "1+2"
