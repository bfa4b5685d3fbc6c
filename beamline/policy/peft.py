"""Adapters as files in PEFT's format."""

from pathlib import Path

from beamline.policy.lora import Adapters


def load(adapters: Adapters, folder: Path) -> None:
    """Fill adapters with those of a folder."""
    raise NotImplementedError
