"""vLLM's engine core in this process: requests and completions as token ids, weights in place, sleep and wake.

Not the ``LLM`` class: its front end turns every token into Python objects (text, dictionaries of log-probabilities)
that nothing here looks at. What goes in and comes out are the records that vLLM's front ends exchange with the core.
"""

import difflib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.errors import BeamlineError
from beamline.model.beam import BeamShape
from beamline.records import Completion, Key, Request, Support
from beamline.records.codec import encode
from beamline.rollout.routes import RouteError, route_dtype
from beamline.rollout.vllm.messages import Asked, DeviceMemory, Loaded, Memory, Prepared, Started
from beamline.transfer.group import Meeting
from beamline.transfer.plan import Shares

_TAGS: dict[Memory, str] = {"weights": "weights", "cache": "kv_cache"}


class EngineArgumentError(BeamlineError, ValueError):
    """An argument that this vLLM does not know, with the nearest that it does."""


@dataclass(slots=True)
class _Open:
    """A request in flight, and what it has so far; ``routes`` are rows ``[n, layers, K]`` as they came."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[NDArray[np.unsignedinteger]] = field(default_factory=list)
    support: list[NDArray[np.int32]] = field(default_factory=list)


class VllmEngine:
    """Implements :class:`~beamline.rollout.vllm.process.Engine`.

    Args:
        arguments: of vLLM's ``EngineArgs``.

    Raises:
        EngineArgumentError: vLLM knows no such argument.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        began = time.monotonic()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core_client import InprocClient
        from vllm.v1.executor import Executor

        check_names(arguments, [each.name for each in fields(EngineArgs)])
        config = EngineArgs(**arguments).create_engine_config()
        self._shape = BeamShape.from_folder(Path(config.model_config.model))
        self._client = InprocClient(config, Executor.get_class(config), log_stats=False)
        self._core = self._client.engine_core
        self._open: dict[str, _Open] = {}
        self._names: dict[Key, str] = {}
        self._ended: list[Completion] = []
        self._counter, self._version, self._loading = 0, 0, False
        self._loads = 0  # of weights, so far
        self._drawn = 0  # tokens that no step has told of yet
        self.started = Started(
            versions={name: version(name) for name in ("vllm", "torch", "transformers")},
            device=self._on_ranks("beamline_device")[0],
            cache_tokens=config.cache_config.kv_cache_size_tokens or 0,
            seconds=time.monotonic() - began,
        )

    @property
    def busy(self) -> bool:
        """Whether stepping leads anywhere. While weights arrive it does not."""
        waiting = self._ended or self._open or self._core.batch_queue or self._core.scheduler.has_requests()
        return bool(waiting) and not self._loading

    def submit(self, asked: Sequence[Asked]) -> None:
        """Begin with requests.

        The salt keeps apart what was cached before a load: requests that go on under new weights hold old blocks.
        """
        from vllm.v1.engine import EngineCoreRequest

        for each in asked:
            self._counter += 1
            name = str(self._counter)
            self._open[name] = _Open(each.request)
            self._names[each.request.key] = name
            self._client.add_request(
                EngineCoreRequest(
                    request_id=name,
                    prompt_token_ids=each.request.prefix_ids.tolist(),
                    mm_features=None,
                    sampling_params=_sampling_params(each),
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=None,
                    cache_salt=str(self._loads),
                    data_parallel_rank=None,
                )
            )

    def step(self) -> tuple[list[Completion], int]:
        """One pass over the batch, or, with asynchronous scheduling, the outcome of an earlier one."""
        if not self._ended:
            self._advance()
        ended, drawn = self._ended, self._drawn
        self._ended, self._drawn = [], 0
        return ended, drawn

    def abort(self, keys: Collection[Key]) -> list[Completion]:
        """Stop requests; partials of those that have not ended."""
        names = [self._names[key] for key in keys if key in self._names]
        self._client.abort_requests(names)
        return [self._completion(name, aborted=True) for name in names]

    def prepare(self, shares: Shares, bucket_bytes: int) -> Prepared:
        """Have each rank find where its parts go."""
        return Prepared(self._on_ranks("beamline_prepare", [encode(rank) for rank in shares], bucket_bytes))

    def join(self, meeting: Meeting) -> None:
        """Have each rank meet the learner's in a group."""
        self._on_ranks("beamline_join", encode(meeting))

    def fill(self, bucket: int, memory: Sequence[Sequence[bytes]] | None) -> None:
        """Copy a bucket of each pair of ranks to where its parts belong; the first waits for the batch in flight."""
        if not self._loading:
            self._drain()
            self._loading = True
        self._on_ranks("beamline_fill", bucket, memory if memory is None else [list(rank) for rank in memory])

    def finish(self, version: int) -> Loaded:
        """Begin with new weights: nothing that was cached under the old ones is used again.

        Raises:
            RuntimeError: vLLM does not forget it, though no request holds it.
        """
        checksums = self._on_ranks("beamline_finish")
        if not self._open and not self._client.reset_prefix_cache():
            raise RuntimeError(f"weights of version {version}: vLLM kept what it had cached under the old ones")
        self._version, self._loading = version, False
        self._loads += 1
        return Loaded(checksums)

    def sleep(self, level: int) -> DeviceMemory:
        """1: the cache is given back; 2: the weights too.

        Raises:
            RuntimeError: requests are in flight.
        """
        if self._open:
            raise RuntimeError(f"sleep: {len(self._open)} requests are in flight")
        while self._core.batch_queue or self._core.scheduler.has_requests():  # of what has ended
            self._advance()
        return self._measured(self._release_all if level == 2 else self._release_cache)

    def wake(self, what: Collection[Memory]) -> DeviceMemory:
        """Take memory again."""
        asleep = self._core.model_executor.sleeping_tags
        tags = [tag for each, tag in _TAGS.items() if each in what and tag in asleep]
        memory = self._measured(lambda: self._client.wake_up(tags))
        if "weights" in tags:
            self._on_ranks("beamline_put_back")
        return memory

    def stop(self) -> None:
        """End the workers."""
        self._client.shutdown()

    def _advance(self) -> None:
        for output in self._client.get_output().outputs:
            self._take(output)

    def _take(self, output: Any) -> None:
        """Write down what a request has come to."""
        one = self._open.get(output.request_id)
        if one is None:  # it was aborted while this was on its way
            return
        new = output.new_token_ids
        self._drawn += len(new)
        if new:
            one.tokens += new
            one.versions += [self._version] * len(new)
            one.logprobs += output.new_logprobs.logprobs[: len(new), 0].tolist()
            if one.request.params.record_support:
                one.support += self._support(one.request, new, output.new_sampling_mask)
        if output.routed_experts is not None:
            one.routes.append(output.routed_experts)
        if output.finished:
            reason = str(output.finish_reason)
            if reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended {one.request.key} with {reason!r}: {output.error}")
            self._ended.append(self._completion(output.request_id, aborted=False))

    def _support(self, request: Request, tokens: Sequence[int], mask: Any) -> list[NDArray[np.int32]]:
        """The ids that each of some tokens was drawn from; empty where that is the whole vocabulary."""
        if request.params.temperature == 0:  # which is no restriction to vLLM
            return [np.array([token], dtype=np.int32) for token in tokens]
        borders = np.array([0, len(mask.token_ids)]) if mask.offsets is None else mask.offsets
        entries = [mask.token_ids[a:b].astype(np.int32) for a, b in pairwise(borders)]
        return [entry if len(entry) < self._shape.vocab_size else entry[:0] for entry in entries]

    def _completion(self, name: str, aborted: bool) -> Completion:
        """What a request has come to; it is forgotten."""
        one = self._open.pop(name)
        request, tokens = one.request, np.array(one.tokens, dtype=np.int32)
        del self._names[request.key]
        certain = request.params.temperature == 0  # the most likely token was
        stopped = bool(one.tokens) and one.tokens[-1] in request.params.stop_ids
        return Completion(
            key=request.key,
            token_ids=tokens,
            logprobs=np.zeros(len(tokens), np.float32) if certain else np.array(one.logprobs, np.float32),
            versions=np.array(one.versions, dtype=np.int32),
            routes=self._routes(one),
            finish="abort" if aborted else "stop" if stopped else "length",
            support=Support.of(one.support) if request.params.record_support else None,
        )

    def _routes(self, one: _Open) -> NDArray[np.unsignedinteger] | None:
        """Experts ``[P + T - 1, L, K]`` of MoE layers; vLLM's rows are of all layers, 0 in dense ones.

        Raises:
            RouteError: a row is missing, or a dense layer has experts: the rows are of other layers than they say.
        """
        if not one.routes or not one.tokens or not self._shape.moe_layers:
            return None
        rows, wanted = np.concatenate(one.routes), len(one.request.prefix_ids) + len(one.tokens) - 1
        layers = self._shape.num_hidden_layers
        if rows.shape[:2] != (wanted, layers):
            raise RouteError(f"{one.request.key}: vLLM returned routes {rows.shape}, not of {wanted} tokens x {layers}")
        dense = [layer for layer in range(layers) if layer not in self._shape.moe_layers]
        if rows[:, dense].any():
            raise RouteError(f"{one.request.key}: vLLM returned experts for dense layers {dense}")
        return np.ascontiguousarray(rows[:, list(self._shape.moe_layers)].astype(route_dtype(self._shape)))

    def _drain(self) -> None:
        """Take in the batches in flight, without scheduling others: they were begun under the weights that go."""
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self._core.scheduler
        before = scheduler.pause_state
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            self._advance()
        scheduler.set_pause_state(before)

    def _release_cache(self) -> None:
        if "kv_cache" not in self._core.model_executor.sleeping_tags:  # vLLM refuses to give it back twice
            self._core.pause_scheduler("abort")
            self._client.release_kv_cache_memory()

    def _release_all(self) -> None:
        asleep = self._core.model_executor.sleeping_tags
        if "weights" in asleep:
            return
        if "kv_cache" in asleep:  # vLLM takes it that nothing sleeps yet
            self._client.wake_up(["kv_cache"])
        self._on_ranks("beamline_keep")
        self._client.sleep(2)

    def _measured(self, change: Any) -> DeviceMemory:
        before, began = self._on_ranks("beamline_memory")[0], time.monotonic()
        change()
        seconds = time.monotonic() - began
        return DeviceMemory(before, self._on_ranks("beamline_memory")[0], seconds)

    def _on_ranks(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = self._core.collective_rpc(method, args=args)
        return results


def check_names(arguments: dict[str, Any], known: Sequence[str]) -> None:
    """Make sure that vLLM has arguments of these names.

    Raises:
        EngineArgumentError: it has not.
    """
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise EngineArgumentError(f"rollout.vllm.engine_args.{name}: vLLM has no such argument{meant}")


def _sampling_params(asked: Asked) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = asked.request.params
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        stop_token_ids=list(params.stop_ids),
        seed=asked.seed,
        logprobs=0,  # of the token that was drawn, and of no other
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.DELTA,
    )
