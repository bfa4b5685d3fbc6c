"""The embedded sampler: continuous batching in this process."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal

import numpy as np
import torch

from beamline.model.beam import BeamShape
from beamline.model.layout import Layout, WeightKind
from beamline.model.lora import LoraShape
from beamline.records import Completion, Key, Request
from beamline.rollout.local.beam import BeamDecoder, Numerics, decoder_layout
from beamline.rollout.local.cache import SlotCache
from beamline.rollout.local.slots import Slots
from beamline.rollout.local.worker import Drawn, NotFiniteError, Worker, joined
from beamline.rollout.requests import check_requests, unbegun
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan
from beamline.transfer.source import first_not_finite

_LEAST_ROWS = 8  # of a thread: for fewer, waking another one takes longer than the work


class LocalSampler:
    """Samples on the CPU. Work is done inside :meth:`poll`.

    Tokens, log-probabilities, routes and support of a request have the same bits whatever else is in flight, however
    many slots and threads there are, and in whichever process it runs.

    Args:
        shape: the model.
        numerics: the types that are computed as, emulated in float32.
        rope_theta: base of the rotary embedding of sliding layers.
        slots: sequences decoded together.
        positions: most tokens of a sequence, prompt and response.
        seed: seed of the run; with a request's key it fixes the random stream.
        channel: where weights come from.
        threads: CPU threads while it works.
        lora: the adapters that it serves beside the weights, unmerged; None = no adapters.

    Raises:
        ValueError: ``positions`` is more than the model's context.
    """

    def __init__(
        self,
        shape: BeamShape,
        numerics: Numerics,
        rope_theta: float,
        slots: int,
        positions: int,
        seed: int,
        channel: LocalChannel,
        threads: int = 1,
        lora: LoraShape | None = None,
    ) -> None:
        if positions > shape.max_position_embeddings:
            raise ValueError(f"{positions} positions exceed the model's context of {shape.max_position_embeddings}")
        self._shape, self._numerics, self._theta, self._lora = shape, numerics, rope_theta, lora
        self._capacity, self._positions, self._seed, self._channel = slots, positions, seed, channel
        self._threads, self._pool = threads, ThreadPoolExecutor(threads, thread_name_prefix="sampler")
        self._decoder: BeamDecoder | None = None
        self._cache: SlotCache | None = None
        self._workers: list[Worker] = []
        self._version, self._missing = 0, set[str]()
        self._waiting: deque[Request] = deque()
        self._ready: list[Completion] = []
        self._in_flight: set[Key] = set()
        self.wake(["weights", "cache"])

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; see :class:`~beamline.rollout.sampler.Sampler`."""
        self._require_awake()
        check_requests(requests, self._in_flight, self._positions, self._shape.vocab_size)
        self._in_flight |= {request.key for request in requests}
        self._waiting.extend(requests)

    def poll(self, timeout: float) -> list[Completion]:
        """Decode until something finishes, nothing is left, or ``timeout`` seconds are over (at least one step)."""
        deadline = time.monotonic() + timeout
        while not self._ready and (self._waiting or self._slots.requests):
            self._step()
            if time.monotonic() >= deadline:
                break
        ready, self._ready = self._ready, []
        self._in_flight -= {completion.key for completion in ready}
        return ready

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
        return finished + self._end_active(wanted) + [unbegun(request) for request in unstarted]

    def layout(self, kind: WeightKind) -> Layout:
        """One rank that holds everything."""
        return decoder_layout(self._shape, self._numerics.dtype, self._lora, kind)

    @torch.no_grad()
    def receive(self, plan: TransferPlan, version: int, unfinished: Literal["keep", "abort"]) -> None:
        """Copy new weights in place: the model's, or an adapter's; the other ones stay as they are.

        Raises:
            FloatingPointError: a value is not finite. Nothing is drawn until better ones are received.
        """
        if self._decoder is None:
            raise RuntimeError("receive: the sampler sleeps without weights; wake(['weights']) first")
        if unfinished == "abort":
            partials = self.abort(self._in_flight)  # takes what is ready too
            self._ready = partials
            self._in_flight = {completion.key for completion in partials}
        decoder, received = self._decoder, {move.part.name for move in plan.moves}
        self._channel.receive(plan, decoder.named)
        decoder.round_weights(received)
        self._missing |= received  # the old ones are gone
        if not decoder.is_finite(adapters_alone=received <= decoder.adapters.keys()):
            wrong = first_not_finite({name: decoder.named[name] for name in decoder.named if name in received})
            if wrong is not None:
                raise FloatingPointError(f"{wrong} of version {version} holds values that are not finite")
        self._missing -= received
        self._version = version

    def sleep(self, level: int) -> None:
        """Free the cache (1), and the weights too (2)."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level must be 1 or 2, not {level}")
        if self._in_flight:
            raise RuntimeError(f"sleep: {len(self._in_flight)} requests are in flight; poll or abort them first")
        self._cache, self._workers = None, []
        if level == 2:
            self._decoder = None

    def wake(self, what: Collection[Literal["weights", "cache"]]) -> None:
        """Allocate what sleeps."""
        if "weights" in what and self._decoder is None:
            self._decoder = BeamDecoder(self._shape, self._numerics, self._theta, self._positions, self._lora)
            self._missing = {*self._decoder.tensors, *self._decoder.adapters}
        if "cache" in what and self._cache is None:
            if self._decoder is None:
                raise RuntimeError("wake: the cache needs the weights; wake(['weights']) first")
            self._cache = self._decoder.new_cache(self._capacity, self._positions)
            layers, chosen = len(self._shape.moe_layers), self._shape.num_experts_per_tok
            self._slots = Slots(self._capacity, self._positions, layers, chosen, self._decoder.route_dtype)
            self._workers = [Worker(self._decoder, self._positions) for _ in range(self._threads)]

    def statistics(self) -> dict[str, float]:
        """None: nothing can befall it that this process would survive."""
        return {}

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _require_awake(self) -> tuple[BeamDecoder, SlotCache, int]:
        if self._decoder is None or self._cache is None:
            raise RuntimeError("the sampler sleeps; wake(['weights', 'cache']) first")
        if self._missing:
            kinds = {"weights": self._decoder.tensors, "adapter": self._decoder.adapters}
            lacking = [kind for kind, tensors in kinds.items() if self._missing & tensors.keys()]
            raise RuntimeError(f"the sampler has no {' and no '.join(lacking)} yet; send and receive them first")
        return self._decoder, self._cache, self._version

    def _step(self) -> None:
        free = self._capacity - len(self._slots.requests)
        if self._waiting and free:
            self._prefill(free)
        else:
            self._decode()

    def _prefill(self, free: int) -> None:
        _, cache, _ = self._require_awake()
        admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        before = set(self._slots.requests)
        try:
            by_prefix: dict[bytes, list[int]] = {}
            for slot, request in zip(self._slots.admit(admitted, self._seed), admitted, strict=True):
                by_prefix.setdefault(request.prefix_ids.astype(np.int32).tobytes(), []).append(slot)
            groups = list(by_prefix.values())
            shares = [groups[i :: self._threads] for i in range(min(self._threads, len(groups)))]
            drawn = self._share(lambda worker, share: worker.prefill(share, cache, self._slots), shares)
        except BaseException:  # what was not evaluated must not be decoded: it waits again
            self._slots.release(set(self._slots.requests) - before)
            self._waiting.extendleft(reversed(admitted))
            raise
        self._take_in(drawn)

    def _decode(self) -> None:
        _, cache, _ = self._require_awake()
        active = self._slots.active
        shares = np.array_split(active, min(self._threads, -(-len(active) // _LEAST_ROWS)))
        self._take_in(self._share(lambda worker, share: worker.decode(share, cache, self._slots), shares))

    def _share(self, work: Callable[[Worker, Any], Drawn], shares: Sequence[Any]) -> Drawn:
        """Do each share with a worker of its own, the first in this thread."""
        _, _, version = self._require_awake()
        others = [
            self._pool.submit(work, worker, share) for worker, share in zip(self._workers[1:], shares[1:], strict=False)
        ]
        try:
            return joined([work(self._workers[0], shares[0]), *(other.result() for other in others)])
        except NotFiniteError as error:
            raise FloatingPointError(f"{error} under version {version} of the weights") from error
        finally:
            wait(others)  # none may work on behind the back of whoever sees the error

    def _take_in(self, drawn: Drawn) -> None:
        """Record the tokens that were drawn, and end what is done."""
        _, _, version = self._require_awake()
        slots, tokens, logprobs = drawn
        stopped, full = self._slots.append(slots, tokens, logprobs, version)
        ended = stopped | full
        finished = list(zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True))
        self._ready += [self._slots.completion(slot, "stop" if stop else "length") for slot, stop in finished]
        self._slots.release([slot for slot, _ in finished])

    def _end_active(self, keys: set[Key]) -> list[Completion]:
        slots = [slot for slot, request in self._slots.requests.items() if request.key in keys]
        completions = [self._slots.completion(slot, "abort") for slot in slots]
        self._slots.release(slots)
        return completions
