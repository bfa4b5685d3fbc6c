"""Beamline: reinforcement learning of large mixture-of-experts language models on checkable tasks."""

__version__ = "0.1.0"
