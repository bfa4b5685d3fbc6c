"""Beamline: reinforcement learning of large mixture-of-experts language models on checkable tasks."""

import os

__version__ = "0.1.0"

# Read once, when torch loads its thread pool (GNU OpenMP). By default its threads spin for a while whenever they wait,
# which makes a process many times slower as soon as another one wants a core; with a short spin, two processes share
# the cores evenly, and one alone is about as fast as before.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
