"""What is known of each sequence being decoded: tensors with one row a slot, so that a step touches no objects."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from beamline.records import Completion, Finish, Request
from beamline.records.random import uniforms


class Slots:
    """Per-slot tensors; active sequences hold rows ``0..len(requests)``."""

    def __init__(self, slots: int, positions: int, moe_layers: int, experts_per_token: int, route_dtype: torch.dtype):
        self.requests: list[Request] = []
        self.capacity = slots
        self.tokens = torch.zeros(slots, positions, dtype=torch.int64)
        self.logprobs = torch.zeros(slots, positions)
        self.versions = torch.zeros(slots, positions, dtype=torch.int32)
        self.uniforms = torch.zeros(slots, positions, dtype=torch.float64)
        self.routes = torch.zeros(slots, positions, moe_layers, experts_per_token, dtype=route_dtype)
        self.length = torch.zeros(slots, dtype=torch.int64)  # tokens known, the newest of them not yet evaluated
        self.prefix = torch.zeros(slots, dtype=torch.int64)
        self.limit = torch.zeros(slots, dtype=torch.int64)
        self.stop_after = torch.zeros(slots, dtype=torch.int64)  # no stop token while fewer tokens are known
        self.temperature = torch.zeros(slots)
        self.top_p = torch.zeros(slots)
        self.top_k = torch.zeros(slots, dtype=torch.int64)
        self.min_p = torch.zeros(slots)
        self.stop_ids = torch.full((slots, 1), -1, dtype=torch.int64)

    def admit(self, requests: Sequence[Request], seed: int) -> list[int]:
        """Give each request the next free slot; returns the slots."""
        first = len(self.requests)
        self._widen_stops(max(len(request.params.stop_ids) for request in requests))
        for slot, request in enumerate(requests, start=first):
            self._fill(slot, request, seed)
        self.requests.extend(requests)
        return list(range(first, len(self.requests)))

    def _fill(self, slot: int, request: Request, seed: int) -> None:
        params, key = request.params, request.key
        prefix = len(request.prefix_ids)
        limit = prefix + params.max_tokens
        self.tokens[slot, :prefix] = torch.from_numpy(request.prefix_ids.astype(np.int64))
        purpose = ("sample", key.split, key.step, key.problem, key.sample, key.attempt)
        self.uniforms[slot, prefix:limit] = torch.from_numpy(uniforms(seed, purpose, prefix, limit))
        self.length[slot] = self.prefix[slot] = prefix
        self.limit[slot] = limit
        self.stop_after[slot] = prefix + params.min_tokens
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.min_p[slot] = params.min_p
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(params.stop_ids)] = torch.tensor(params.stop_ids, dtype=torch.int64)

    def _widen_stops(self, width: int) -> None:
        if width > self.stop_ids.shape[1]:
            wider = torch.full((self.capacity, width), -1, dtype=torch.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider

    def append(self, slots: Tensor, tokens: Tensor, logprobs: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Record one drawn token for each slot; returns which of them stopped, and which reached their limit."""
        at = self.length[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at] = version
        self.length[slots] = at + 1
        stopped = (self.stop_ids[slots] == tokens[:, None]).any(1)
        return stopped, at + 1 == self.limit[slots]

    def completion(self, slot: int, finish: Finish) -> Completion:
        """What the sequence in a slot has come to, copied out."""
        prefix, length = int(self.prefix[slot]), int(self.length[slot])
        routes = self.routes[slot, : length - 1].numpy()
        new = slice(prefix, length)
        return Completion(
            key=self.requests[slot].key,
            token_ids=self.tokens[slot, new].numpy().astype(np.int32),
            logprobs=self.logprobs[slot, new].numpy().copy(),
            versions=self.versions[slot, new].numpy().copy(),
            routes=routes.astype(np.uint8 if routes.dtype == np.uint8 else np.uint16) if routes.size else None,
            finish=finish,
        )

    def release(self, slot: int) -> int:
        """Free a slot by moving the last active sequence into it; returns the slot that it came from."""
        last = len(self.requests) - 1
        if slot != last:
            for tensor in vars(self).values():
                if isinstance(tensor, Tensor):
                    tensor[slot] = tensor[last]
            self.requests[slot] = self.requests[last]
        self.requests.pop()
        return last
