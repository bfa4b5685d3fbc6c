"""What a source gives: parts by pair of ranks, buckets of several ranks at a time, memory, checksums."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from beamline.model.layout import DType, Layout, TensorSlice
from beamline.transfer import memory, source
from beamline.transfer.buckets import Copier, buckets, checksum, samples
from beamline.transfer.memory import attach
from beamline.transfer.plan import Move, Shares, TransferPlan, plan, shares_of
from beamline.transfer.source import Packer, Supply, Tensors, copy_through_buckets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 9), "expert": (4, 3, 5), "bias": (7,), "scalar": ()}
TYPES: dict[str, DType] = {"matrix": "bfloat16", "expert": "float32", "bias": "float32", "scalar": "float32"}
BUCKET_BYTES = 64
CPU = torch.device("cpu")


def whole(name: str, seed: int = 0) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed + len(name)))


def rows(name: str, begin: int, end: int) -> TensorSlice:
    shape = SHAPES[name]
    return TensorSlice(name, "float32", shape, (begin, *(0 for _ in shape[1:])), (end, *shape[1:]))


def all_of(name: str) -> TensorSlice:
    return TensorSlice.whole(name, "float32", SHAPES[name])


SOURCE = Layout(
    (
        (rows("matrix", 0, 4), all_of("bias"), rows("expert", 0, 1)),
        (rows("expert", 1, 4), rows("matrix", 4, 6), all_of("bias")),
        (all_of("scalar"),),
    )
)
DESTINATION = Layout(
    (
        (rows("expert", 0, 4), all_of("scalar"), rows("matrix", 0, 5)),
        (rows("matrix", 5, 6), all_of("bias")),
    )
)
PLAN = plan(SOURCE, DESTINATION)
SHARES = shares_of(PLAN, len(SOURCE.ranks), len(DESTINATION.ranks), TYPES)


class Ranks:
    """A source of several ranks, all in this process."""

    size = len(SOURCE.ranks)

    def __init__(self) -> None:
        self.tensors = {name: whole(name) for name in SHAPES}
        self.packers: list[Packer] = []

    def not_finite(self, plan: TransferPlan) -> str | None:
        return None

    def supply(self, shares: Shares, bucket_bytes: int) -> Supply:
        self.packers = [Packer(shares, rank, self._view, CPU, bucket_bytes) for rank in range(self.size)]
        rounds = max(packer.rounds for packer in self.packers)
        return Supply(rounds, self._on_ranks, lambda: self._on_ranks("close"))

    def copy(self, plan: TransferPlan, tensors: Any) -> None:
        copy_through_buckets(self, plan, tensors)

    def _view(self, part: TensorSlice) -> Tensor:
        return self.tensors[part.name][part.index]

    def _on_ranks(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(packer, method)(*arguments) for packer in self.packers]


def test_shares_are_what_the_plan_says_by_pair_in_its_order_and_in_the_destinations_types() -> None:
    for d, rank in enumerate(SHARES):
        for s, share in enumerate(rank):
            expected = [move.part for move in PLAN.moves if (move.source, move.destination) == (s, d)]
            assert [(p.name, p.start, p.stop) for p in share] == [(p.name, p.start, p.stop) for p in expected]
            assert all(part.dtype == TYPES[part.name] for part in share)


def test_every_source_that_gives_anything_is_sampled_and_some_64_parts_in_all() -> None:
    many = [TensorSlice.whole(f"part {i}", "float32", (2,)) for i in range(300)]
    found = samples([many, [], many[:1], many])
    assert [len(each) for each in found] == [21, 0, 1, 21]
    assert (found[0][0], found[0][-1]) == (many[0], many[-1])
    assert [len(each) for each in samples([many])] == [64]
    assert [len(each) for each in samples([many] * 100)] == [2] * 100


def arrived(supply: Supply, shares: Shares) -> list[dict[str, Tensor]]:
    """What each destination rank makes of the buckets, which it cuts as the other side does."""
    held = [{name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()} for _ in shares]
    cut = [[buckets(share, BUCKET_BYTES) for share in rank] for rank in shares]
    for number in range(supply.rounds):
        for tensors, of_rank, descriptors in zip(held, cut, supply.pack(number), strict=True):
            for each, descriptor in zip(of_rank, descriptors, strict=True):
                assert bool(descriptor) == (number < len(each))
                if descriptor:
                    shared = attach(descriptor)
                    Copier(each[number], lambda part, t=tensors: t[part.name][part.index]).unpack(shared.buffer)  # type: ignore[misc]
                    shared.close()
    return held


def expected_in(tensors: dict[str, Tensor], layout: Layout) -> list[dict[str, Tensor]]:
    """Whole tensors with what each rank of a layout holds; the rest is no number."""
    found = []
    for slices in layout.ranks:
        held = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
        for part in slices:
            values = tensors[part.name][part.index]
            held[part.name][part.index] = values.bfloat16().float() if TYPES[part.name] == "bfloat16" else values
        found.append(held)
    return found


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_each_destination_rank_is_given_its_slices_by_whoever_has_them_again_and_again() -> None:
    ranks = Ranks()
    supply = ranks.supply(SHARES, BUCKET_BYTES)
    supply.take_memory([(), ()])
    for seed in range(2):
        for name, tensor in ranks.tensors.items():
            tensor.copy_(whole(name, 10 * seed))
        assert_same(arrived(supply, SHARES), expected_in(ranks.tensors, DESTINATION))
    before = supply.checksums()
    sampled = [[part for parts in samples(rank) for part in parts] for rank in SHARES]
    assert before == [[checksum(ranks.tensors[p.name][p.index], p.dtype) for p in rank] for rank in sampled]
    ranks.tensors["expert"][1] += 1
    assert [a == b for a, b in zip(before[0], supply.checksums()[0], strict=True)].count(False) == 1
    assert before[1] == supply.checksums()[1]
    supply.close()


def test_two_slots_are_taken_for_each_pair_that_exchanges_anything_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, tuple[str, ...]]] = []

    def counted(nbytes: int, device: torch.device, gpus: tuple[str, ...]) -> memory.SharedMemory:
        taken.append((device.type, gpus))
        return memory.host_memory(nbytes)

    monkeypatch.setattr(source, "memory_for", counted)
    ranks = Ranks()
    supply = ranks.supply(SHARES, BUCKET_BYTES)
    supply.take_memory([("GPU-0",), ("GPU-1",)])
    pairs = [gpus for gpus, rank in zip(("GPU-0", "GPU-1"), SHARES, strict=True) for share in rank if share]
    assert sorted(taken) == sorted([("cpu", (gpu,)) for gpu in pairs] * 2)
    (first,) = {d for descriptors in supply.pack(0)[:1] for d in descriptors[:1]}
    supply.take_memory([(), ()])
    with pytest.raises(ValueError, match="no longer has the shared memory"):
        attach(first)
    assert supply.pack(0)[0][0] != supply.pack(1)[0][0]
    supply.close()


def test_tensors_of_this_process_are_the_only_rank_of_their_source() -> None:
    tensors = {name: whole(name) for name in SHAPES}
    moves = plan(Layout((tuple(map(all_of, SHAPES)),)), DESTINATION)
    offered = Tensors(tensors)
    shares = shares_of(moves, offered.size, 2, TYPES)
    supply = offered.supply(shares, BUCKET_BYTES)
    supply.take_memory([(), ()])
    assert_same(arrived(supply, shares), expected_in(tensors, DESTINATION))
    supply.close()
    assert offered.not_finite(moves) is None
    tensors["scalar"].fill_(torch.inf)
    assert offered.not_finite(moves) == "scalar"
    assert offered.not_finite(TransferPlan((Move(0, 0, all_of("bias")),))) is None


@pytest.mark.parametrize("make", [Ranks, lambda: Tensors({name: whole(name) for name in SHAPES})])
def test_what_is_copied_is_cast_and_nothing_else_is_touched(make: Any) -> None:
    offered = make()
    side = Layout((tuple(map(all_of, SHAPES)),))
    moves = plan(SOURCE if offered.size > 1 else side, Layout(((rows("matrix", 2, 5), all_of("bias")),)))
    held = {"matrix": torch.zeros(6, 9, dtype=torch.bfloat16), "bias": torch.zeros(7), "scalar": torch.zeros(())}
    offered.copy(moves, held)
    assert torch.equal(held["matrix"][2:5], whole("matrix")[2:5].bfloat16())
    assert not held["matrix"][:2].any()
    assert not held["matrix"][5:].any()
    assert torch.equal(held["bias"], whole("bias"))
    assert held["scalar"] == 0
