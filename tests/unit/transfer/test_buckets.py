import zlib
from collections.abc import Callable
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from beamline.model.layout import DType, TensorSlice
from beamline.transfer.buckets import Bucket, Copier, buckets, checksum, sample
from beamline.transfer.dtypes import TORCH_DTYPES

DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16", "uint8")
LIMITS = st.integers(4, 300)  # bytes; the largest element has 4


@st.composite
def boxes(draw: st.DrawFn, most: int = 8) -> list[TensorSlice]:
    """Boxes of tensors of zero to three dimensions, each tensor of a type of its own."""
    made = []
    for i in range(draw(st.integers(0, most))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        stop = tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
        made.append(TensorSlice(f"tensor {i}", draw(st.sampled_from(DTYPES)), shape, start, stop))
    return made


@st.composite
def sides(draw: st.DrawFn, parts: list[TensorSlice]) -> dict[str, Tensor]:
    """The tensors that the parts lie in, of whole numbers below 100, each of any type and with any order of strides."""
    tensors = {}
    for part in parts:
        order = draw(st.permutations(range(len(part.shape))))
        inner = [part.shape[d] for d in order]
        numbers = torch.arange(prod(inner)).reshape(inner).remainder(97).to(TORCH_DTYPES[draw(st.sampled_from(DTYPES))])
        tensors[part.name] = numbers.permute(*[order.index(d) for d in range(len(order))]) if order else numbers
    return tensors


def view_in(tensors: dict[str, Tensor]) -> Callable[[TensorSlice], Tensor]:
    return lambda part: tensors[part.name][part.index]


def nbytes(part: TensorSlice) -> int:
    return prod(part.size) * TORCH_DTYPES[part.dtype].itemsize


def read(bucket: Bucket, buffer: Tensor, i: int) -> Tensor:
    """Part ``i`` as it lies in the buffer, read from its bytes alone."""
    part, begin = bucket.parts[i], bucket.offsets[i]
    data = bytearray(buffer[begin : begin + nbytes(part)].tolist())
    return torch.frombuffer(data, dtype=TORCH_DTYPES[part.dtype]).reshape(part.size)


def packed(bucket: Bucket, view_of: Callable[[TensorSlice], Tensor]) -> Tensor:
    buffer = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
    Copier(bucket, view_of).pack(buffer)
    return buffer


def experts(n: int, rows: int = 4, columns: int = 6, dtype: DType = "bfloat16") -> list[TensorSlice]:
    return [TensorSlice.whole(f"experts.{i}", dtype, (rows, columns)) for i in range(n)]


def stacked(stack: Tensor) -> Callable[[TensorSlice], Tensor]:
    """Experts as views of one tensor ``[E, rows, columns]``."""
    return lambda part: stack[int(part.name.rpartition(".")[2])][part.index]


@given(boxes(), LIMITS)
def test_buckets_cover_every_element_once_and_in_order(parts: list[TensorSlice], limit: int) -> None:
    elements = [(part.name, e) for part in parts for e in view_of_numbers(part).flatten().tolist()]
    found = [
        (part.name, e)
        for bucket in buckets(parts, limit)
        for part in bucket.parts
        for e in view_of_numbers(part).flatten().tolist()
    ]
    assert found == elements


def view_of_numbers(part: TensorSlice) -> Tensor:
    numbers = torch.arange(prod(part.shape)).reshape(part.shape)
    return view_in({part.name: numbers})(part)


@given(boxes(), LIMITS)
def test_no_bucket_is_empty_or_larger_than_the_limit_and_no_parts_overlap(parts: list[TensorSlice], limit: int) -> None:
    for bucket in buckets(parts, limit):
        ends = [offset + nbytes(part) for part, offset in zip(bucket.parts, bucket.offsets, strict=True)]
        assert all(end <= begin for end, begin in zip(ends, bucket.offsets[1:], strict=False))
        assert 0 < bucket.nbytes == ends[-1] <= limit


@given(boxes(), LIMITS)
def test_parts_of_one_type_lie_back_to_back_and_another_type_begins_aligned(
    parts: list[TensorSlice], limit: int
) -> None:
    for bucket in buckets(parts, limit):
        end, before = 0, None
        for part, offset in zip(bucket.parts, bucket.offsets, strict=True):
            assert offset == end if part.dtype == before else offset == -(-end // 16) * 16
            end, before = offset + nbytes(part), part.dtype


@given(boxes(), LIMITS)
def test_a_bucket_is_closed_only_when_the_next_piece_does_not_fit(parts: list[TensorSlice], limit: int) -> None:
    for first, second in pairwise(buckets(parts, limit)):
        assert first.nbytes + 15 + nbytes(second.parts[0]) > limit


def test_a_large_part_is_cut_into_as_many_rows_as_fit() -> None:
    cut = buckets([TensorSlice.whole("w", "float32", (5, 10))], 2 * 40 + 39)
    assert [(b.parts[0].start, b.parts[0].stop, b.nbytes) for b in cut] == [
        ((0, 0), (2, 10), 80),
        ((2, 0), (4, 10), 80),
        ((4, 0), (5, 10), 40),
    ]


def test_a_row_that_is_too_large_is_cut_in_its_turn() -> None:
    cut = buckets([TensorSlice.whole("w", "float32", (2, 3))], 8)
    assert [(part.start, part.stop) for b in cut for part in b.parts] == [
        ((0, 0), (1, 2)),
        ((0, 2), (1, 3)),
        ((1, 0), (2, 2)),
        ((1, 2), (2, 3)),
    ]


def test_what_fits_is_not_cut() -> None:
    parts = experts(5)
    assert [part for b in buckets(parts, 100) for part in b.parts] == parts


def test_a_limit_below_one_element_is_an_error_that_names_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"buckets of 3 bytes hold no element of w \(float32\)"):
        buckets([TensorSlice.whole("w", "float32", (2, 2))], 3)


@given(st.data())
def test_packed_bytes_are_the_slices_cast_to_the_wire_type(data: st.DataObject) -> None:
    parts = data.draw(boxes())
    tensors = data.draw(sides(parts))
    for bucket in buckets(parts, data.draw(LIMITS)):
        buffer = packed(bucket, view_in(tensors))
        for i, part in enumerate(bucket.parts):
            assert torch.equal(read(bucket, buffer, i), view_in(tensors)(part).to(TORCH_DTYPES[part.dtype]))


@given(st.data())
def test_what_one_side_packs_the_other_unpacks_into_its_own_slices_alone(data: st.DataObject) -> None:
    parts = data.draw(boxes())
    source, destination = data.draw(sides(parts)), data.draw(sides(parts))
    wanted = {name: tensor.clone() for name, tensor in destination.items()}
    for part in parts:
        view_in(wanted)(part).copy_(view_in(source)(part))
    for bucket in buckets(parts, data.draw(LIMITS)):
        Copier(bucket, view_in(destination)).unpack(packed(bucket, view_in(source)))
    assert all(torch.equal(destination[name], tensor) for name, tensor in wanted.items())


def test_bfloat16_on_the_wire_is_the_rounding_of_torch() -> None:
    values = torch.randn(100, 7, generator=torch.Generator().manual_seed(0))
    (bucket,) = buckets([TensorSlice.whole("w", "bfloat16", (100, 7))], 10_000)
    buffer = packed(bucket, lambda part: values)
    assert torch.equal(buffer.view(torch.bfloat16).view(100, 7), values.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stack_of_experts_is_one_copy(dtype: torch.dtype) -> None:
    (bucket,) = buckets(experts(50), 1 << 20)
    assert Copier(bucket, stacked(torch.zeros(50, 4, 6, dtype=dtype))).copies == 1


@pytest.mark.parametrize("limit", [40, 70, 200])  # an expert has 48 bytes and a row 12: cut, alone, and by fours
def test_a_stack_that_takes_many_buckets_is_one_copy_in_each(limit: int) -> None:
    stack = torch.randn(10, 4, 6).bfloat16()
    cut = buckets(experts(10), limit)
    assert [Copier(bucket, stacked(stack)).copies for bucket in cut] == [1] * len(cut)
    assert torch.equal(torch.cat([packed(bucket, stacked(stack)) for bucket in cut]).view(stack.dtype), stack.flatten())


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        pytest.param((9, 5, 6), lambda stack, i: stack[i, :4], id="a gap between them"),
        pytest.param((9, 4, 6), lambda stack, i: stack[8 - i], id="another order"),
        pytest.param((9, 4, 8), lambda stack, i: stack[i, :, :6], id="some of their columns"),
        pytest.param((9, 6, 4), lambda stack, i: stack[i].T, id="transposed"),
        pytest.param((9, 4, 6), lambda stack, i: stack[i].clone(), id="tensors of their own"),
    ],
)
def test_what_is_no_run_here_is_copied_part_by_part(
    shape: tuple[int, ...], view: Callable[[Tensor, int], Tensor]
) -> None:
    stack = torch.randn(shape).bfloat16()
    (bucket,) = buckets(experts(9), 1 << 20)
    views = {part.name: view(stack, i) for i, part in enumerate(bucket.parts)}
    copier, buffer = Copier(bucket, lambda part: views[part.name]), torch.empty(bucket.nbytes, dtype=torch.uint8)
    copier.pack(buffer)
    assert copier.copies == 9
    assert torch.equal(buffer.view(torch.bfloat16).view(9, 4, 6), torch.stack(list(views.values())))


