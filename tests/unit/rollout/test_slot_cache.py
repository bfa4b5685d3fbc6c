import torch
from torch import Tensor

from beamline.rollout.local.cache import SlotCache

SLOTS, WINDOW, POSITIONS = 3, 4, 10
RING, FULL = 0, 1


def cache() -> SlotCache:
    return SlotCache(SLOTS, [WINDOW, POSITIONS], kv_heads=2, head_dim=3, dtype=torch.float32)


def marked(slots: list[int], positions: list[int]) -> Tensor:
    """Keys ``[N, KV, d]`` that say which slot and position they are of."""
    marks = torch.tensor([100.0 * slot + position for slot, position in zip(slots, positions, strict=True)])
    return marks[:, None, None].expand(-1, 2, 3)


def write(target: SlotCache, layer: int, slots: list[int], positions: list[int]) -> None:
    key = marked(slots, positions)
    target.write(layer, torch.tensor(slots), torch.tensor(positions), key, -key)


def test_a_full_layer_has_a_place_for_every_position() -> None:
    full = cache()
    write(full, FULL, [1] * 6, list(range(6)))
    keys, values = full.read(FULL, 2, 6)
    assert keys.shape == (2, 2, 6, 3)
    assert torch.equal(keys[1, 0, :, 0], torch.arange(100.0, 106.0))
    assert torch.equal(values, -keys)
    assert not keys[0].any()


def test_a_ring_holds_the_newest_positions_at_their_remainders() -> None:
    ring = cache()
    for position in range(7):
        write(ring, RING, [0, 2], [position, position])
    keys, values = ring.read(RING, 3, 7)
    assert keys[0, 1, :, 2].tolist() == [4, 5, 6, 3]
    assert keys[2, 1, :, 2].tolist() == [204, 205, 206, 203]
    assert torch.equal(values, -keys)


def test_no_more_places_are_read_than_positions_can_fill() -> None:
    target = cache()
    read = [[target.read(layer, 1, n)[0].shape[2] for layer in (RING, FULL)] for n in (1, 4, 5, 10)]
    assert read == [[1, 1], [4, 4], [4, 5], [4, 10]]
    assert [target.places(RING), target.places(FULL)] == [WINDOW, POSITIONS]


def test_slots_at_different_positions_are_written_together() -> None:
    target = cache()
    write(target, RING, [0, 1, 2], [5, 0, 3])
    keys, _ = target.read(RING, 3, 6)
    assert keys[0, 0, :, 0].tolist() == [0, 5, 0, 0]
    assert keys[1, 0, :, 0].tolist() == [100, 0, 0, 0]
    assert keys[2, 0, :, 0].tolist() == [0, 0, 0, 203]


def test_a_move_copies_all_layers_and_leaves_the_rest() -> None:
    target = cache()
    for layer in (RING, FULL):
        write(target, layer, [0, 1, 2], [1, 1, 1])
    target.move(2, 0)
    for layer in (RING, FULL):
        keys, values = target.read(layer, 3, 2)
        assert keys[:, 0, 1, 0].tolist() == [201, 101, 201]
        assert values[:, 0, 1, 0].tolist() == [-201, -101, -201]
