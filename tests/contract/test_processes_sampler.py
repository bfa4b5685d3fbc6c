"""The contract of samplers, by two engine processes of the CPU: it promises the same bits."""

from collections.abc import Iterator

import pytest

from tests.contract.engines import SamplerFactory
from tests.contract.sampling import AssertSame, assert_same_bits
from tests.contract.test_sampler import *  # noqa: F403
from tests.shared_engines import SharedEngines


@pytest.fixture
def sampler_factory(two_processes: SharedEngines) -> Iterator[SamplerFactory]:
    yield two_processes.sampler
    two_processes.end_test()


@pytest.fixture
def assert_same() -> AssertSame:
    return assert_same_bits