def test_a_run_here_that_the_wire_interrupts_is_not_joined_over_it() -> None:
    stack = torch.randn(3, 5)
    wire: tuple[DType, ...] = ("bfloat16", "float32", "float32")
    parts = [TensorSlice.whole(f"experts.{i}", dtype, (5,)) for i, dtype in enumerate(wire)]
    (bucket,) = buckets(parts, 1 << 20)
    assert bucket.offsets == (0, 16, 36)
    assert Copier(bucket, stacked(stack)).copies == 2


def test_two_types_here_are_never_one_copy() -> None:
    memory = torch.zeros(48, dtype=torch.uint8)
    views = {"a": memory.view(torch.bfloat16)[:8], "b": memory.view(torch.float32)[8:]}  # elements 0-7 and 8-11
    wire = [TensorSlice.whole("a", "bfloat16", (8,)), TensorSlice.whole("b", "bfloat16", (4,))]
    (bucket,) = buckets(wire, 1 << 10)
    assert Copier(bucket, lambda part: views[part.name]).copies == 2


def test_two_types_on_the_wire_are_never_one_copy() -> None:
    values = torch.zeros(16)
    wire = [TensorSlice.whole("a", "bfloat16", (8,)), TensorSlice.whole("b", "float16", (8,))]
    (bucket,) = buckets(wire, 1 << 10)
    assert bucket.offsets == (0, 16)
    assert Copier(bucket, lambda part: values[:8] if part.name == "a" else values[8:]).copies == 2


