"""Advantages: the file named like ``algorithm.advantage.name`` has ``advantages``."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.advantages.groups import GroupRewards, rewards_of
from beamline.config.advantages import Advantage
from beamline.records import Group

__all__ = ["GroupRewards", "advantages", "has_signal", "rewards_of", "with_advantages"]


def advantages(groups: Sequence[GroupRewards], config: Advantage) -> list[NDArray[np.float64]]:
    """How much better each sample was than others: fp64, one array ``[n]`` for each group of a step.

    Samples without a grade get exactly 0 and take no part. What the samples that are compared say nothing about (fewer
    than two graded, or all equal) is exactly 0.
    """
    module = import_module(f"{__name__}.{config.name}")
    computed: list[NDArray[np.float64]] = module.advantages(groups, config)
    return computed


def has_signal(group: GroupRewards, config: Advantage) -> bool:
    """Whether a group, were it alone, would teach anything: an advantage of it is not 0."""
    return bool(advantages([group], config)[0].any())


def with_advantages(groups: Sequence[Group], config: Advantage) -> list[Group]:
    """The groups of a step with their advantages."""
    computed = advantages([rewards_of(group) for group in groups], config)
    return [replace(group, advantages=values) for group, values in zip(groups, computed, strict=True)]
