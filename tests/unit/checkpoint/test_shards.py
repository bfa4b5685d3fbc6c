import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from beamline.checkpoint import CheckpointError, ShardReader, ShardWriter
from beamline.checkpoint.files import hash_file
from beamline.checkpoint.header import raw_dtype
from beamline.model.layout import DType, TensorSlice
from tests.faults import failing_operation

NORM = TensorSlice.whole("model.norm.weight", "float32", (3,))
HEAD = TensorSlice.whole("lm_head.weight", "bfloat16", (4, 6))
TOP = replace(HEAD, stop=(2, 6))
BOTTOM = replace(HEAD, start=(2, 0))
MOMENT = TensorSlice.whole("model.norm.weight/exp_avg", "float32", (3,))

norm = np.array([1.5, -2.0, np.nan], dtype=np.float32)
head = np.arange(24, dtype=np.uint16).reshape(4, 6)


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    ShardWriter(tmp_path, 0).write("policy", [NORM, TOP], [norm, head[:2]])
    ShardWriter(tmp_path, 1).write("policy", [BOTTOM], [memoryview(head[2:].tobytes())])
    return tmp_path


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


def test_a_tensor_comes_back_bit_for_bit(two_ranks: Path) -> None:
    result = ShardReader(two_ranks).read("policy", NORM)
    assert result.dtype == np.uint32
    assert bits(result) == bits(norm)


def test_a_tensor_that_ranks_share_comes_back_whole(two_ranks: Path) -> None:
    np.testing.assert_array_equal(ShardReader(two_ranks).read("policy", HEAD), head)


def test_a_box_across_the_border_of_two_ranks(two_ranks: Path) -> None:
    box = replace(HEAD, start=(1, 2), stop=(3, 5))
    np.testing.assert_array_equal(ShardReader(two_ranks).read("policy", box), head[1:3, 2:5])


def test_slices_lists_what_every_rank_holds(two_ranks: Path) -> None:
    assert ShardReader(two_ranks).slices("policy") == [NORM, TOP, BOTTOM]


def test_groups_are_apart_and_names_may_be_any_string(tmp_path: Path) -> None:
    odd = TensorSlice.whole('a[0:1] "ü"/', "uint8", (2,))
    writer = ShardWriter(tmp_path, 0)
    writer.write("policy", [NORM], [norm])
    writer.write("optimizer", [odd, MOMENT], [np.array([1, 2], np.uint8), 2 * norm])
    assert bits(ShardReader(tmp_path).read("optimizer", MOMENT)) == bits(2 * norm)
    assert ShardReader(tmp_path).read("optimizer", odd).tolist() == [1, 2]
    assert ShardReader(tmp_path).slices("policy") == [NORM]


def test_a_scalar_comes_back_with_no_dimension(tmp_path: Path) -> None:
    scalar = TensorSlice.whole("step", "float32", ())
    ShardWriter(tmp_path, 0).write("optimizer", [scalar], [np.array(2.5, np.float32)])
    result = ShardReader(tmp_path).read("optimizer", scalar)
    assert result.shape == ()
    assert result.view(np.float32) == 2.5


def test_a_rank_that_holds_nothing_writes_an_empty_shard(tmp_path: Path) -> None:
    ShardWriter(tmp_path, 0).write("optimizer", [], [])
    assert ShardReader(tmp_path).slices("optimizer") == []


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 3)
    writer.write("policy", [NORM], [norm])
    writer.write_state("learner", {"updates": 7})
    assert list(writer.digests) == ["policy/rank_00003.safetensors", "learner.json"]
    assert writer.digests == {name: hash_file(tmp_path / name) for name in writer.digests}


def test_state_comes_back(tmp_path: Path) -> None:
    ShardWriter(tmp_path, 0).write_state("learner", {"updates": 7})
    assert ShardReader(tmp_path).read_state("learner") == {"updates": 7}


@pytest.mark.parametrize("name", ["manifest", "run_state", "../learner", ""])
def test_state_cannot_take_a_name_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain word"):
        ShardWriter(tmp_path, 0).write_state(name, {})


# resharding

Box = tuple[tuple[int, int], ...]


@st.composite
def partitions(draw: st.DrawFn, box: Box, cuts: int) -> list[Box]:
    """Disjoint boxes that cover a box, by cutting one of them in two again and again."""
    boxes = [box]
    for _ in range(draw(st.integers(0, cuts))):
        at = draw(st.integers(0, len(boxes) - 1))
        d = draw(st.integers(0, len(box) - 1))
        start, stop = boxes[at][d]
        if stop - start > 1:
            cut = draw(st.integers(start + 1, stop - 1))
            whole = boxes.pop(at)
            boxes += [(*whole[:d], (start, cut), *whole[d + 1 :]), (*whole[:d], (cut, stop), *whole[d + 1 :])]
    return boxes


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple((a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))


