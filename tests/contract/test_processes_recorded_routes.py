"""The contract of samplers, by an engine process of the CPU: it promises the same bits."""

from collections.abc import Iterator

import pytest

from tests.contract.engines import SamplerFactory
from tests.contract.sampling import AssertSame, assert_same_bits
from tests.contract.test_recorded_routes import *  # noqa: F403
from tests.shared_engines import SharedEngines


@pytest.fixture
def sampler_factory(one_process: SharedEngines) -> Iterator[SamplerFactory]:
    yield one_process.sampler
    one_process.end_test()


@pytest.fixture
def assert_same() -> AssertSame:
    return assert_same_bits
