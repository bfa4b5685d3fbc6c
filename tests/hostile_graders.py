"""Graders that do what a response asks for: hang, crash, take all memory ... Grading workers import them by path.

The grader ``act`` performs the act that the response names, with the answer as its argument, and judges any other
response by comparing it with the answer. What an act returns is ``parsed``.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from beamline.tasks.graders.verdict import Verdict

CALLED: list[str] = []  # names of graders, in this process
HELD: list[bytearray] = []


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        os._exit(5)


def hang(_: str) -> None:
    while True:
        pass


def spin(seconds: str) -> None:
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        pass


def spin_and_tell(argument: str) -> None:
    seconds, path = argument.split(" ", 1)
    spin(seconds)
    Path(path).touch()


def hang_with_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    Path(path + ".part").write_text(str(child.pid))
    os.replace(path + ".part", path)
    hang("")


def tell_and_hang(path: str) -> None:
    Path(path).touch()
    hang("")


def stop(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(message: str) -> None:
    raise ArithmeticError(message)


def recurse(argument: str) -> None:
    recurse(argument)


def overflow(_: str) -> None:
    """Recurse through C until the stack is full; newer Pythons notice."""
    sys.setrecursionlimit(10**9)
    sorted([0], key=overflow)  # type: ignore[arg-type]


def swallow(_: str) -> None:
    raise Unspeakable


def take_at_once(_: str) -> None:
    bytearray(1 << 40)


def take_bit_by_bit(_: str) -> None:
    taken = []
    while True:
        taken.append(bytearray(1 << 22))


def leak(megabytes: str) -> str:
    HELD.append(bytearray(int(megabytes) << 20))
    return str(os.getpid())


def chatter(_: str) -> str:
    garbage = "\x00garbage\n" * 200_000  # more than any pipe holds
    print(garbage)
    print(garbage, file=sys.stderr)
    warnings.warn("garbage", stacklevel=1)
    os.write(1, b"\xff" * 1000)
    return "said"


ACTS: dict[str, Callable[[str], str | None]] = {
    "hang": hang,
    "spin": spin,
    "spin and tell": spin_and_tell,
    "tell and hang": tell_and_hang,
    "hang with child": hang_with_child,
    "stop": stop,
    "fail": fail,
    "recurse": recurse,
    "overflow": overflow,
    "swallow": swallow,
    "take at once": take_at_once,
    "take bit by bit": take_bit_by_bit,
    "leak": leak,
    "chatter": chatter,
    "exit": lambda code: os._exit(int(code)),
    "sys.exit": lambda code: sys.exit(int(code)),
    "interrupt": lambda _: signal.raise_signal(signal.SIGINT),  # type: ignore[func-returns-value]
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),  # type: ignore[func-returns-value]
    "segfault": lambda _: str(ctypes.string_at(0)),
    "no verdict": lambda _: 7,  # type: ignore[dict-item,return-value]
    "large": lambda size: "x" * int(size),
    "pid": lambda _: str(os.getpid()),
    "session": lambda _: str(os.getsid(0)),
    "hash": lambda text: str(hash(text)),
    "modules": lambda _: " ".join(sorted(sys.modules)),
    "called": lambda _: " ".join(CALLED),
}


def act(response: str, answer: str) -> Verdict:
    CALLED.append("act")
    if response in ACTS:
        return Verdict(False, ACTS[response](answer))
    return Verdict(response == answer, response or None)


def slow_at_first(response: str, answer: str) -> Verdict:
    if "slow_at_first" not in CALLED:
        spin("1.0")
    CALLED.append("slow_at_first")
    return Verdict(response == answer, None)


def broken(response: str, answer: str) -> Verdict:
    print("looking for the parser", file=sys.stderr, flush=True)
    raise ImportError("there is no parser")


def never_ready(response: str, answer: str) -> Verdict:
    raise SystemExit(hang(""))


GRADERS = {"act": act, "slow_at_first": slow_at_first, "broken": broken, "never_ready": never_ready}
