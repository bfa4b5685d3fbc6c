"""The starter model: a Beam of 1.5 M parameters with every trait of the big one, and the recipe that made it."""

from pathlib import Path

STARTER = Path(__file__).parent / "data"
"""Folder of the packaged starter model."""
