"""Tests that need an NVIDIA GPU and vLLM (``make test-gpu``). What they found is written to ``benchmarks/results``."""

import fcntl
import json
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from beamline.runtime.determinism import make_deterministic
from tests.contract.engines import PairFactory, SamplerFactory
from tests.contract.sampling import AssertSame, assert_same_tokens
from tests.gpu.engines import gpu_engines
from tests.shared_engines import SharedEngines

HERE = Path(__file__).parent
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-tests.json"
LIBRARIES = ("vllm", "megatron-core", "torch", "transformers", "triton", "flashinfer-python", "numba", "numpy")

_files: dict[str, dict[str, Any]] = {}
"""What each file of tests came to; those of an earlier run on the same machine stay where a file was not run again."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in (item for item in items if HERE in item.path.parents):  # pytest gives those of all folders
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.partition("::")[0]
    if not name.startswith("tests/gpu/"):
        return
    today = time.strftime("%Y-%m-%d", time.gmtime())
    blank = {"date": today, "seconds": 0.0, "outcomes": Counter(), "skipped": {}, "not_passed": {}, "figures": {}}
    file = _files.setdefault(name, blank)
    file["seconds"] = round(file["seconds"] + report.duration, 1)
    file["figures"].update(report.user_properties)
    if report.when == "call" or not report.passed:
        file["outcomes"][report.outcome] += 1
    if isinstance(report.longrepr, tuple):  # file, line, reason
        file["skipped"][report.nodeid] = report.longrepr[-1]
    elif not report.passed:
        file["not_passed"][report.nodeid] = (str(report.longrepr).strip().splitlines() or [report.outcome])[-1]


def pytest_runtest_logfinish() -> None:
    if torch.cuda.is_available() and _files:
        _write()


def _write() -> None:
    """Bring the results up to date; several runs may do so at the same time."""
    RESULTS.touch()
    with RESULTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = json.loads(file.read() or "{}")
        place = _place()
        same_place = all(before.get(name) == value for name, value in place.items())
        files = (before["files"] if same_place else {}) | _files
        passed = not any(each["not_passed"] for each in files.values())
        found = {"command": "make test-gpu", **place, "passed": passed, "files": dict(sorted(files.items()))}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(found, indent=2) + "\n")


@cache
def _place() -> dict[str, Any]:
    """Where the tests run."""
    return {
        "device": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": _driver(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """Engines that live through all tests: one takes most of a minute to start."""
    shared = gpu_engines(tmp_path_factory.mktemp("engines"))
    yield shared
    shared.close()


@pytest.fixture
def sampler_factory(engines: SharedEngines) -> Iterator[SamplerFactory]:
    yield engines.sampler
    engines.end_test()


@pytest.fixture
def pair_factory(engines: SharedEngines) -> Iterator[PairFactory]:
    yield engines.pair
    engines.end_test()


@pytest.fixture
def assert_same() -> AssertSame:
    return assert_same_tokens


@pytest.fixture(scope="module", autouse=True)
def _deterministic() -> Iterator[None]:
    strict = torch.are_deterministic_algorithms_enabled()
    make_deterministic(threads=1)
    yield
    torch.use_deterministic_algorithms(strict)
