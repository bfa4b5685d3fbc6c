"""What is known of each sequence being decoded: arrays with one row a slot, so that a step touches no objects."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.records import Completion, Finish, Request, Support
from beamline.records.random import uniforms

Allowed = dict[int, NDArray[np.int32]]  # by position: the tokens that could be drawn there, where not all could


class Slots:
    """Per-slot arrays; ``requests`` says which slots are taken, and by what."""

    def __init__(self, slots: int, positions: int, moe_layers: int, experts_per_token: int, route_dtype: np.dtype):
        self.requests: dict[int, Request] = {}
        self.capacity = slots
        self.tokens = np.zeros((slots, positions), np.int32)
        self.logprobs = np.zeros((slots, positions), np.float32)
        self.versions = np.zeros((slots, positions), np.int32)
        self.uniforms = np.zeros((slots, positions))
        self.routes = np.zeros((slots, positions, moe_layers, experts_per_token), route_dtype)
        self.length = np.zeros(slots, np.int64)  # tokens known, the newest of them not yet evaluated
        self.prefix = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.stop_after = np.zeros(slots, np.int64)  # no stop token while fewer tokens are known
        self.temperature = np.zeros(slots, np.float32)
        self.top_p = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots, np.float32)
        self.stop_ids = np.full((slots, 1), -1)
        self.recorded = np.zeros(slots, np.bool_)  # whether the support is kept, in `allowed`
        self.allowed: dict[int, Allowed] = {}

    @property
    def active(self) -> NDArray[np.int64]:
        """The slots that are taken."""
        return np.fromiter(self.requests, np.int64, len(self.requests))

    def admit(self, requests: Sequence[Request], seed: int) -> list[int]:
        """Give each request a free slot; returns the slots."""
        free = [slot for slot in range(self.capacity) if slot not in self.requests][: len(requests)]
        self._widen_stops(max(len(request.params.stop_ids) for request in requests))
        for slot, request in zip(free, requests, strict=True):
            self._fill(slot, request, seed)
            self.requests[slot] = request
        return free

    def _fill(self, slot: int, request: Request, seed: int) -> None:
        params, key = request.params, request.key
        prefix = len(request.prefix_ids)
        limit = prefix + params.max_tokens
        self.tokens[slot, :prefix] = request.prefix_ids
        purpose = ("sample", key.split, key.step, key.problem, key.sample, key.attempt)
        self.uniforms[slot, prefix:limit] = uniforms(seed, purpose, prefix, limit)
        self.length[slot] = self.prefix[slot] = prefix
        self.limit[slot] = limit
        self.stop_after[slot] = prefix + params.min_tokens
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.min_p[slot] = params.min_p
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(params.stop_ids)] = params.stop_ids
        self.recorded[slot] = params.record_support
        self.allowed[slot] = {}

    def _widen_stops(self, width: int) -> None:
        if width > self.stop_ids.shape[1]:
            wider = np.full((self.capacity, width), -1)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider

    def append(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Record one drawn token for each slot; returns which of them stopped, and which reached their limit."""
        at = self.length[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at] = version
        self.length[slots] = at + 1
        stopped: NDArray[np.bool_] = (self.stop_ids[slots] == tokens[:, None]).any(1)
        return stopped, at + 1 >= self.limit[slots]

    def completion(self, slot: int, finish: Finish) -> Completion:
        """What the sequence in a slot has come to, copied out."""
        prefix, length = int(self.prefix[slot]), int(self.length[slot])
        routes = self.routes[slot, : length - 1]
        new = slice(prefix, length)
        return Completion(
            key=self.requests[slot].key,
            token_ids=self.tokens[slot, new].copy(),
            logprobs=self.logprobs[slot, new].copy(),
            versions=self.versions[slot, new].copy(),
            routes=routes.copy() if routes.size else None,
            finish=finish,
            support=self._support(slot) if self.recorded[slot] else None,
        )

    def _support(self, slot: int) -> Support:
        allowed, every = self.allowed[slot], np.zeros(0, np.int32)
        return Support.of([allowed.get(at, every) for at in range(self.prefix[slot], self.length[slot])])

    def release(self, slots: Collection[int]) -> None:
        """Free slots."""
        for slot in slots:
            del self.requests[slot], self.allowed[slot]
