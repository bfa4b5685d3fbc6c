"""Engine processes that compute on the CPU, and what starts them."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import beamline
from beamline.model.layout import DType
from beamline.policy import model
from beamline.rollout.vllm.layout import Mesh
from beamline.rollout.vllm.replica import Launch
from tests.contract.engines import SamplerFactory
from tests.contract.sampling import AssertSame, assert_same_bits
from tests.cpu_engine import PROGRAM
from tests.shared_engines import SharedEngines
from tests.tiny_beam import CONTEXT, THETA, random_beam

ROOT = Path(beamline.__file__).parents[1]
LONG = 120.0  # seconds; only a test that fails comes near it
MESH = Mesh(tensor=2, pipeline=2, experts=True)
"""Each engine is given its weights as if it had four ranks."""


def cpu_launches(
    folder: Path, count: int, *options: object, mesh: Mesh = MESH, **changes: Any
) -> Callable[[DType], list[Launch]]:
    """How some engines are started, with options of ``tests/cpu_engine.py``; ``changes`` are of :class:`Launch`."""
    model.save(random_beam(), folder / "model", "float32")

    def launches(dtype: DType) -> list[Launch]:
        arguments = {"model": str(folder / "model"), "rope_theta": THETA, "positions": CONTEXT, "mesh": asdict(mesh)}
        settings: dict[str, Any] = {
            "command": (*PROGRAM, *map(str, options)),
            "arguments": arguments | {"dtype": dtype},
            "environment": {"PYTHONPATH": str(ROOT)},
            "start_seconds": LONG,
            "token_seconds": LONG,
        }
        return [Launch(log=folder / f"{dtype}-{i}.log", **(settings | changes)) for i in range(count)]

    return launches


def cpu_engines(folder: Path, count: int, max_restarts: int = 0) -> SharedEngines:
    """Engines that wait when something has ended, so that a test finds the rest unfinished."""
    return SharedEngines(cpu_launches(folder, count, "--waits"), MESH, max_restarts)


@pytest.fixture(name="sampler_factory")
def sampler_by_one_process(one_process: SharedEngines) -> Iterator[SamplerFactory]:
    yield one_process.sampler
    one_process.end_test()


@pytest.fixture(name="sampler_factory")
def sampler_by_two_processes(two_processes: SharedEngines) -> Iterator[SamplerFactory]:
    yield two_processes.sampler
    two_processes.end_test()


@pytest.fixture
def assert_same() -> AssertSame:
    """Engine processes promise the bits of the sampler in this process."""
    return assert_same_bits
