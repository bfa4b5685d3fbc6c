"""Who sends what to whom: every destination slice is covered by source slices, and nothing is gathered whole."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from beamline.errors import BeamlineError
from beamline.model.layout import DType, Layout, TensorSlice

Share = list[TensorSlice]
"""What one rank of the source gives to one rank of the destination, in order, in the types that go over the wire."""
Shares = list[list[Share]]
"""``shares[d][s]`` is what destination rank d is given by source rank s; empty where that is nothing."""


class TransferError(BeamlineError, ValueError):
    """Two layouts that do not fit together, or a transfer that was not carried out as planned."""


@dataclass(frozen=True, slots=True)
class Move:
    """The box ``part`` goes from a rank of the source to a rank of the destination."""

    source: int
    destination: int
    part: TensorSlice


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All moves, ordered by destination rank and by that rank's own order of slices."""

    moves: tuple[Move, ...]


def plan(source: Layout, destination: Layout) -> TransferPlan:
    """Pair two layouts. Of several ranks that hold a piece, the one with the least to send so far sends it.

    Data types may differ: the receiver casts.

    Raises:
        TransferError: the source lacks a tensor or a part of it, or the two disagree on a tensor's shape.
    """
    holders: dict[str, list[tuple[int, TensorSlice]]] = defaultdict(list)
    for rank, slices in enumerate(source.ranks):
        for piece in slices:
            holders[piece.name].append((rank, piece))
    sent: dict[int, int] = defaultdict(int)
    moves: list[Move] = []
    for rank, slices in enumerate(destination.ranks):
        for wanted in slices:
            moves.extend(_cover(wanted, rank, holders[wanted.name], sent))
    return TransferPlan(tuple(moves))


def shares_of(plan: TransferPlan, sources: int, destinations: int, types: Mapping[str, DType]) -> Shares:
    """What each pair of ranks has to do with each other, in the order of the plan; ``types`` are the destination's."""
    shares: Shares = [[[] for _ in range(sources)] for _ in range(destinations)]
    for move in plan.moves:
        shares[move.destination][move.source].append(replace(move.part, dtype=types[move.part.name]))
    return shares


def _cover(
    wanted: TensorSlice, destination: int, holders: list[tuple[int, TensorSlice]], sent: dict[int, int]
) -> list[Move]:
    moves: list[Move] = []
    open_boxes = [wanted]
    while open_boxes:
        box = open_boxes.pop()
        found = [(rank, part) for rank, piece in holders if (part := _shared(piece, box)) is not None]
        if not found:
            raise TransferError(f"no source rank holds {box.start}:{box.stop} of {box.name} {box.shape}")
        # The largest piece first keeps the number of moves small; then the least busy sender, then the lowest rank.
        source, part = min(found, key=lambda f: (-prod(f[1].size), sent[f[0]], f[0]))
        sent[source] += prod(part.size)
        moves.append(Move(source, destination, part))
        open_boxes.extend(box.without(part))
    return sorted(moves, key=lambda move: move.part.start)


def _shared(piece: TensorSlice, box: TensorSlice) -> TensorSlice | None:
    if piece.shape != box.shape:
        raise TransferError(f"{box.name} has shape {piece.shape} at the source and {box.shape} at the destination")
    return piece.intersect(box)
