"""An engine process without vLLM, for tests: ``python tests/stub_engine.py [--fault NAME] [--after STEPS] ... FD``.

Its tokens are a function of a request's seed and the position alone, whatever the weights. It fails as it is told.
"""

import argparse
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beamline.records import Completion, Finish, Key
from beamline.records.random import uniforms
from beamline.rollout.vllm.messages import Asked, DeviceMemory, Loaded, Memory, Prepared, Started
from beamline.rollout.vllm.process import attach, serve
from beamline.transfer.group import Meeting
from beamline.transfer.plan import Shares

PROGRAM = (sys.executable, str(Path(__file__)))
VOCABULARY, LAYERS, EXPERTS = 64, 2, 4
MEMORY = {"weights": 600, "cache": 400}  # bytes, of a device that there is not

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 1.17 GiB is free."
)


def token(seed: int, position: int) -> int:
    """The token that a request with this seed has at this position of its sequence, the prefix counted."""
    return int(uniforms(seed, ("stub",), position, position + 1)[0] * VOCABULARY)


def log(level: str, place: str, text: str) -> None:
    """A record as vLLM's logger writes it."""
    prefix = f"(EngineCore pid={os.getpid()}) {level} 12-01 11:00:00 [{place}] "
    print("\r\n".join(prefix + line for line in text.split("\n")), flush=True)


class StubEngine:
    """Implements :class:`beamline.rollout.vllm.process.Engine`: one token for each request in a step."""

    def __init__(self, options: argparse.Namespace, ranks: int = 1) -> None:
        self._options, self._steps, self._version = options, 0, 0
        self._open: dict[Key, tuple[Asked, list[int], list[int]]] = {}
        self._awake = set(MEMORY)
        self._checksums: list[list[int]] = [[] for _ in range(ranks)]
        self.started = Started({"stub": "1"}, "none", 1 << 20, 0.0)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def submit(self, asked: Sequence[Asked]) -> None:
        self._open.update({each.request.key: (each, [], []) for each in asked})

    def step(self) -> tuple[list[Completion], int]:
        if self._options.fault in FAULTS and self._steps >= self._options.after:
            FAULTS[self._options.fault]()
        self._steps += 1
        drawn, ended = len(self._open), []
        for key, (asked, tokens, versions) in list(self._open.items()):
            tokens.append(token(asked.seed, len(asked.request.prefix_ids) + len(tokens)))
            versions.append(self._version)
            if tokens[-1] in asked.request.params.stop_ids:
                ended.append(self._end(key, "stop"))
            elif len(tokens) == asked.request.params.max_tokens:
                ended.append(self._end(key, "length"))
        return ended, drawn

    def abort(self, keys: Collection[Key]) -> list[Completion]:
        return [self._end(key, "abort") for key in keys if key in self._open]

    def prepare(self, shares: Shares, bucket_bytes: int) -> Prepared:
        self._checksums = [[] for _ in shares]
        return Prepared([[] for _ in shares])

    def join(self, meeting: Meeting) -> None:
        raise NotImplementedError

    def fill(self, bucket: int, memory: Sequence[Sequence[bytes]] | None) -> None:
        assert memory is not None
        for checksums, given in zip(self._checksums, memory, strict=True):
            checksums.append(zlib.crc32(b"".join(given)))

    def finish(self, version: int) -> Loaded:
        self._version = version
        checksums, self._checksums = self._checksums, [[] for _ in self._checksums]
        return Loaded(checksums)

    def sleep(self, level: int) -> DeviceMemory:
        return self._memory(self._awake - ({"cache"} if level == 1 else set(MEMORY)))

    def wake(self, what: Collection[Memory]) -> DeviceMemory:
        return self._memory(self._awake | set(what))

    def stop(self) -> None:
        if self._options.fault == "stubborn":
            hang()

    def _memory(self, awake: set[str]) -> DeviceMemory:
        before, self._awake = self._awake, awake
        return DeviceMemory(sum(MEMORY[each] for each in before), sum(MEMORY[each] for each in awake), 0.0)

    def _end(self, key: Key, finish: Finish) -> Completion:
        asked, tokens, versions = self._open.pop(key)
        rows = len(asked.request.prefix_ids) + len(tokens) - 1
        return Completion(
            key=key,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -np.log(VOCABULARY), np.float32),
            versions=np.array(versions, np.int32),
            routes=np.zeros((rows, LAYERS, EXPERTS), np.uint8) if tokens else None,
            finish=finish,
        )


def die() -> None:
    raise RuntimeError("the stub was told to die")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_with_worker() -> None:
    """Leave a child behind that holds all that a forked worker of vLLM would hold."""
    worker = os.fork()
    if not worker:
        hang()
    log("INFO", "stub.py:1", f"worker {worker}")
    kill()


def hang() -> None:
    log("INFO", "stub.py:1", "the stub hangs")
    threading.Event().wait()


def out_of_memory() -> None:
    """What vLLM's engine core logs when a step fails, and the end."""
    log(
        "ERROR",
        "core.py:1586",
        "EngineCore encountered a fatal error.\nTraceback (most recent call last):\n"
        '  File "vllm/v1/engine/core.py", line 1573, in run_engine_core\n    engine_core.run_busy_loop()\n'
        '  File "vllm/model_executor/models/beam.py", line 120, in forward\n    hidden = self.experts(hidden)\n'
        f"             ^^^^^^^^^^^^^^^^^^^^\n{OUT_OF_MEMORY}",
    )
    raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


FAULTS: dict[str, Callable[[], None]] = {
    "die": die,
    "kill": kill,
    "kill-with-worker": kill_with_worker,
    "hang": hang,
    "out-of-memory": out_of_memory,
}


def build(options: argparse.Namespace, arguments: dict[str, Any]) -> StubEngine:
    """The engine; ``arguments`` are ``ranks``, and ``until``: the file to wait for in a slow start."""
    if options.fault == "refuse":
        raise ValueError(f"the stub refuses to start with {sorted(arguments)}")
    if options.fault == "hang-in-start":
        hang()
    if options.fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fault == "slow":
        log("INFO", "gpu_model_runner.py:4979", "Starting to load model stub...")
        while not Path(arguments["until"]).exists():
            time.sleep(0.005)
    return StubEngine(options, arguments.get("ranks", 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=[*FAULTS, "refuse", "hang-in-start", "slow", "stubborn"])
    parser.add_argument("--after", type=int, default=0, help="steps before the fault")
    parser.add_argument("descriptor", type=int)
    options = parser.parse_args()
    serve(attach(options.descriptor), lambda arguments: build(options, arguments))


if __name__ == "__main__":
    main()
