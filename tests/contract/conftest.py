from collections.abc import Iterator

import pytest
import torch

from beamline.runtime.determinism import make_deterministic
from tests.contract.engines import INVARIANT, LEARNERS, PAIRS, SAMPLERS, LearnerFactory, PairFactory, SamplerFactory
from tests.contract.process_engines import cpu_engines
from tests.contract.sampling import AssertSame, assert_same_bits, assert_same_tokens
from tests.shared_engines import SharedEngines


@pytest.fixture(params=SAMPLERS)
def sampler_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def sampler_factory(sampler_name: str) -> SamplerFactory:
    return SAMPLERS[sampler_name]


@pytest.fixture
def assert_same(sampler_name: str) -> AssertSame:
    """Holds completions against others of the same requests, as nearly as the sampler promises."""
    return assert_same_bits if sampler_name in INVARIANT else assert_same_tokens


@pytest.fixture(params=LEARNERS)
def learner_factory(request: pytest.FixtureRequest) -> LearnerFactory:
    return LEARNERS[request.param]


@pytest.fixture(params=PAIRS)
def pair_factory(request: pytest.FixtureRequest) -> PairFactory:
    return PAIRS[request.param]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """An engine in a process of its own, for all tests."""
    engines = cpu_engines(tmp_path_factory.mktemp("engines"), 1)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """Two of them, as one sampler."""
    engines = cpu_engines(tmp_path_factory.mktemp("engines"), 2)
    yield engines
    engines.close()


@pytest.fixture(scope="module", autouse=True)
def _deterministic() -> Iterator[None]:
    strict = torch.are_deterministic_algorithms_enabled()
    make_deterministic(threads=1)
    yield
    torch.use_deterministic_algorithms(strict)
