"""The contract of samplers, by two engine processes of the CPU: it promises the same bits."""

from tests.contract.process_engines import assert_same, sampler_by_two_processes  # noqa: F401
from tests.contract.test_sampler import *  # noqa: F403