def test_a_gap_in_the_bucket_is_not_copied_over() -> None:
    bucket = Bucket(tuple(experts(2)), (0, 64), 112)
    stack = torch.randn(2, 4, 6).bfloat16()
    assert Copier(bucket, stacked(stack)).copies == 2
    assert torch.equal(read(bucket, packed(bucket, stacked(stack)), 1), stack[1])


def test_parameters_are_written_in_place_without_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    (bucket,) = buckets([TensorSlice.whole("w", "float32", (4, 6))], 1 << 10)
    Copier(bucket, lambda part: weight).unpack(packed(bucket, lambda part: torch.ones(4, 6)))
    assert weight.grad_fn is None
    assert (weight == 1).all()


def test_a_copier_sees_what_the_tensors_hold_at_each_sync() -> None:
    values = torch.zeros(3)
    (bucket,) = buckets([TensorSlice.whole("w", "float32", (3,))], 1 << 10)
    copier, buffer = Copier(bucket, lambda part: values), torch.empty(12, dtype=torch.uint8)
    for number in (1.0, 2.0):
        values.fill_(number)
        copier.pack(buffer)
        assert buffer.view(torch.float32).tolist() == [number] * 3


def test_a_buffer_that_is_longer_keeps_its_end() -> None:
    (bucket,) = buckets([TensorSlice.whole("w", "uint8", (3,))], 1 << 10)
    buffer = torch.full((7,), 9, dtype=torch.uint8)
    Copier(bucket, lambda part: torch.zeros(3, dtype=torch.uint8)).pack(buffer)
    assert buffer.tolist() == [0, 0, 0, 9, 9, 9, 9]


