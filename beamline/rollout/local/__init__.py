"""The embedded sampler: compiled kernels, in this process, continuous batching over preallocated cache slots."""

from beamline.rollout.local.beam import Numerics
from beamline.rollout.local.sampler import LocalSampler

__all__ = ["LocalSampler", "Numerics"]
