"""The embedded learner: the Hugging Face module on packed sequences, in this process."""

from beamline.learner.torch.learner import TorchLearner

__all__ = ["TorchLearner"]
