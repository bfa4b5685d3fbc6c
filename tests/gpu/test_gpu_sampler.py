"""The contract of samplers, by vLLM."""

from tests.contract.test_sampler import *  # noqa: F403
