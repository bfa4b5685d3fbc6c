"""An engine core without vLLM, for the engine that drives it: it does as it is told, and remembers what was done."""

import enum
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.vllm import engine
from beamline.rollout.vllm.engine import VllmEngine
from beamline.rollout.vllm.messages import Asked

STOP = 9


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


@dataclass
class EngineArgs:
    """Has three arguments."""

    model: str
    max_num_seqs: int = 1
    enforce_eager: bool = False

    def create_engine_config(self) -> SimpleNamespace:
        return SimpleNamespace(
            model_config=SimpleNamespace(model=self.model), cache_config=SimpleNamespace(kv_cache_size_tokens=4096)
        )


class Record(SimpleNamespace):
    """A request or its sampling parameters: what was given by name."""


class Core:
    """Gives out batches in the order in which they are put into ``batches``, ``depth`` of them under way at a time.

    ``log`` has everything that was done to it: what came out, and what its ranks and its memory were told.
    """

    def __init__(self, depth: int) -> None:
        self.batches: deque[list[Any]] = deque()
        self.batch_queue: deque[list[Any]] | None = deque() if depth > 1 else None
        self.depth, self.log = depth, list[tuple[Any, ...]]()
        self.added: list[Record] = []
        self.scheduler = SimpleNamespace(
            pause_state=PauseState.UNPAUSED,
            set_pause_state=lambda state: setattr(self.scheduler, "pause_state", state),
            has_requests=lambda: self._may_schedule(),
        )
        self.model_executor = SimpleNamespace(sleeping_tags=set[str]())
        self.answers: dict[str, Callable[..., list[Any]]] = {
            "beamline_device": lambda: ["a GPU"],
            "beamline_prepare": lambda *_: [["GPU-0"]],
            "beamline_join": lambda *_: [None],
            "beamline_fill": lambda *_: [None],
            "beamline_finish": lambda: [[7]],
            "beamline_memory": lambda: [100],
            "beamline_keep": lambda: [None],
            "beamline_put_back": lambda: [None],
        }

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.log.append((method, *args))
        return self.answers[method](*args)

    def pause_scheduler(self, mode: str) -> None:
        self.log.append(("pause", mode))

    def output(self) -> list[Any]:
        """As vLLM: the next batch is begun while an earlier one is under way, whose outcome comes first."""
        if self.batch_queue is None:
            return self._logged(self.batches.popleft() if self._may_schedule() else [])
        if self._may_schedule():
            self.batch_queue.append(self.batches.popleft())
            if len(self.batch_queue) < self.depth:
                return []
        return self._logged(self.batch_queue.popleft() if self.batch_queue else [])

    def _may_schedule(self) -> bool:
        return bool(self.batches) and self.scheduler.pause_state != PauseState.PAUSED_ALL

    def _logged(self, outputs: list[Any]) -> list[Any]:
        self.log.append(("output", *(output.request_id for output in outputs)))
        return outputs


class Client:
    """Stands for ``InprocClient``."""

    resets = True
    """What the prefix cache answers when it is told to forget."""

    def __init__(self, config: Any, executor: Any, log_stats: bool, depth: int = 1) -> None:
        self.engine_core = Core(depth)

    def get_output(self) -> SimpleNamespace:
        return SimpleNamespace(outputs=self.engine_core.output())

    def add_request(self, request: Record) -> None:
        self.engine_core.added.append(request)

    def abort_requests(self, names: list[str]) -> None:
        self._log("abort", *names)

    def reset_prefix_cache(self) -> bool:
        self._log("reset_prefix_cache")
        return self.resets

    def release_kv_cache_memory(self) -> None:
        self._log("release_kv_cache_memory")

    def sleep(self, level: int) -> None:
        self._log("sleep", level)

    def wake_up(self, tags: list[str]) -> None:
        self._log("wake_up", *tags)

    def shutdown(self) -> None:
        self._log("shutdown")

    def _log(self, *what: Any) -> None:
        self.engine_core.log.append(what)


@dataclass(frozen=True)
class Bench:
    """The engine, and the core that it believes to be vLLM's."""

    engine: VllmEngine
    client: Client

    @property
    def core(self) -> Core:
        return self.client.engine_core

    def done(self, *ignored: str) -> list[tuple[Any, ...]]:
        """What was done since the last look, but for what is of these names."""
        log, self.core.log[:] = self.core.log[:], []
        return [each for each in log if each[0] not in ignored]


def bench(patch: pytest.MonkeyPatch, depth: int = 1, **arguments: Any) -> Bench:
    """The engine with a core that has ``depth`` batches under way; the modules of vLLM are stand-ins."""
    modules: dict[str, dict[str, Any]] = {
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.v1.engine.core_client": {"InprocClient": lambda *args, **kwargs: Client(*args, **kwargs, depth=depth)},
        "vllm.v1.executor": {"Executor": SimpleNamespace(get_class=lambda config: "executor")},
        "vllm.v1.engine": {"EngineCoreRequest": Record},
        "vllm.sampling_params": {"SamplingParams": Record, "RequestOutputKind": SimpleNamespace(DELTA="delta")},
        "vllm.v1.core.sched.interface": {"PauseState": PauseState},
    }
    for name, attributes in modules.items():
        patch.setitem(sys.modules, name, SimpleNamespace(**attributes))  # type: ignore[misc]
    patch.setattr(engine, "version", lambda name: f"{name}'s")
    made = VllmEngine(arguments)
    return Bench(made, made._client)


@dataclass
class Output:
    """Stands for ``EngineCoreOutput``: what has become of a request in one batch."""

    request_id: str
    new_token_ids: list[int]
    logprobs: Sequence[float] = ()
    routed_experts: NDArray[Any] | None = None
    new_sampling_mask: Any = None
    finish_reason: str | None = None
    error: Any = None
    new_logprobs: Any = field(init=False)

    def __post_init__(self) -> None:
        values = self.logprobs or [-0.5] * len(self.new_token_ids)
        # The drawn token comes first; a place without a token may follow.
        self.new_logprobs = SimpleNamespace(logprobs=np.array([[value, -9.0] for value in [*values, -8.0]], np.float32))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def mask(*entries: Sequence[int]) -> SimpleNamespace:
    """Stands for ``SamplingMaskLists``; of a single place it has no offsets."""
    ids = np.array([token for entry in entries for token in entry], np.int64)
    sizes = np.cumsum([0, *map(len, entries)])
    return SimpleNamespace(token_ids=ids, offsets=None if len(entries) == 1 else sizes)


def asked(problem: str = "a", prompt: int = 3, seed: int = 5, max_tokens: int = 4, **params: Any) -> Asked:
    params = {"stop_ids": (STOP,)} | params
    request = Request(
        Key("train", 2, problem, 0), np.arange(prompt, dtype=np.int32), SamplingParams(max_tokens, **params)
    )
    return Asked(request, seed)


def steps(at: Bench, *batches: list[Output]) -> list[Completion]:
    """Everything that ends with these batches."""
    at.core.batches.extend(batches)
    ended: list[Completion] = []
    while at.engine.busy and (at.core.batches or at.core.batch_queue or at.engine._ended):
        ended += at.engine.step()[0]
    return ended