@pytest.mark.parametrize("buffer", [torch.empty(11, dtype=torch.uint8), torch.empty(12), torch.empty(3, 4).byte()])
def test_a_buffer_that_is_short_or_no_bytes_is_an_error(buffer: Tensor) -> None:
    (bucket,) = buckets([TensorSlice.whole("w", "float32", (3,))], 1 << 10)
    copier = Copier(bucket, lambda part: torch.zeros(3))
    with pytest.raises(ValueError, match="bucket of 12 bytes needs a flat uint8 buffer"):
        copier.pack(buffer)
    with pytest.raises(ValueError, match="bucket of 12 bytes needs a flat uint8 buffer"):
        copier.unpack(buffer)


def test_a_view_of_another_shape_is_an_error_that_names_the_part() -> None:
    (bucket,) = buckets([TensorSlice("w", "float32", (4, 6), (1, 0), (3, 6))], 1 << 10)
    with pytest.raises(ValueError, match=r"view of \(1, 0\):\(3, 6\) of w has shape \(6, 2\), the part has \(2, 6\)"):
        Copier(bucket, lambda part: torch.zeros(6, 2))


@pytest.mark.parametrize("n", [0, 1, 2, 64, 65, 127, 1000])
def test_a_sample_is_even_and_has_first_and_last(n: int) -> None:
    parts = experts(n)
    chosen = [parts.index(part) for part in sample(parts, 64)]
    assert len(chosen) == min(n, 64)
    assert chosen[:1] == list(range(n))[:1]
    assert chosen[-1:] == list(range(n))[-1:]
    steps = {b - a for a, b in pairwise(chosen)}
    assert not steps or max(steps) - min(steps) <= 1
    assert 0 not in steps


def test_of_a_large_part_only_the_beginning_is_sampled() -> None:
    large = TensorSlice("w", "bfloat16", (3, 1000, 1000), (1, 10, 0), (3, 1000, 1000))
    (begin,) = sample([large], 64)
    assert (begin.start, begin.stop) == ((1, 10, 0), (2, 26, 1000))  # 16 rows of 1000 are 2^14 elements and fewer


def test_a_sample_of_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="most must be 2 or more, not 1"):
        sample(experts(3), 1)


@given(st.data())
def test_a_checksum_is_that_of_the_bytes_on_the_wire(data: st.DataObject) -> None:
    parts = data.draw(boxes())
    tensors = data.draw(sides(parts))
    for part in parts:
        (bucket,) = buckets([part], 1 << 20)
        expected = zlib.crc32(bytes(packed(bucket, view_in(tensors)).tolist()))
        assert checksum(view_in(tensors)(part), part.dtype) == expected


def test_the_checksum_of_a_large_part_is_taken_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(17, 5)
    whole = checksum(values, "bfloat16")
    for elements in (1, 7, 11, 84):
        monkeypatch.setattr("beamline.transfer.buckets._CHECKSUM_ELEMENTS", elements)
        assert checksum(values, "bfloat16") == whole


def test_one_element_changes_the_checksum() -> None:
    values = torch.zeros(1000)
    before = checksum(values, "bfloat16")
    values[731] = 1e-3
    assert checksum(values, "bfloat16") != before
