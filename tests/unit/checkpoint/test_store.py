import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from beamline.checkpoint import CheckpointError, CheckpointStore, ShardWriter, open_checkpoint, verify
from beamline.model.layout import TensorSlice

PART = TensorSlice.whole("model.norm.weight", "float32", (4,))


def learner(value: float) -> Callable[[ShardWriter], None]:
    def write(writer: ShardWriter) -> None:
        writer.write("policy", [PART], [np.full(4, value, np.float32)])
        writer.write_state("learner", {"updates": int(value)})

    return write


def save(store: CheckpointStore, step: int, value: float | None = None) -> Path:
    return store.save(step, {"cursor": step}, learner(step if value is None else value))


def value_of(path: Path) -> float:
    return float(verify(path).reader.read("policy", PART).view(np.float32)[0])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_a_checkpoint_comes_back(store: CheckpointStore) -> None:
    path = save(store, 25)
    checkpoint = open_checkpoint(path)
    assert path == store.directory / "global_step_25" == checkpoint.path
    assert (checkpoint.step, checkpoint.run_state) == (25, {"cursor": 25})
    assert checkpoint.reader.read_state("learner") == {"updates": 25}
    assert value_of(path) == 25.0


def test_a_checkpoint_has_the_files_of_the_design_and_nothing_else(store: CheckpointStore) -> None:
    path = save(store, 25)
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert files == {"policy/rank_00000.safetensors", "learner.json", "run_state.json", "manifest.json"}
    assert names(store.directory) == {"global_step_25", "latest"}
    assert set(json.loads((path / "manifest.json").read_text())["files"]) == files - {"manifest.json"}


def test_latest_names_the_newest_step(store: CheckpointStore) -> None:
    save(store, 5)
    path = save(store, 10)
    assert (store.directory / "latest").read_text() == "10\n"
    assert store.latest() == path


def test_nothing_saved_yet(store: CheckpointStore) -> None:
    assert store.latest() is None
    assert not store.directory.exists()


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (0, [1, 2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert names(tmp_path) == {"latest", *(f"global_step_{step}" for step in left)}


def test_a_run_that_goes_back_is_newer_than_the_later_steps_it_left(store: CheckpointStore) -> None:
    for step in (10, 20, 15):
        save(store, step)
    assert store.latest() == store.directory / "global_step_15"
    assert names(store.directory) == {"latest", "global_step_15", "global_step_20"}
    save(store, 18)
    assert names(store.directory) == {"latest", "global_step_15", "global_step_18"}


def test_a_step_saved_again_is_replaced_and_becomes_the_newest(store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, step)
    path = save(store, 1, value=7.0)
    assert value_of(path) == 7.0
    assert store.latest() == path
    assert names(store.directory) == {"latest", "global_step_1", "global_step_2"}


@pytest.mark.parametrize("pointer", [None, "1\n", "99\n", "nonsense"])
def test_the_pointer_file_may_lag_or_be_wrong(store: CheckpointStore, pointer: str | None) -> None:
    save(store, 1)
    path = save(store, 2)
    (store.directory / "latest").unlink()
    if pointer is not None:
        (store.directory / "latest").write_text(pointer)
    assert store.latest() == path


def test_a_folder_without_a_manifest_is_not_a_checkpoint(store: CheckpointStore) -> None:
    path = save(store, 1)
    (save(store, 2) / "manifest.json").unlink()
    assert store.latest() == path


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(store: CheckpointStore) -> None:
    other = store.directory / "global_step_3" / "data.bin"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"somebody's")
    with pytest.raises(CheckpointError, match="global_step_3 is in the way"):
        save(store, 3)
    assert other.read_bytes() == b"somebody's"


def test_left_overs_of_a_crash_are_removed_by_the_next_save(store: CheckpointStore) -> None:
    for name in (".global_step_7.staging", ".global_step_1.trash", ".global_step_7.staging.trash"):
        (store.directory / name / "policy").mkdir(parents=True)
        (store.directory / name / "policy" / "rank_00000.safetensors").write_bytes(b"half")
    save(store, 7)
    assert names(store.directory) == {"latest", "global_step_7"}


def test_a_replaced_folder_is_found_and_then_put_back(store: CheckpointStore) -> None:
    path = save(store, 1)
    replaced = path.rename(store.directory / ".global_step_1.replaced")
    assert store.latest() == replaced
    assert value_of(replaced) == 1.0
    save(store, 2)
    assert names(store.directory) == {"latest", "global_step_1", "global_step_2"}
    assert value_of(path) == 1.0


def test_an_error_of_the_learner_passes_through_and_leaves_nothing_behind(store: CheckpointStore) -> None:
    def broken(writer: ShardWriter) -> None:
        writer.write_state("learner", {})
        raise FloatingPointError("not finite")

    path = save(store, 1)
    with pytest.raises(FloatingPointError, match=r"^not finite$"):
        store.save(2, {}, broken)
    assert store.latest() == path
    assert names(store.directory) == {"latest", "global_step_1"}


def test_bad_arguments_are_refused(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="not -1"):
        save(store, -1)
    with pytest.raises(ValueError, match=r"keep must be 0 \(all\) or more, not -1"):
        CheckpointStore(store.directory, keep=-1)


# damage


def test_opening_lists_every_file_that_is_wrong(store: CheckpointStore) -> None:
    path = save(store, 1)
    (path / "learner.json").unlink()
    with (path / "policy" / "rank_00000.safetensors").open("ab") as file:
        file.write(b"x")
    (path / "policy" / "rank_00001.safetensors").write_bytes(b"from elsewhere")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "3 of its files are wrong" in message
    assert re.search(r"learner\.json: missing, expected \d+ bytes", message)
    assert re.search(r"rank_00000\.safetensors: expected \d+ bytes, found \d+", message)
    assert "rank_00001.safetensors: not in the manifest" in message


def test_verify_finds_a_changed_bit_that_opening_does_not(store: CheckpointStore) -> None:
    path = save(store, 1)
    shard = path / "policy" / "rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors: expected sha256 \w{64}, found \w{64}"):
        verify(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"format": 1, "step": "x", "serial": 1, "files": {}}'])
def test_a_damaged_manifest_is_an_error_but_does_not_stop_a_save(store: CheckpointStore, content: bytes) -> None:
    path = save(store, 1)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*Move the folder"):
        store.latest()
    save(store, 2)
    assert names(store.directory) == {"latest", "global_step_1", "global_step_2"}


def test_a_checkpoint_of_a_later_format_is_refused(store: CheckpointStore) -> None:
    path = save(store, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this version of beamline reads format 1"):
        open_checkpoint(path)


def test_a_path_that_is_no_checkpoint_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    for path in (store.directory, store.directory / "global_step_9", store.directory / "latest"):
        with pytest.raises(CheckpointError, match=f"{path} is not a checkpoint"):
            open_checkpoint(path)
