"""The contract of samplers, by an engine process of the CPU: it promises the same bits."""

from tests.contract.process_engines import assert_same, sampler_by_one_process  # noqa: F401
from tests.contract.test_recorded_routes import *  # noqa: F403
