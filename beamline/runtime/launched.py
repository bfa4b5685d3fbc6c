"""What torchrun says of this process to it: as one of how many it was started, and which. Imports no torch."""

import os


def launched() -> bool:
    """Whether torchrun has started this process, be it alone."""
    return "RANK" in os.environ


def processes() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes()))


def first() -> bool:
    """Whether this is the first of them: the one that runs the loop, writes the run's folder, and prints."""
    return os.environ.get("RANK", "0") == "0"


def number_here() -> int:
    """Its number among those of this machine, which is that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
