"""What vLLM calls in each of its processes before it builds a model (entry point ``vllm.general_plugins``)."""

import os

ACTIVE = "BEAMLINE_ENGINE"
"""Environment variable of engine processes. In any other process that uses vLLM the plugin changes nothing."""


def register() -> None:
    """Apply the patches of :mod:`beamline.rollout.vllm.patches`, where this is an engine process of ours."""
    if os.environ.get(ACTIVE) == "1":
        from beamline.rollout.vllm.patches import apply

        apply()