def as_slice(name: str, dtype: DType, shape: tuple[int, ...], box: Box) -> TensorSlice:
    return TensorSlice(name, dtype, shape, tuple(a for a, _ in box), tuple(b for _, b in box))


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_reads_what_any_other_wrote(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), label="shape"))
    dtype: DType = data.draw(st.sampled_from(["float32", "bfloat16", "float16", "uint8"]), label="dtype")
    full = np.random.default_rng(0).integers(0, 256, size=shape).astype(raw_dtype(dtype))
    held = data.draw(partitions(tuple((0, n) for n in shape), cuts=6), label="held")
    replicas = [box for box in data.draw(st.lists(boxes_within(shape), max_size=2)) if box not in held]
    ranks = data.draw(st.integers(1, 3), label="ranks")
    with TemporaryDirectory() as folder, failing_operation():
        everything = data.draw(st.permutations([*dict.fromkeys(held + replicas)]))
        for rank in range(ranks):
            mine = everything[rank::ranks]
            parts = [as_slice("w", dtype, shape, box) for box in mine]
            ShardWriter(Path(folder), rank).write("policy", parts, (full[index(box)] for box in mine))
        wanted = data.draw(boxes_within(shape), label="wanted")
        result = ShardReader(Path(folder)).read("policy", as_slice("w", dtype, shape, wanted))
        np.testing.assert_array_equal(result, full[index(wanted)], strict=True)


