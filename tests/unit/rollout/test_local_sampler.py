"""What is the local sampler's own; all else is in the contract of samplers."""

from typing import Any

import pytest

from beamline.rollout.local import LocalSampler
from beamline.transfer.local import LocalChannel
from tests.tiny_beam import CONTEXT, THETA, beam_shape


def local_sampler(positions: int = CONTEXT) -> LocalSampler:
    return LocalSampler(beam_shape(), "float32", THETA, 2, positions, 0, LocalChannel())


def test_sequences_longer_than_the_context_are_an_error() -> None:
    with pytest.raises(ValueError, match=f"{CONTEXT + 1} positions exceed the model's context of {CONTEXT}"):
        local_sampler(CONTEXT + 1)


def test_it_has_no_adapters() -> None:
    with pytest.raises(ValueError, match="full weights only, not 'adapter'"):
        local_sampler().layout("adapter")


@pytest.mark.parametrize("level", [0, 3])
def test_there_are_two_levels_of_sleep(level: Any) -> None:
    with pytest.raises(ValueError, match=f"level must be 1 or 2, not {level}"):
        local_sampler().sleep(level)


def test_the_cache_cannot_wake_before_the_weights() -> None:
    sampler = local_sampler()
    sampler.sleep(2)
    with pytest.raises(RuntimeError, match=r"wake\(\['weights'\]\) first"):
        sampler.wake(["cache"])
