"""As one of how many processes this one was started, by torchrun or alone. Imports no torch."""

import os


def processes() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def first() -> bool:
    """Whether this is the first of them: the one that runs the loop, writes the run's folder, and prints."""
    return os.environ.get("RANK", "0") == "0"