def test_only_the_slices_that_a_box_touches_are_read(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = np.memmap

    def memmap(path: Path, *args: Any, **kwargs: Any) -> np.ndarray:
        opened.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(np, "memmap", memmap)
    ShardReader(two_ranks).read("policy", replace(HEAD, start=(3, 0)))
    assert opened == [two_ranks / "policy" / "rank_00001.safetensors"]


# the file format


def test_the_safetensors_library_reads_our_shards(two_ranks: Path) -> None:
    with safe_open(two_ranks / "policy" / "rank_00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"model.norm.weight", "lm_head.weight[0:2,0:6]"}
        assert bits(file.get_tensor("model.norm.weight").numpy()) == bits(norm)
        assert file.get_slice("lm_head.weight[0:2,0:6]").get_dtype() == "BF16"
        assert json.loads(file.metadata()["slices"]) == {
            "lm_head.weight[0:2,0:6]": {"name": "lm_head.weight", "shape": [4, 6], "start": [0, 0]}
        }


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_the_library_agrees_on_every_type_and_on_data_that_is_not_aligned(tmp_path: Path, dtype: DType) -> None:
    first = TensorSlice.whole("first", "uint8", (3,))
    part = TensorSlice.whole("x", dtype, (5,))
    content = np.arange(5).astype(dtype)
    ShardWriter(tmp_path, 0).write("policy", [first, part], [np.zeros(3, np.uint8), content])
    with safe_open(tmp_path / "policy" / "rank_00000.safetensors", framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("x"), content, strict=True)
    assert bits(ShardReader(tmp_path).read("policy", part)) == bits(content)


def test_we_read_files_of_the_safetensors_library(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    halves = np.arange(7, dtype=np.float16)
    tensors = {"halves": halves, NORM.name: norm}
    save_file(tensors, tmp_path / "policy" / "rank_00000.safetensors", metadata={"format": "pt"})
    reader = ShardReader(tmp_path)
    assert bits(reader.read("policy", NORM)) == bits(norm)
    assert bits(reader.read("policy", TensorSlice.whole("halves", "float16", (7,)))) == bits(halves)


def test_the_header_may_list_tensors_in_any_order(two_ranks: Path) -> None:
    path = two_ranks / "policy" / "rank_00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = dict(reversed(json.loads(data[8 : 8 + length]).items()))
    path.write_bytes(data[:8] + json.dumps(entries).encode().ljust(length) + data[8 + length :])
    np.testing.assert_array_equal(ShardReader(two_ranks).read("policy", HEAD), head)


def test_data_begins_at_a_multiple_of_8_bytes(tmp_path: Path) -> None:
    for rank in range(8):
        part = TensorSlice.whole("x" * (rank + 1), "uint8", (1,))
        ShardWriter(tmp_path, rank).write("policy", [part], [np.zeros(1, np.uint8)])
        header = (tmp_path / "policy" / f"rank_{rank:05d}.safetensors").read_bytes()[:-1]
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8


# misuse


@pytest.mark.parametrize(
    ("buffers", "reason"),
    [
        ([norm], "2 slices but only 1 buffers"),
        ([norm, head, norm], "more buffers than the 2 slices"),
        ([norm, head.T], r"expected an array \(4, 6\) of 2 bytes an element, got \(6, 4\) of 2"),
        ([norm, head.astype(np.uint32)], "got .* of 4"),
        ([norm, memoryview(bytes(47))], "expected 48 bytes, got 47"),
    ],
)
def test_buffers_that_do_not_match_are_refused_and_nothing_is_written(
    tmp_path: Path, buffers: list[np.ndarray], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ShardWriter(tmp_path, 0).write("policy", [NORM, HEAD], buffers)
    assert list((tmp_path / "policy").iterdir()) == []


@pytest.mark.parametrize("name", ["model.norm.weight", "__metadata__"])
def test_a_key_cannot_be_given_twice_or_be_a_reserved_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is given twice, or"):
        ShardWriter(tmp_path, 0).write("policy", [NORM, replace(NORM, name=name)], [norm, norm])


def test_a_group_is_written_once(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 0)
    writer.write("policy", [NORM], [norm])
    with pytest.raises(ValueError, match="in one call"):
        writer.write("policy", [HEAD], [head])


# damage


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (TensorSlice.whole("model.nrom.weight", "float32", (3,)), r"policy: no shard has the tensor model\.nrom"),
        (
            TensorSlice.whole("model.norm.weight", "float32", (4,)),
            r"rank_00000\.safetensors: tensor model\.norm\.weight: expected float32 \[4\], found float32 \[3\]",
        ),
        (
            TensorSlice.whole("lm_head.weight", "float16", (4, 6)),
            r"tensor lm_head\.weight: expected float16 \[4, 6\], found bfloat16 \[4, 6\]",
        ),
    ],
)
def test_a_tensor_that_is_not_there_or_is_another_is_refused(two_ranks: Path, part: TensorSlice, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        ShardReader(two_ranks).read("policy", part)


def test_ranks_that_disagree_on_a_tensor_are_refused(two_ranks: Path) -> None:
    ShardWriter(two_ranks, 2).write("policy", [replace(NORM, dtype="float16")], [norm.astype(np.float16)])
    with pytest.raises(CheckpointError, match=r"rank_00002\.safetensors: tensor model\.norm\.weight"):
        ShardReader(two_ranks).read("policy", NORM)


def test_a_tensor_that_is_not_covered_is_refused_with_the_gap(two_ranks: Path) -> None:
    (two_ranks / "policy" / "rank_00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no shard holds 12 of the 24 elements.*\(2, 0\):\(4, 6\)"):
        ShardReader(two_ranks).read("policy", HEAD)


def test_missing_elements_around_a_slice_are_counted_once(tmp_path: Path) -> None:
    ShardWriter(tmp_path, 0).write("policy", [replace(HEAD, start=(1, 1), stop=(3, 3))], [head[1:3, 1:3]])
    with pytest.raises(CheckpointError, match="no shard holds 20 of the 24 elements"):
        ShardReader(tmp_path).read("policy", HEAD)


def test_a_group_without_shards_is_refused(two_ranks: Path) -> None:
    with pytest.raises(CheckpointError, match="optimizer holds no shard"):
        ShardReader(two_ranks).slices("optimizer")


@pytest.mark.parametrize("length", [0, 7, 8, 60, -1])
def test_a_truncated_shard_is_refused(two_ranks: Path, length: int) -> None:
    path = two_ranks / "policy" / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged"):
        ShardReader(two_ranks).slices("policy")


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "longer": (lambda data: data + b"x", "expected .* bytes, found"),
    "length": (lambda data: b"\xff" * 8 + data[8:], "a header of"),
    "json": (lambda data: data.replace(b"{", b"[", 1), "header cannot be read"),
    "type": (lambda data: data.replace(b'"F32"', b'"I32"'), "has the type I32; expected one of F32"),
    "shape": (lambda data: data.replace(b'"shape": [3]', b'"shape": [2]'), r"expected at bytes \(0, 8\), found"),
    "hole": (lambda data: data.replace(b"[0, 12]", b"[1, 13]"), r"expected at bytes \(0, 12\), found at \(1, 13\)"),
    "box": (lambda data: data.replace(rb"\"start\": [0, 0]", rb"\"start\": [3, 0]"), "out of bounds"),
    "metadata": (lambda data: data.replace(b'"slices": "{', b'"slices": "['), "header cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_header_is_refused_with_the_reason(two_ranks: Path, damage: str) -> None:
    change, reason = DAMAGES[damage]
    path = two_ranks / "policy" / "rank_00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(change(data))
    assert path.read_bytes() != data
    with pytest.raises(CheckpointError, match=rf"rank_00000\.safetensors is damaged.*{reason}"):
        ShardReader(two_ranks).slices("policy")
