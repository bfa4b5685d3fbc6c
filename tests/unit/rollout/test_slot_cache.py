"""The cache's layout, through the kernels that fill it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.kernels.attention import BLOCK, store, whole_blocks
from beamline.rollout.local.cache import SlotCache

SLOTS, KV_HEADS, SIZE = 3, 2, 3
RING, FULL = 0, 1  # layers, of one block and of three
PLACES, POSITIONS = BLOCK, 3 * BLOCK


def cache(slots: int = SLOTS) -> SlotCache:
    return SlotCache(slots, [PLACES - 5, POSITIONS], KV_HEADS, SIZE)


def unrung() -> SlotCache:
    return SlotCache(1, [POSITIONS, POSITIONS], KV_HEADS, SIZE)


def marks(layer: int, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Keys ``[rows, KV * d]`` that say which layer, position, head and dimension they are of."""
    of_row = np.arange(KV_HEADS * SIZE) / 100
    return (1000 * (layer + 1) + positions[:, None] + of_row).astype(np.float32)


def write(target: SlotCache, slot: int, length: int) -> None:
    """Keys of a whole sequence to both layers, with minus the keys as values."""
    positions = np.arange(length)
    for layer in (RING, FULL):
        keys = marks(layer, positions)
        store(
            target.keys, target.values, target.at[layer], target.places[layer], keys, -keys, 0,
            np.full(length, slot), positions, KV_HEADS, SIZE, False,
        )  # fmt: skip


def read(target: SlotCache, layer: int, slot: int, slots: int = SLOTS) -> NDArray[np.float32]:
    """Keys of a slot by place, ``[places, KV * d]``; values must be minus them."""
    places = target.places[layer]
    where = slice(target.at[layer], target.at[layer] + slots * KV_HEADS * places * SIZE)
    keys = target.keys[where].reshape(slots, KV_HEADS, places // BLOCK, SIZE, BLOCK)[slot]
    values = target.values[where].reshape(slots, KV_HEADS, places, SIZE)[slot]
    by_place: NDArray[np.float32] = keys.transpose(1, 3, 0, 2).reshape(places, -1)
    assert np.array_equal(values.transpose(1, 0, 2).reshape(places, -1), -by_place)
    return by_place


@pytest.mark.parametrize(("asked", "places"), [(1, 16), (15, 16), (16, 16), (17, 32), (96, 96)])
def test_places_come_in_whole_blocks(asked: int, places: int) -> None:
    assert whole_blocks(asked) == places


def test_layers_lie_one_after_the_other() -> None:
    target = cache()
    assert target.places.tolist() == [PLACES, POSITIONS]
    assert target.at.tolist() == [0, SLOTS * KV_HEADS * PLACES * SIZE]
    assert len(target.keys) == len(target.values) == SLOTS * KV_HEADS * (PLACES + POSITIONS) * SIZE


@pytest.mark.parametrize("length", [1, 5, PLACES - 1, PLACES, PLACES + 1, 2 * PLACES + 7, POSITIONS])
def test_filling_gives_what_storing_would_have(length: int) -> None:
    """In a ring the newest positions at their remainders, in a full layer all of them."""
    source, filled, stored = unrung(), cache(), cache()
    write(source, 0, length)
    filled.fill(source, length, np.array([1]))
    write(stored, 1, length)
    assert np.array_equal(filled.keys, stored.keys)
    assert np.array_equal(filled.values, stored.values)
    newest = np.arange(max(0, length - PLACES), length)
    assert np.array_equal(read(filled, RING, 1)[newest % PLACES], marks(RING, newest))
    assert np.array_equal(read(filled, FULL, 1)[:length], marks(FULL, np.arange(length)))


def test_filling_several_slots_leaves_the_others() -> None:
    source, target = unrung(), cache()
    write(source, 0, 40)
    write(target, 1, 20)
    before = [read(target, layer, 1).copy() for layer in (RING, FULL)]
    target.fill(source, 40, np.array([2, 0]))
    for layer in (RING, FULL):
        assert np.array_equal(read(target, layer, 0), read(target, layer, 2))
        assert np.array_equal(read(target, layer, 1), before[layer])
        assert not np.array_equal(read(target, layer, 0), before[layer])


def test_filling_takes_no_more_than_the_length() -> None:
    """What an earlier, longer sequence left in the source stays there."""
    source, target = unrung(), cache()
    write(source, 0, POSITIONS)
    target.fill(source, 4, np.array([0]))
    for layer in (RING, FULL):
        assert np.array_equal(read(target, layer, 0)[:4], marks(layer, np.arange(4)))
        assert not read(target, layer, 0)[4:].any()
