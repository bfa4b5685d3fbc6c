"""The contract of what happens around drawing, as far as it holds for samplers that share engine processes."""

import pytest

from tests.contract.engines import SamplerFactory
from tests.contract.sampling import collect, request
from tests.contract.test_sampler_lifecycle import *  # noqa: F403

# Two samplers that have the same request in flight at once would have to be two engines here.
del test_there_is_no_sleep_with_requests_in_flight  # noqa: F821
# An engine in a process of its own may have begun with a request before it is aborted, whatever else it does.
del test_a_waiting_request_is_aborted_with_nothing  # noqa: F821


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_with_requests_does_not_sleep(sampler_factory: SamplerFactory, level: int) -> None:
    sampler = sampler_factory(MODULE).sampler  # noqa: F405
    sampler.submit([request(5)])
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
        sampler.sleep(level)
    assert list(collect(sampler, 1)) == [request(5).key]
