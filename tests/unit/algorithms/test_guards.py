"""What the first update has to look like: how far is too far, and what the error says."""

import numpy as np
import pytest

from beamline.algorithms.guards import GuardError, check_mismatch, check_ratio
from beamline.errors import BeamlineError

LOGPROBS = np.array([-0.125, -0.25, -0.75], dtype=np.float32)


def moved(by: float, token: int = 1) -> np.ndarray:
    """The log-probabilities with one of them moved, as far as float32 can tell."""
    logprobs = LOGPROBS.copy()
    logprobs[token] += np.float32(by)
    return logprobs


@pytest.mark.parametrize("by", [0.0, 1e-7, -1e-7], ids=str)
def test_a_ratio_of_one_but_for_rounding_passes(by: float) -> None:
    check_ratio(moved(by), LOGPROBS)


@pytest.mark.parametrize("by", [2e-6, -2e-6, 0.5, 1000.0, np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_ratio_that_is_not_one_fails_whichever_token_has_it(by: float, token: int) -> None:
    with pytest.raises(GuardError):
        check_ratio(moved(by, token), LOGPROBS)


def test_a_ratio_is_taken_in_more_than_float32() -> None:
    """Two neighbours in float32 at -20 are 1.9e-6 apart, and their exponentials differ by as much."""
    with pytest.raises(GuardError, match=r"up to 1\.91e-06"):
        check_ratio(np.array([np.nextafter(np.float32(-20), np.float32(0))]), np.array([-20], dtype=np.float32))


@pytest.mark.parametrize("by", [0.0, 0.25, -0.25, 0.75], ids=str)
def test_a_mean_difference_up_to_the_limit_passes(by: float) -> None:
    check_mismatch(moved(by), LOGPROBS, limit=0.25)


@pytest.mark.parametrize("by", [0.7501, -0.7501, 1000.0, np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_mean_difference_over_the_limit_fails_whichever_token_has_it(by: float, token: int) -> None:
    with pytest.raises(GuardError):
        check_mismatch(moved(by, token), LOGPROBS, limit=0.25)


def test_differences_of_opposite_sign_do_not_cancel() -> None:
    with pytest.raises(GuardError):
        check_mismatch(LOGPROBS + np.array([1, -1, 0], dtype=np.float32), LOGPROBS, limit=0.25)


@pytest.mark.filterwarnings("error")
def test_no_tokens_pass() -> None:
    none = np.zeros(0, dtype=np.float32)
    check_ratio(none, none)
    check_mismatch(none, none, limit=0.1)


@pytest.mark.filterwarnings("error")
def test_a_ratio_beyond_all_numbers_is_an_error_without_a_warning() -> None:
    with pytest.raises(GuardError, match="up to inf"):
        check_ratio(moved(1000.0), LOGPROBS)


def test_the_error_of_a_ratio_names_value_bound_causes_and_switch() -> None:
    with pytest.raises(GuardError) as caught:
        check_ratio(moved(0.5), LOGPROBS)
    for part in ("0.649", "1e-06", "dropout", "not deterministic", "algorithm.guard.ratio=false"):
        assert part in str(caught.value)


def test_the_error_of_a_mismatch_names_value_bound_causes_and_switch() -> None:
    with pytest.raises(GuardError) as caught:
        check_mismatch(moved(1.5), LOGPROBS, limit=0.1)
    for part in ("0.5 nats", "guard.mismatch=0.1", "other weights", "temperature", "algorithm.guard.mismatch=null"):
        assert part in str(caught.value)


def test_the_error_is_one_that_the_user_can_mend() -> None:
    assert issubclass(GuardError, BeamlineError)
