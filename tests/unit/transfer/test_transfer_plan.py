from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from beamline.model.layout import Layout, TensorSlice
from beamline.transfer.plan import Move, TransferError, TransferPlan, plan

Arrays = dict[str, NDArray[np.int64]]
Ranks = list[list[TensorSlice]]


def whole(name: str, *shape: int) -> TensorSlice:
    return TensorSlice.whole(name, "float32", shape)


def rows(name: str, total: int, start: int, stop: int) -> TensorSlice:
    return TensorSlice(name, "float32", (total,), (start,), (stop,))


def layout(*ranks: list[TensorSlice]) -> Layout:
    return Layout(tuple(map(tuple, ranks)))


@st.composite
def cuts(draw: st.DrawFn, box: TensorSlice, most: int = 4) -> list[TensorSlice]:
    """A partition of a box into boxes, cut again and again at random places."""
    pieces = [box]
    for _ in range(draw(st.integers(0, most))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        wide = [d for d, n in enumerate(piece.size) if n > 1]
        if not wide:
            pieces.append(piece)
            continue
        d = draw(st.sampled_from(wide))
        at = draw(st.integers(piece.start[d] + 1, piece.stop[d] - 1))
        middle = (*piece.stop[:d], at, *piece.stop[d + 1 :]), (*piece.start[:d], at, *piece.start[d + 1 :])
        pieces.append(TensorSlice(piece.name, piece.dtype, piece.shape, piece.start, middle[0]))
        pieces.append(TensorSlice(piece.name, piece.dtype, piece.shape, middle[1], piece.stop))
    return pieces


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """A source that holds every element somewhere, and a destination that wants any of them, each with replicas."""
    shapes = draw(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=3))
    tensors = [whole(f"tensor {i}", *shape) for i, shape in enumerate(shapes)]
    source: Ranks = [[] for _ in range(draw(st.integers(1, 4)))]
    destination: Ranks = [[] for _ in range(draw(st.integers(1, 4)))]
    for tensor in tensors:
        for _ in range(draw(st.integers(1, 2))):  # partitions that lie across each other
            for piece in draw(cuts(tensor)):
                holders = draw(st.sets(st.integers(0, len(source) - 1), min_size=1))
                for rank in holders:
                    source[rank].append(piece)
        for wanted in destination:
            wanted.extend(piece for piece in draw(cuts(tensor)) if draw(st.integers(0, 3)))
    return layout(*source), layout(*destination)


def tensors_of(*sides: Layout) -> Arrays:
    """Arrays in which every element is another number."""
    shapes = {piece.name: piece.shape for side in sides for rank in side.ranks for piece in rank}
    arrays, next_number = {}, 1
    for name, shape in shapes.items():
        arrays[name] = np.arange(next_number, next_number + prod(shape)).reshape(shape)
        next_number += prod(shape)
    return arrays


def index(part: TensorSlice) -> tuple[slice, ...]:
    return part.within(whole(part.name, *part.shape))


def contains(outer: TensorSlice, part: TensorSlice) -> bool:
    return outer.name == part.name and outer.intersect(part) == part


def carry_out(moves: TransferPlan, source: Layout, destination: Layout, arrays: Arrays) -> list[list[Arrays]]:
    """For each destination rank and slice, its buffer and how often each of its elements was written.

    Ranks hold their own slices alone, as they would on a cluster: a move must fit into one buffer on each side.
    """
    held = [[(piece, arrays[piece.name][index(piece)]) for piece in rank] for rank in source.ranks]
    made = [
        [{"value": np.zeros(piece.size, np.int64), "written": np.zeros(piece.size, np.int64)} for piece in rank]
        for rank in destination.ranks
    ]
    for move in moves.moves:
        piece, buffer = next(pair for pair in held[move.source] if contains(pair[0], move.part))
        sent = buffer[move.part.within(piece)]
        (target,) = (i for i, wanted in enumerate(destination.ranks[move.destination]) if contains(wanted, move.part))
        box = move.part.within(destination.ranks[move.destination][target])
        made[move.destination][target]["value"][box] = sent
        made[move.destination][target]["written"][box] += 1
    return made


