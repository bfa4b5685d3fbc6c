from collections.abc import Iterator

import pytest
import torch

from beamline.runtime.determinism import make_deterministic
from tests.contract.engines import LEARNERS, PAIRS, SAMPLERS, LearnerFactory, PairFactory, SamplerFactory


@pytest.fixture(params=SAMPLERS)
def sampler_factory(request: pytest.FixtureRequest) -> SamplerFactory:
    return SAMPLERS[request.param]


@pytest.fixture(params=LEARNERS)
def learner_factory(request: pytest.FixtureRequest) -> LearnerFactory:
    return LEARNERS[request.param]


@pytest.fixture(params=PAIRS)
def pair_factory(request: pytest.FixtureRequest) -> PairFactory:
    return PAIRS[request.param]


@pytest.fixture(scope="module", autouse=True)
def _deterministic() -> Iterator[None]:
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    make_deterministic(threads=1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
