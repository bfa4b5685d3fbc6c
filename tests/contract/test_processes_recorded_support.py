"""The contract of samplers, by an engine process of the CPU: it promises the same bits."""

from tests.contract.process_engines import assert_same, sampler_by_one_process  # noqa: F401
from tests.contract.test_recorded_support import *  # noqa: F403

# An engine in a process of its own may have begun with a request before it is aborted.
del test_a_request_that_never_began_has_a_support_of_no_tokens  # noqa: F821
# What a learner makes of it has nothing to do with where it was drawn.
del test_the_ratio_on_policy_is_1_but_for_rounding_on_the_head_of_torch  # noqa: F821
del test_the_ratio_on_policy_is_exactly_1_on_the_kernels_of_the_sampler  # noqa: F821
del test_without_its_support_the_ratio_of_a_filtered_draw_is_not_1  # noqa: F821
