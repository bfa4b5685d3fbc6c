"""A setup: everything by which the evaluation of a token can differ, each a cause of its own."""

from dataclasses import dataclass
from typing import Literal

from beamline.config.schema import RunConfig
from beamline.model.layout import DType
from beamline.rollout.local import Numerics

Engine = Literal["module", "parity", "torch attention", "sampler"]
RoutesOf = Literal["own", "recorded", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Setup:
    """How log-probabilities of given tokens are computed. Its fields are in the order in which causes are switched.

    ``engine`` is the Hugging Face module, the learner's pass on kernels (with its own or with torch's attention), or
    the sampler. ``routes`` are those that the learner's routers choose, those that the sampler recorded, or those that
    a sampler in bfloat16 would choose. ``weights`` are those of both engines, or other ones.
    """

    packed: bool
    engine: Engine
    routes: RoutesOf
    dtype: DType
    kv_dtype: Literal["same", "float8_e4m3"]
    head_dtype: DType
    temperature: float
    weights: Literal["these", "other"]

    @property
    def numerics(self) -> Numerics:
        """The types of a sampler with this setup."""
        return Numerics(self.dtype, self.kv_dtype, self.head_dtype)


def learner_setup(config: RunConfig) -> Setup:
    """How a run's learner evaluates."""
    policy = config.policy
    return Setup(
        packed=True,
        engine="parity" if policy.parity else "module",
        routes="recorded" if policy.r3 else "own",
        dtype=policy.dtype,
        kv_dtype="same",
        head_dtype="float32",
        temperature=config.rollout.temperature,
        weights="these",
    )


def sampler_setup(config: RunConfig) -> Setup:
    """How a run's sampler evaluates."""
    rollout = config.rollout
    return Setup(
        packed=False,
        engine="sampler",
        routes="recorded",
        dtype=rollout.dtype,
        kv_dtype=rollout.kv_dtype,
        head_dtype=rollout.head_dtype,
        temperature=rollout.temperature,
        weights="these",
    )
