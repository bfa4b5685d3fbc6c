"""The contract of a learner and a sampler that are joined, by two engine processes: the same bits in all three."""

from collections.abc import Iterator

import pytest

from tests.contract.engines import PairFactory
from tests.contract.test_learner_state import (  # noqa: F401
    test_the_sampler_draws_from_the_policy_of_the_learner,
    test_the_sampler_keeps_its_weights_until_the_next_transfer,
)
from tests.contract.test_parity import (  # noqa: F401
    test_the_learner_finds_the_bits_of_the_sampler,
    test_the_mismatch_of_the_first_update_is_exactly_0,
)
from tests.shared_engines import SharedEngines


@pytest.fixture
def pair_factory(two_processes: SharedEngines) -> Iterator[PairFactory]:
    yield two_processes.pair
    two_processes.end_test()
