"""Tests that need an NVIDIA GPU and vLLM (``make test-gpu``). What they found is written to ``benchmarks/results``."""

import json
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from beamline.runtime.determinism import make_deterministic
from tests.contract.engines import PairFactory, SamplerFactory
from tests.contract.sampling import AssertSame, assert_same_tokens
from tests.gpu.engines import gpu_engines
from tests.shared_engines import SharedEngines

HERE = Path(__file__).parent
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-tests.json"
LIBRARIES = ("vllm", "torch", "transformers", "triton", "flashinfer-python", "numba", "numpy")

_outcomes: dict[str, Counter[str]] = {}
_not_passed: dict[str, str] = {}
_began = time.time()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in (item for item in items if HERE in item.path.parents):  # pytest gives those of all folders
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    if file.startswith("tests/gpu/") and (report.when == "call" or report.outcome != "passed"):
        _outcomes.setdefault(file, Counter())[report.outcome] += 1
        if report.outcome != "passed":
            lines = str(report.longrepr).strip().splitlines()
            _not_passed[report.nodeid] = lines[-1] if lines else report.outcome


def pytest_sessionfinish(exitstatus: int) -> None:
    if not torch.cuda.is_available() or not _outcomes:
        return
    found = {
        "command": "make test-gpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime(_began)),
        "device": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": _driver(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "passed": exitstatus == 0,
        "files": {name: dict(counts) for name, counts in sorted(_outcomes.items())},
        "not_passed": _not_passed,
        "seconds": round(time.time() - _began),
    }
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


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
