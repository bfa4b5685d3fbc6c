"""The command line with Megatron-Core on the CPU: ``python -m tests.cluster.command train ...``, under torchrun or not.

``FAULT=rank:method:number:kind`` in the environment spoils a call of a rank's method, counted from 1.
"""

import os
import signal
import threading
from typing import Any

from beamline import cli
from beamline.learner.megatron import ranks
from beamline.runtime import megatron
from tests.cluster.ranks import on_cpu


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("told to fail")


def hang() -> None:
    """As a rank that waits for another over NCCL: no error will come."""
    threading.Event().wait()


KINDS = {"die": die, "fail": fail, "hang": hang}


def spoil(rank: int, method: str, number: int, kind: str) -> None:
    """Have a method do something else, once, if this process is that rank."""
    from beamline.learner.megatron.rank import Rank

    original, calls = getattr(Rank, method), []

    def spoiled(self: Rank, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == number and int(os.environ["RANK"]) == rank:
            KINDS[kind]()
        return original(self, *arguments)

    setattr(Rank, method, spoiled)


def main() -> None:
    on_cpu()
    ranks.FAILED_SECONDS = 5.0
    megatron.DEVICE = "cpu"
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        rank, method, number, kind = fault.split(":")
        spoil(int(rank), method, int(number), kind)
    cli.main()


if __name__ == "__main__":
    main()
