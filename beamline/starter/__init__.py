"""The starters: Beams of 1.5 M parameters with every trait of the big one, and the recipe that made them."""

from pathlib import Path

STARTER = Path(__file__).parent / "data"
"""Folder of the packaged starter model, which adds numbers."""

STARTERS = {"starter": STARTER, "starter-math": Path(__file__).parent / "math"}
"""The packaged models by the name that ``model.path`` takes; ``starter-math`` solves problems worded in English."""
