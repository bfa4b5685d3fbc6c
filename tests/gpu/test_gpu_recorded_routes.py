"""The contract of samplers, by vLLM."""

from tests.contract.test_recorded_routes import *  # noqa: F403
