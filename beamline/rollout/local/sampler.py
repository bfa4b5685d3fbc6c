"""The embedded sampler: continuous batching in this process."""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from beamline.model.beam import BeamShape, tensors
from beamline.model.layout import DType, Layout, TensorSlice, WeightKind
from beamline.records import Completion, Key, Request
from beamline.rollout.local.beam import BeamDecoder
from beamline.rollout.local.cache import SlotCache
from beamline.rollout.local.draw import draw
from beamline.rollout.local.slots import Slots
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan

_ADMIT_SHARE = 8  # new sequences enter once 1/8 of the slots are free: a prefill of a few rows costs as much as a step


class LocalSampler:
    """Samples with torch on the CPU. Work is done inside :meth:`poll`.

    Args:
        shape: the model.
        dtype: type of weights, activations and cache.
        rope_theta: base of the rotary embedding of sliding layers.
        slots: sequences decoded together.
        positions: most tokens of a sequence, prompt and response.
        seed: seed of the run; with a request's key it fixes the random stream.
        channel: where weights come from.
        threads: CPU threads while it works.

    Raises:
        ValueError: ``positions`` is more than the model's context.
    """

    def __init__(
        self,
        shape: BeamShape,
        dtype: DType,
        rope_theta: float,
        slots: int,
        positions: int,
        seed: int,
        channel: LocalChannel,
        threads: int = 1,
    ) -> None:
        if positions > shape.max_position_embeddings:
            raise ValueError(f"{positions} positions exceed the model's context of {shape.max_position_embeddings}")
        self._shape, self._dtype, self._theta = shape, dtype, rope_theta
        self._capacity, self._positions, self._seed, self._channel = slots, positions, seed, channel
        self._threads = threads
        self._decoder: BeamDecoder | None = None
        self._cache: SlotCache | None = None
        self._version: int | None = None
        self._waiting: deque[Request] = deque()
        self._ready: list[Completion] = []
        self._in_flight: set[Key] = set()
        self.wake(["weights", "cache"])

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; see :class:`~beamline.rollout.sampler.Sampler`."""
        self._require_awake()
        new = set[Key]()
        for request in requests:
            self._check(request)
            if request.key in self._in_flight or request.key in new:
                raise ValueError(f"submit: {request.key} is in flight already")
            new.add(request.key)
        self._in_flight |= new
        self._waiting.extend(requests)

    @torch.inference_mode()
    def poll(self, timeout: float) -> list[Completion]:
        """Decode until something finishes, nothing is left, or ``timeout`` seconds are over (at least one step)."""
        deadline = time.monotonic() + timeout
        with _threads(self._threads):
            while not self._ready and (self._waiting or self._slots.requests):
                self._step()
                if time.monotonic() >= deadline:
                    break
        ready, self._ready = self._ready, []
        self._in_flight -= {completion.key for completion in ready}
        return ready

    @torch.inference_mode()
    def abort(self, keys: Collection[Key]) -> list[Completion]:
        """Stop requests and return what they have so far."""
        wanted = set(keys)
        unknown = wanted - self._in_flight
        if unknown:
            raise KeyError(f"abort: {min(unknown)} is not in flight")
        finished = [completion for completion in self._ready if completion.key in wanted]
        self._ready = [completion for completion in self._ready if completion.key not in wanted]
        unstarted = [request for request in self._waiting if request.key in wanted]
        self._waiting = deque(request for request in self._waiting if request.key not in wanted)
        self._in_flight -= wanted
        return finished + self._end_active(wanted) + [_nothing(request) for request in unstarted]

    def layout(self, kind: WeightKind) -> Layout:
        """One rank that holds everything."""
        if kind != "full":
            raise ValueError(f"the local sampler holds full weights only, not {kind!r}")
        specs = tensors(self._shape, self._dtype)
        return Layout((tuple(TensorSlice.whole(spec.name, spec.dtype, spec.shape) for spec in specs),))

    @torch.inference_mode()
    def receive(self, plan: TransferPlan, version: int, unfinished: Literal["keep", "abort"]) -> None:
        """Copy new weights in place."""
        if self._decoder is None:
            raise RuntimeError("receive: the sampler sleeps without weights; wake(['weights']) first")
        if unfinished == "abort":
            partials = self.abort(self._in_flight)  # takes what is ready too
            self._ready = partials
            self._in_flight = {completion.key for completion in partials}
        self._channel.receive(plan, self._decoder.weights)
        self._version = version

    def sleep(self, level: int) -> None:
        """Free the cache (1), and the weights too (2)."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level must be 1 or 2, not {level}")
        if self._in_flight:
            raise RuntimeError(f"sleep: {len(self._in_flight)} requests are in flight; poll or abort them first")
        self._cache = None
        if level == 2:
            self._decoder, self._version = None, None

    def wake(self, what: Collection[Literal["weights", "cache"]]) -> None:
        """Allocate what sleeps."""
        if "weights" in what and self._decoder is None:
            self._decoder = BeamDecoder(self._shape, self._dtype, self._theta, self._positions)
        if "cache" in what and self._cache is None:
            if self._decoder is None:
                raise RuntimeError("wake: the cache needs the weights; wake(['weights']) first")
            self._cache = self._decoder.new_cache(self._capacity, self._positions)
            layers, chosen = len(self._shape.moe_layers), self._shape.num_experts_per_tok
            self._slots = Slots(self._capacity, self._positions, layers, chosen, self._decoder.route_dtype)

    def _require_awake(self) -> tuple[BeamDecoder, SlotCache, int]:
        if self._decoder is None or self._cache is None:
            raise RuntimeError("the sampler sleeps; wake(['weights', 'cache']) first")
        if self._version is None:
            raise RuntimeError("the sampler has no weights yet; send and receive them first")
        return self._decoder, self._cache, self._version

    def _check(self, request: Request) -> None:
        ids, total = request.prefix_ids, len(request.prefix_ids) + request.params.max_tokens
        if not len(ids):
            raise ValueError(f"submit: {request.key} has an empty prefix")
        if total > self._positions:
            raise ValueError(
                f"submit: {request.key} may grow to {total} tokens ({len(ids)} given + {request.params.max_tokens} "
                f"new), but the sampler has room for {self._positions}"
            )
        named = np.concatenate([ids, np.array(request.params.stop_ids, dtype=np.int64)])
        unknown = named[(named < 0) | (named >= self._shape.vocab_size)]
        if len(unknown):
            raise ValueError(
                f"submit: {request.key} has token {unknown[0]}; the vocabulary has {self._shape.vocab_size}"
            )

    def _step(self) -> None:
        free = self._capacity - len(self._slots.requests)
        if self._waiting and (free * _ADMIT_SHARE >= self._capacity or not self._slots.requests):
            self._prefill(free)
        else:
            self._decode()

    def _prefill(self, free: int) -> None:
        decoder, cache, _ = self._require_awake()
        admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        slots = self._slots.admit(admitted, self._seed)
        by_prefix: dict[bytes, list[int]] = {}
        for slot, request in zip(slots, admitted, strict=True):
            by_prefix.setdefault(request.prefix_ids.tobytes(), []).append(slot)
        groups = list(by_prefix.values())
        prefixes = [self._slots.tokens[group[0], : int(self._slots.length[group[0]])] for group in groups]
        logits, routes = decoder.prefill(prefixes, groups, cache)
        for group, part in zip(groups, routes.split([len(prefix) for prefix in prefixes]), strict=True):
            self._slots.routes[group, : len(part)] = part
        repeats = torch.tensor([len(group) for group in groups])
        self._draw(logits.repeat_interleave(repeats, dim=0), torch.tensor([slot for group in groups for slot in group]))

    def _decode(self) -> None:
        decoder, cache, _ = self._require_awake()
        slots = torch.arange(len(self._slots.requests))
        at = self._slots.length[: len(slots)] - 1
        logits, routes = decoder.decode(self._slots.tokens[slots, at], at, cache)
        self._slots.routes[slots, at] = routes
        self._draw(logits, slots)

    def _draw(self, logits: Tensor, slots: Tensor) -> None:
        _, _, version = self._require_awake()
        if not bool(torch.isfinite(logits).all()):
            raise FloatingPointError(f"logits under version {version} of the weights are not finite")
        s = self._slots
        length = s.length[slots]
        early = length < s.stop_after[slots]
        if bool(early.any()):
            _forbid(logits, early, s.stop_ids[slots])
        uniform = s.uniforms[slots, length]
        tokens, logprobs = draw(logits, uniform, s.temperature[slots], s.top_p[slots], s.top_k[slots], s.min_p[slots])
        stopped, full = s.append(slots, tokens, logprobs, version)
        ended = {int(slots[i]): bool(stopped[i]) for i in (stopped | full).nonzero().squeeze(1).tolist()}
        self._ready += [s.completion(slot, "stop" if ended[slot] else "length") for slot in sorted(ended)]
        self._release(ended)

    def _end_active(self, keys: set[Key]) -> list[Completion]:
        slots = [slot for slot, request in enumerate(self._slots.requests) if request.key in keys]
        completions = [self._slots.completion(slot, "abort") for slot in slots]
        self._release(slots)
        return completions

    def _release(self, slots: Collection[int]) -> None:
        for slot in sorted(slots, reverse=True):
            last = self._slots.release(slot)
            if last != slot:
                assert self._cache is not None
                self._cache.move(last, slot)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _forbid(logits: Tensor, early: Tensor, stop_ids: Tensor) -> None:
    rows, columns = (early[:, None] & (stop_ids >= 0)).nonzero(as_tuple=True)
    logits[rows, stop_ids[rows, columns]] = -torch.inf


def _nothing(request: Request) -> Completion:
    empty = request.prefix_ids[:0]
    return Completion(request.key, empty, empty.astype("float32"), empty, None, "abort")