@given(layouts())
def test_the_moves_reproduce_every_wanted_slice_and_write_each_element_once(pair: tuple[Layout, Layout]) -> None:
    source, destination = pair
    arrays = tensors_of(source, destination)
    made = carry_out(plan(source, destination), source, destination, arrays)
    for rank, buffers in zip(destination.ranks, made, strict=True):
        for wanted, buffer in zip(rank, buffers, strict=True):
            assert np.array_equal(buffer["value"], arrays[wanted.name][index(wanted)])
            assert (buffer["written"] == 1).all()


@given(layouts())
def test_moves_come_in_the_order_of_the_destination(pair: tuple[Layout, Layout]) -> None:
    destination = pair[1]
    places = []
    for move in plan(*pair).moves:
        wanted = destination.ranks[move.destination]
        places.append((move.destination, next(i for i, w in enumerate(wanted) if contains(w, move.part))))
    assert places == sorted(places)


def test_blocks_cut_along_both_dimensions_overlap_nowhere() -> None:
    def blocks(row: int, column: int) -> Layout:
        corners = [(a, b) for a in ((0, row), (row, 6)) for b in ((0, column), (column, 5))]
        return layout(*([TensorSlice("w", "float32", (6, 5), (a, c), (b, d))] for (a, b), (c, d) in corners))

    for source, destination in ((blocks(2, 1), blocks(4, 3)), (blocks(3, 2), layout([whole("w", 6, 5)]))):
        arrays = tensors_of(source)
        made = carry_out(plan(source, destination), source, destination, arrays)
        assert all((buffer["written"] == 1).all() for buffers in made for buffer in buffers)


def test_equal_layouts_move_every_slice_whole() -> None:
    side = layout([rows("w", 6, 0, 3)], [rows("w", 6, 3, 6)])
    assert plan(side, side).moves == (Move(0, 0, rows("w", 6, 0, 3)), Move(1, 1, rows("w", 6, 3, 6)))


def test_the_largest_piece_is_taken_first() -> None:
    source = layout([rows("w", 8, 0, 3)], [rows("w", 8, 1, 8)], [rows("w", 8, 0, 8)])
    assert plan(source, layout([whole("w", 8)])).moves == (Move(2, 0, whole("w", 8)),)


def test_replicas_share_the_sending() -> None:
    names = [f"w{i}" for i in range(12)]
    replica = [whole(name, 4) for name in names]
    moves = plan(layout(replica, replica, replica), layout(replica)).moves
    assert [sum(move.source == rank for move in moves) for rank in range(3)] == [4, 4, 4]


def test_the_load_counts_elements_over_all_destinations() -> None:
    replica = [whole("large", 10), *(whole(f"small {i}", 1) for i in range(10))]
    moves = plan(layout(replica, replica), layout(replica[:6], replica[6:])).moves
    assert [move.source for move in moves] == [0] + [1] * 10


def test_no_destination_means_no_moves() -> None:
    assert plan(layout([whole("w", 2)]), layout([])).moves == ()


def test_parts_carry_the_senders_type() -> None:
    source = layout([TensorSlice.whole("w", "bfloat16", (2,))])
    assert plan(source, layout([whole("w", 2)])).moves[0].part.dtype == "bfloat16"


def test_a_tensor_that_no_rank_holds_is_an_error() -> None:
    with pytest.raises(TransferError, match=r"no source rank holds \(0,\):\(2,\) of v \(2,\)"):
        plan(layout([whole("w", 2)]), layout([whole("v", 2)]))


def test_a_missing_part_is_an_error_that_names_it() -> None:
    source = layout([rows("w", 8, 0, 3)], [rows("w", 8, 5, 8)])
    with pytest.raises(TransferError, match=r"no source rank holds \(3,\):\(5,\) of w \(8,\)"):
        plan(source, layout([whole("w", 8)]))


def test_another_shape_of_the_same_tensor_is_an_error_with_both() -> None:
    with pytest.raises(TransferError, match=r"w has shape \(2, 3\) at the source and \(3, 2\) at the destination"):
        plan(layout([whole("w", 2, 3)]), layout([whole("w", 3, 2)]))
