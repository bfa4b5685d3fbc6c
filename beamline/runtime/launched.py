"""What torchrun says of this process to it: as one of how many it was started, and which. Imports no torch."""

import os
from dataclasses import dataclass

from beamline.errors import BeamlineError

_MEND = "start all processes with torchrun, which sets it, or unset RANK and WORLD_SIZE for one process alone"


class LaunchError(BeamlineError):
    """Processes that were not started as what they are to do needs it."""


@dataclass(frozen=True, slots=True)
class Launched:
    """This process's number among all of them, and among those of this machine, on which it decides about the GPU."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def launched() -> Launched:
    """What torchrun says of this process by environment variables; one process alone without them.

    Raises:
        LaunchError: one of them is missing, or its value is impossible.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Launched()
    size = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0, size - 1)
    if size == 1:
        return Launched()
    local_size = _number("LOCAL_WORLD_SIZE", 1, size)
    found = Launched(rank, size, _number("LOCAL_RANK", 0, local_size - 1), local_size)
    _number("MASTER_PORT", 1, 65535)
    _value("MASTER_ADDR")
    return found


def processes() -> int:
    """How many processes torchrun has started; 1 without it."""
    return launched().size


def first() -> bool:
    """Whether this is the first of them: the one that runs the loop, writes the run's folder, and prints."""
    return launched().rank == 0


def _number(name: str, least: int, most: int | None = None) -> int:
    value = _value(name)
    if not (value.isdecimal() and least <= int(value) and (most is None or int(value) <= most)):
        wanted = f"a number from {least}{' on' if most is None else f' to {most}'}"
        raise LaunchError(f"the environment variable {name}={value} is not {wanted}: {_MEND}")
    return int(value)


def _value(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        known = (f"{each}={os.environ[each]}" for each in ("RANK", "WORLD_SIZE") if each in os.environ)
        raise LaunchError(f"the environment variable {name} is missing beside {' and '.join(known)}: {_MEND}")
    return value
