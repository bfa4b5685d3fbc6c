"""How much better a response was than others; each variant has a file in ``beamline/algorithms/advantages``."""

from typing import Annotated, Literal

from pydantic import Field

from beamline.config.section import Section


class GrpoAdvantage(Section):
    """The reward against the mean of its group, over the standard deviation (GRPO)."""

    name: Literal["grpo"] = "grpo"
    norm_by_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""


class RlooAdvantage(Section):
    """The reward against the mean of the others of its group (RLOO)."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantage(Section):
    """The reward, normalized over the whole step (REINFORCE++)."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group_baseline: bool = False
    """First subtract the mean of the group (REINFORCE++-baseline)."""


class MaxrlAdvantage(Section):
    """The reward against the mean of its group, over that mean (MaxRL): needs rewards of 0 and more."""

    name: Literal["maxrl"] = "maxrl"


class GdpoAdvantage(Section):
    """Each part of the reward normalized in its group, then their sum over the whole step (GDPO)."""

    name: Literal["gdpo"] = "gdpo"


class PassAtKAdvantage(Section):
    """What a response adds to the chance that one of k is right (pass@k training)."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: Annotated[int, Field(ge=1, le=100_000)] = 4
    """Responses of which one has to be right; fewer than `algorithm.samples_per_prompt`."""


Advantage = Annotated[
    GrpoAdvantage | RlooAdvantage | ReinforcePlusPlusAdvantage | MaxrlAdvantage | GdpoAdvantage | PassAtKAdvantage,
    Field(discriminator="name"),
]
