import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beamline.checkpoint import CheckpointError, FileDigest, remove_tree, write_atomic
from beamline.checkpoint import files as files_module
from beamline.checkpoint.files import Bytes, hash_file, make_empty_folder, make_folder, read_json, write_json
from tests.faults import Crash, disk_full, failing_operation


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_chunks_of_every_kind_are_written_in_order_and_hashed(tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    chunks: list[Bytes] = [b"ab", b"", memoryview(b"cd"), matrix.T, np.array(7, np.float32), np.zeros((0, 3))]
    expected = b"abcd" + np.ascontiguousarray(matrix.T).tobytes() + np.float32(7).tobytes()
    digest = write_atomic(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == expected
    assert digest == FileDigest(len(expected), hashlib.sha256(expected).hexdigest()) == hash_file(tmp_path / "file")
    assert names(tmp_path) == ["file"]


def test_a_chunk_larger_than_a_block_and_short_writes_arrive_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_BLOCK", 1000)
    monkeypatch.setattr(os, "write", lambda fd, data, real=os.write: real(fd, data[:7]))
    content = np.arange(2345, dtype=np.uint16)
    digest = write_atomic(tmp_path / "file", [content])
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == content.tobytes()
    assert digest == hash_file(tmp_path / "file")


def test_a_failure_at_any_operation_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with failing_operation() as disk:
        write_atomic(path, [b"old"])
    for n in range(1, disk.performed + 1):
        for error in (disk_full(), Crash()):
            path.write_bytes(b"old")
            with pytest.raises(type(error)), failing_operation(n, error):
                write_atomic(path, [b"new ", b"content"])
            assert path.read_bytes() in (b"old", b"new content")


def test_a_full_disk_names_the_file_and_the_way_out_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with failing_operation(2, disk_full()) as disk, pytest.raises(OSError, match="free space") as caught:
        write_atomic(path, [b"content"])
    assert disk.trace[1][0] == "write"
    assert caught.value.errno == errno.ENOSPC
    assert str(path) in str(caught.value)
    assert names(tmp_path) == []


def test_a_missing_folder_keeps_its_own_kind_of_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no/file"):
        write_atomic(tmp_path / "no" / "file", [b"content"])


def test_an_error_of_the_source_passes_through_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"one"
        raise PermissionError("no second chunk")

    with pytest.raises(PermissionError, match=r"^no second chunk$"):
        write_atomic(tmp_path / "file", chunks())
    assert names(tmp_path) == []


def test_content_is_synced_before_its_name_and_the_name_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with failing_operation() as disk:
        write_atomic(path, [b"content"])
    temporary = tmp_path / ".file.tmp"
    on_file = [("open", temporary), ("write", temporary), ("fsync", temporary), ("close", temporary)]
    assert disk.trace == [*on_file, ("replace", path), ("open", tmp_path), ("fsync", tmp_path), ("close", tmp_path)]


def test_folders_are_made_with_their_parents_and_synced_into_them(tmp_path: Path) -> None:
    with failing_operation() as disk:
        make_folder(tmp_path / "a" / "b")
        make_folder(tmp_path / "a" / "b")
    assert [item for item in disk.trace if item[0] in ("mkdir", "fsync")] == [
        ("mkdir", tmp_path / "a"),
        ("fsync", tmp_path),
        ("mkdir", tmp_path / "a" / "b"),
        ("fsync", tmp_path / "a"),
    ]


def test_a_file_where_a_folder_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileExistsError, match="a: File exists"):
        make_folder(tmp_path / "a")


def test_remove_tree_deletes_links_but_not_what_they_point_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"kept")
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "file").write_bytes(b"")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept", target_is_directory=True)
    remove_tree(tmp_path / "tree")
    assert names(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").read_bytes() == b"kept"


def test_a_tree_is_whole_or_hidden_after_a_crash_at_any_operation(tmp_path: Path) -> None:
    def make_tree() -> Path:
        (tmp_path / "tree" / "inner").mkdir(parents=True, exist_ok=True)
        for name in ("a", "inner/b"):
            (tmp_path / "tree" / name).write_bytes(b"content")
        return tmp_path / "tree"

    with failing_operation() as disk:
        remove_tree(make_tree())
    for n in range(1, disk.performed + 1):
        with pytest.raises(Crash), failing_operation(n, Crash()):
            remove_tree(make_tree())
        if (tmp_path / "tree").exists():
            assert len(list((tmp_path / "tree").rglob("*"))) == 3
            continue
        assert names(tmp_path) == [".tree.trash"]
        if n % 2:
            remove_tree(tmp_path / ".tree.trash")
            assert names(tmp_path) == []
    remove_tree(make_tree())
    assert names(tmp_path) == []


def test_json_comes_back_exactly(tmp_path: Path) -> None:
    value = {"float": 0.1 + 0.2, "large": 2**80, "nested": {"list": [1, None, True, "ü"]}}
    write_json(tmp_path / "state.json", value)
    assert read_json(tmp_path / "state.json") == value


@pytest.mark.parametrize("value", [np.float32(1), float("nan"), float("inf"), object()])
def test_what_is_not_plain_finite_data_is_refused_with_the_file(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"state\.json can hold plain data"):
        write_json(tmp_path / "state.json", {"key": value})


@pytest.mark.parametrize(("content", "reason"), [(b"{", "not JSON"), (b"\xff", "not JSON"), (b"[1]", "found a list")])
def test_damaged_json_names_the_file_and_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"state\.json.*{reason}"):
        read_json(tmp_path / "state.json")


def test_a_folder_that_has_to_be_empty_is_made_or_taken_as_it_is(tmp_path: Path) -> None:
    for _ in range(2):
        make_empty_folder(tmp_path / "a" / "b")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "b"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match=f"{tmp_path / 'a'} is there already; give an empty folder"):
        make_empty_folder(tmp_path)
