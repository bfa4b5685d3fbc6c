"""The loss of an update as data, so that it travels to every rank."""

from dataclasses import dataclass

from beamline.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Everything a rank has to know to compute the loss of a mini-batch.

    ``response_limit`` is the most tokens that a response may have. ``on_policy`` says that the weights are still those
    that sampled: then ``pi_old`` is ``pi`` itself, detached, and no pass is spent on it. ``first`` says that it is the
    first update of the process by the weights that sampled, which the guards look at.
    """

    algorithm: AlgorithmConfig
    response_limit: int
    seed: int
    on_policy: bool
    first: bool = False
