"""Attention over a cache against a softmax in double precision, in rings and without them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamline.kernels.attention import BLOCK, attend, store
from tests.exact import Floats, bits

KV_HEADS, SIZE, LENGTH = 2, 6, 75
OTHER_COLUMNS = 5  # of qkvg, before the values and behind them
WINDOWS = (1, 7, 15, 16, 17, 32, 100)  # around a block, two of them, and longer than the sequences
NOTHING = (0.0, np.nan, 1e38)  # what unused places may hold


def whole_blocks(places: int) -> int:
    return -(-places // BLOCK) * BLOCK


@dataclass(frozen=True)
class Sequence:
    """Queries, keys and values of each position."""

    q: Floats  # [S, KV * group * d]
    k: Floats  # [S, KV * d]
    v: Floats


def sequence(seed: int, group: int) -> Sequence:
    rng = np.random.default_rng(seed)
    width = KV_HEADS * SIZE
    q, k, v = (rng.normal(0, 2, (LENGTH, n)).astype(np.float32) for n in (group * width, width, width))
    return Sequence(q, k, v)


class Layer:
    """The cache of one layer among others: so many places in each slot, and at first nothing of use."""

    def __init__(self, places: int, slots: int = 1, nothing: float = 0.0, in_8_bits: bool = False) -> None:
        self.at, self.places, self.in_8_bits = 7 * BLOCK, whole_blocks(places), in_8_bits
        held = self.at + slots * KV_HEADS * self.places * SIZE
        self.keys, self.values = (np.full(held + 3 * BLOCK, nothing, np.float32) for _ in range(2))

    def store(self, k: Floats, v: Floats, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        around = np.full((len(v), OTHER_COLUMNS), np.nan, np.float32)
        qkvg = np.concatenate([around, v, around], axis=1)
        store(
            self.keys, self.values, self.at, self.places, k, qkvg, OTHER_COLUMNS, slots, positions, KV_HEADS, SIZE,
            self.in_8_bits,
        )  # fmt: skip

    def attend(
        self, q: Floats, window: int, slots: NDArray[np.int64], positions: NDArray[np.int64], bf16: bool = False
    ) -> Floats:
        group = q.shape[1] // (KV_HEADS * SIZE)
        out, scores = np.full_like(q, np.nan), np.full(2 * group * self.places, np.nan, np.float32)
        attend(
            q, self.keys, self.values, self.at, self.places, window, slots, positions, KV_HEADS, group, SIZE,
            scores, out, bf16,
        )  # fmt: skip
        return out


def step_by_step(layer: Layer, of: Sequence, window: int, slot: int = 0) -> Floats:
    """What each position attends to, as decoding goes: store it, then ask."""
    out = np.empty_like(of.q)
    for p in range(LENGTH):
        row, slots, positions = slice(p, p + 1), np.array([slot]), np.array([p])
        layer.store(of.k[row], of.v[row], slots, positions)
        out[row] = layer.attend(of.q[row], window, slots, positions)
    return out


def written(of: Sequence, window: int) -> NDArray[np.float64]:
    q = of.q.astype(np.float64).reshape(LENGTH, KV_HEADS, -1, SIZE)
    k, v = (x.astype(np.float64).reshape(LENGTH, KV_HEADS, SIZE) for x in (of.k, of.v))
    out = np.empty_like(q)
    for p, head in np.ndindex(LENGTH, KV_HEADS):
        seen = slice(max(0, p - window + 1), p + 1)
        scores = q[p, head] @ k[seen, head].T / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[p, head] = weights @ v[seen, head] / weights.sum(-1, keepdims=True)
    return out.reshape(LENGTH, -1)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_each_position_attends_as_the_formula_says(window: int, group: int) -> None:
    """Scores reach 25, so that their roundings of 6e-8 weigh 25 times as much; values reach 7."""
    of = sequence(window, group)
    out = step_by_step(Layer(min(window, LENGTH)), of, window)
    np.testing.assert_allclose(out, written(of, window), rtol=0, atol=5e-6)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_ring_gives_the_same_bits_as_a_place_for_each_position(window: int, group: int) -> None:
    of = sequence(window, group)
    ring, full = Layer(min(window, LENGTH)), Layer(LENGTH)
    assert np.array_equal(bits(step_by_step(ring, of, window)), bits(step_by_step(full, of, window)))


@pytest.mark.parametrize("window", WINDOWS)
def test_more_places_than_the_window_change_nothing(window: int) -> None:
    of = sequence(window, 2)
    one, other = (step_by_step(Layer(min(window, LENGTH) + more), of, window) for more in (0, 2 * BLOCK))
    assert np.array_equal(bits(one), bits(other))


@pytest.mark.parametrize("window", WINDOWS)
def test_all_positions_at_once_give_the_same_bits_as_one_after_the_other(window: int) -> None:
    """A position does not see those behind it, though they are in the cache."""
    of, layer = sequence(window, 2), Layer(LENGTH)
    slots, positions = np.zeros(LENGTH, np.int64), np.arange(LENGTH)
    layer.store(of.k, of.v, slots, positions)
    at_once = layer.attend(of.q, window, slots, positions)
    assert np.array_equal(bits(at_once), bits(step_by_step(Layer(LENGTH), of, window)))


@pytest.mark.parametrize("window", [1, 17, 100])
def test_what_lies_in_unused_places_does_not_matter(window: int) -> None:
    """Its scores are computed, and never used."""
    of = sequence(window, 2)
    zeros, *others = (step_by_step(Layer(min(window, LENGTH), nothing=x), of, window) for x in NOTHING)
    for other in others:
        assert np.array_equal(bits(other), bits(zeros))


@pytest.mark.parametrize("window", [7, 16, 17])
def test_slots_at_different_positions_are_apart(window: int) -> None:
    """Sequences are decoded together, each some positions behind the one before, and two have ended."""
    slots = np.array([3, 0, 4])  # of 6
    sequences, lags = [sequence(seed, 2) for seed in range(3)], [0, 11, 30]
    layer, out = Layer(window, slots=6, nothing=np.nan), [np.empty_like(of.q) for of in sequences]
    for step in range(LENGTH + max(lags)):
        going = [i for i in range(3) if 0 <= step - lags[i] < LENGTH]
        positions = np.array([step - lags[i] for i in going])
        q, k, v = (
            np.stack([getattr(sequences[i], part)[p] for i, p in zip(going, positions, strict=True)]) for part in "qkv"
        )
        layer.store(k, v, slots[going], positions)
        for i, p, row in zip(going, positions, layer.attend(q, window, slots[going], positions), strict=True):
            out[i][p] = row
    for of, together in zip(sequences, out, strict=True):
        assert np.array_equal(bits(together), bits(step_by_step(Layer(window), of, window)))


def test_storing_writes_the_places_of_a_position_and_nothing_else() -> None:
    of, layer = sequence(0, 1), Layer(17, slots=3)
    layer.store(of.k[:1], of.v[:1], np.array([1]), np.array([2 * layer.places + 20]))
    where = slice(layer.at, layer.at + 3 * KV_HEADS * layer.places * SIZE)
    keys = layer.keys[where].reshape(3, KV_HEADS, layer.places // BLOCK, SIZE, BLOCK)
    values = layer.values[where].reshape(3, KV_HEADS, layer.places, SIZE)
    assert np.array_equal(keys[1, :, 1, :, 4], of.k[0].reshape(KV_HEADS, SIZE))
    assert np.array_equal(values[1, :, 20], of.v[0].reshape(KV_HEADS, SIZE))
    for held in (layer.keys, layer.values):
        assert np.count_nonzero(held) == KV_HEADS * SIZE


def test_the_result_is_rounded_once_to_bfloat16() -> None:
    of, layer = sequence(1, 2), Layer(LENGTH)
    slots, positions = np.zeros(LENGTH, np.int64), np.arange(LENGTH)
    layer.store(of.k, of.v, slots, positions)
    exact, rounded = (layer.attend(of.q, LENGTH, slots, positions, bf16) for bf16 in (False, True))
    assert np.array_equal(rounded, torch.from_numpy(exact).bfloat16().float().numpy())


# A cache in 8 bits


def in_8_bits(of: Sequence) -> Sequence:
    """Keys and values as torch rounds them to 8 bits; beyond 448 its versions differ."""
    k, v = (torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy() for x in (of.k, of.v))
    return Sequence(of.q, k, v)


def test_keys_and_values_in_8_bits_are_stored_as_torch_rounds_them() -> None:
    """Tiny ones, which become 0 or a number without normal form, and some that are too large, among them."""
    rng = np.random.default_rng(0)
    factors = 2.0 ** rng.integers(-12, 9, (2, LENGTH, KV_HEADS * SIZE))
    k, v = (rng.normal(0, 2, factors.shape) * factors).astype(np.float32)
    of, layer = Sequence(k, k, v), Layer(LENGTH, in_8_bits=True)
    assert max(np.abs(k).max(), np.abs(v).max()) > 448
    layer.store(of.k, of.v, np.zeros(LENGTH, np.int64), np.arange(LENGTH))
    where, blocks = slice(layer.at, layer.at + KV_HEADS * layer.places * SIZE), layer.places // BLOCK
    keys = layer.keys[where].reshape(KV_HEADS, blocks, SIZE, BLOCK).transpose(1, 3, 0, 2)
    values = layer.values[where].reshape(KV_HEADS, layer.places, SIZE).transpose(1, 0, 2)
    rounded = in_8_bits(of)
    for held, expected in ((keys, rounded.k), (values, rounded.v)):
        assert np.array_equal(bits(held.reshape(-1, KV_HEADS * SIZE)[:LENGTH]), bits(expected))


@pytest.mark.parametrize("window", WINDOWS)
def test_attention_over_8_bits_is_that_over_rounded_keys_and_values(window: int) -> None:
    """Queries and results are not rounded."""
    of = sequence(window, 2)
    out = step_by_step(Layer(min(window, LENGTH), in_8_bits=True), of, window)
    rounded = in_8_bits(of)
    assert np.array_equal(bits(out), bits(step_by_step(Layer(min(window, LENGTH)), rounded, window)))
    np.testing.assert_allclose(out, written(rounded, window), rtol=0, atol=5e-6)
    assert np.abs(out - written(of, window)).max() > 0.1
