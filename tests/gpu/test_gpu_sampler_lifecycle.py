"""The contract of samplers, by vLLM: what happens around drawing."""

from tests.contract.shared_lifecycle import *  # noqa: F403
