import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

import beamline
from beamline.errors import BeamlineError
from beamline.kernels import compiled
from beamline.kernels.arithmetic import exp
from beamline.kernels.compiled import CacheFolderError, cache_folder

PACKAGE = Path(beamline.__file__).parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with kernels in two files, and a place for what is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernels = tmp_path / "package" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "low.py").write_text("def low(): return 1")
    (kernels / "high.py").write_text("def high(): return 2")
    return tmp_path / "package"


def test_equal_sources_share_a_folder(package: Path, tmp_path: Path) -> None:
    folder = cache_folder(package)
    assert folder.is_dir()
    assert folder.parent == tmp_path / "cache" / "beamline" / "kernels"
    assert cache_folder(package) == folder


def test_a_change_of_any_kernel_source_gives_another_folder(package: Path) -> None:
    folders = [cache_folder(package)]
    for name, text in {"low.py": "def low(): return 3", "high.py": "def high(): return 3", "new.py": ""}.items():
        (package / "kernels" / name).write_text(text or "def new(): return 4")
        folders.append(cache_folder(package))
    assert len(set(folders)) == 4


def test_other_sources_do_not_matter(package: Path) -> None:
    folder = cache_folder(package)
    (package / "other.py").write_text("def other(): return 5")
    assert cache_folder(package) == folder


def test_without_a_place_of_its_own_it_is_in_the_home(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(package).parent == tmp_path / "home" / ".cache" / "beamline" / "kernels"


def test_kernels_are_compiled_into_that_folder() -> None:
    locator = exp._cache._impl.locator
    assert Path(locator.get_cache_path()).parent == Path(compiled._FOLDER)


def test_a_folder_that_cannot_be_written_is_an_error(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba alone would write beside the sources, or into its own folder, and find outdated code there."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        CacheFolderError, match=r"kept in .*file.*, which cannot be written \(Not a directory\); set XDG"
    ):
        cache_folder(package)
    assert issubclass(CacheFolderError, BeamlineError)


def test_so_it_is_when_kernels_are_imported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program, place = "import beamline.kernels.arithmetic", {"XDG_CACHE_HOME": str(tmp_path / "file")}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=PACKAGE.parent, env=os.environ | place, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "CacheFolderError: compiled kernels are kept in" in ended.stderr


@pytest.mark.parametrize(
    "error", [EOFError("cut"), pickle.UnpicklingError("bits"), OSError(28, "No space left on device")]
)
def test_a_cache_that_fails_says_where_it_is_and_what_to_do(error: Exception) -> None:
    def access() -> None:
        raise error

    with pytest.raises(CacheFolderError, match=r"beamline/kernels/.*(delete that folder|No space left)"):
        compiled._explained(access)()


def test_one_process_at_a_time_reads_or_writes_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_FOLDER", str(tmp_path))
    lock = FileLock(f"{compiled._FOLDER}/lock")

    def access() -> bool:
        with pytest.raises(Timeout):
            FileLock(lock.lock_file).acquire(timeout=0)
        return True

    assert compiled._explained(access)()
    lock.acquire(timeout=0)
    lock.release()


def test_a_lock_that_another_process_keeps_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_LOCK_SECONDS", 0.05)
    with (
        FileLock(f"{compiled._FOLDER}/lock"),
        pytest.raises(CacheFolderError, match=r"another process has held .*/lock"),
    ):
        compiled._explained(lambda: None)()
