"""Beamline: reinforcement learning of large mixture-of-experts language models on checkable tasks."""

import os

__version__ = "0.1.0"

# Read once, when torch loads its thread pool. Threads that spin while they wait make a process many times slower as
# soon as another one wants a core, and bring little where none does.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
