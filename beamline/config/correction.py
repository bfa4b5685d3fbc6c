"""What is done about a learner that does not compute what the sampler did; ``rho = pi_old / mu``."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from beamline.config.section import Bound, Section


class Range(Section):
    """Base of the rules that keep what lies from one bound to another, both included."""

    low: Bound
    high: Bound

    @model_validator(mode="after")
    def _is_ordered(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be smaller than high={self.high}")
        return self


class NoWeight(Section):
    """Tokens weigh 1."""

    name: Literal["none"] = "none"


class TruncatedWeight(Section):
    """Truncated importance sampling: tokens weigh rho, at most `cap`."""

    name: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Whose ratio it is: each token's, or the product over its sequence."""
    cap: Bound = 2.0
    """Largest weight."""


class MaskedWeight(Section):
    """Masked importance sampling: tokens weigh rho, or nothing where it is over `cap`."""

    name: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = "token"
    """Whose ratio it is: each token's, or the product over its sequence."""
    cap: Bound = 2.0
    """Largest ratio that is kept."""


class IcepopWeight(Range):
    """IcePop: tokens weigh rho, or nothing where it is outside of `low` to `high`."""

    name: Literal["icepop"] = "icepop"
    low: Bound = 0.5
    """Smallest ratio that is kept."""
    high: Bound = 5.0
    """Largest ratio that is kept."""


class NoMask(Section):
    """Nothing is left out."""

    name: Literal["none"] = "none"


class GeometricMask(Range):
    """A sequence is left out where the geometric mean of rho over its tokens is outside of `low` to `high`."""

    name: Literal["geometric"] = "geometric"
    low: Bound = 0.99
    """Smallest mean that is kept."""
    high: Bound = 1.01
    """Largest mean that is kept."""


class ProductMask(Range):
    """A sequence is left out where the product of rho over its tokens is outside of `low` to `high`."""

    name: Literal["product"] = "product"
    low: Bound = 0.5
    """Smallest product that is kept."""
    high: Bound = 2.0
    """Largest product that is kept."""


class OutlierVeto(Range):
    """A sequence is left out where rho of any of its tokens is outside of `low` to `high`."""

    name: Literal["outlier"] = "outlier"
    low: Bound = 1e-4
    """Smallest ratio that is tolerated."""
    high: Bound = 100.0
    """Largest ratio that is tolerated."""


class CorrectionConfig(Section):
    """What is done about differences between sampler and learner, decided before the update; rho = pi_old / mu.

    Every rule judges the whole response, so none depends on another; what any of them leaves out is left out.
    """

    weight: Annotated[NoWeight | TruncatedWeight | MaskedWeight | IcepopWeight, Field(discriminator="name")] = (
        NoWeight()
    )
    """How much a token counts."""
    sequence_mask: Annotated[NoMask | GeometricMask | ProductMask, Field(discriminator="name")] = NoMask()
    """Which sequences are left out as a whole."""
    veto: Annotated[NoMask | OutlierVeto, Field(discriminator="name")] = NoMask()
    """Which sequences are left out for a single token."""

    @property
    def active(self) -> bool:
        """Whether any rule is on."""
        return self.masks or self.weight.name != "none"

    @property
    def masks(self) -> bool:
        """Whether a rule is on that may leave tokens out."""
        return self.weight.name in ("mis", "icepop") or {self.sequence_mask.name, self.veto.name} != {"none"}
