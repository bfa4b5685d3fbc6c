"""The contract of samplers, by vLLM."""

from tests.contract.test_recorded_support import *  # noqa: F403
