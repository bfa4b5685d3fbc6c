"""The embedded learner: packed sequences, in this process."""

from beamline.learner.torch.learner import TorchLearner

__all__ = ["TorchLearner"]
