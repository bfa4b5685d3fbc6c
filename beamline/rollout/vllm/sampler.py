"""The sampler over vLLM: engine processes that draw, and this process that keeps account of what it asked them for."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from beamline.config.vllm import TEMPERATURES
from beamline.model.beam import BeamShape
from beamline.model.layout import DType, Layout, WeightKind
from beamline.records import Completion, Key, Request
from beamline.records.random import stream
from beamline.rollout.requests import check_requests, unbegun
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.layout import Mesh, engine_layout
from beamline.rollout.vllm.messages import Abort, Asked, DeviceMemory, Memory, Sleep, Submit, Wake
from beamline.rollout.vllm.replica import EngineFailedError, Replica
from beamline.rollout.vllm.weights import Delivery
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan, shares_of
from beamline.transfer.source import Source

T = TypeVar("T")

_GLANCE_SECONDS = 1.0  # between two looks at engines that say nothing


@dataclass(frozen=True, slots=True)
class _Flight:
    """A request in flight, and where it went: to which engine of the fleet, and which process that was then."""

    request: Request
    replica: int
    engine: Replica


@dataclass(frozen=True, slots=True)
class _Weights:
    """What the engines were last given, to be given again to one that takes the place of another.

    ``holders[i]`` is the process of engine i that has it.
    """

    version: int
    deliveries: list[Delivery]
    checksums: list[list[list[int]]]
    holders: list[Replica]


class VllmSampler:
    """Samples by vLLM. Engines draw all the time; :meth:`poll` takes in what has ended.

    A request's random numbers depend on its key and the seed alone, whichever engine it goes to; log-probabilities,
    and with them now and then a token, depend by rounding on what else is in the batch. An engine that fails is
    replaced, given the same weights, and asked again for what it had not finished.

    Args:
        fleet: the engines.
        shape: the model that they run.
        mesh: how each engine spreads it over GPUs.
        dtype: type of its weights.
        positions: most tokens of a sequence, prompt and response.
        seed: seed of the run.
        channel: where weights come from.
        bucket_bytes: how many bytes of weights are handed over at a time.
        group_seconds: longest time that ranks wait for each other in a group through which weights go; None where they
            go through memory that both sides see.
    """

    def __init__(
        self,
        fleet: Fleet,
        shape: BeamShape,
        mesh: Mesh,
        dtype: DType,
        positions: int,
        seed: int,
        channel: LocalChannel,
        bucket_bytes: int,
        group_seconds: float | None = None,
    ) -> None:
        self._fleet, self._shape, self._channel, self._bucket_bytes = fleet, shape, channel, bucket_bytes
        self._positions, self._seed, self._group_seconds = positions, seed, group_seconds
        self._layout = engine_layout(shape, mesh, dtype)
        self._in_flight: dict[Key, _Flight] = {}
        self._ready: list[Completion] = []
        self._asleep = set[Memory]()
        self._weights: _Weights | None = None
        self._planned: tuple[TransferPlan, Source, list[Delivery]] | None = None
        self._reissued = 0
        self.memory: DeviceMemory | None = None
        """Bytes in use on the first device before and after the last sleep or wake."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; the samples of a problem go to one engine, which evaluates their prompt once."""
        self._require_awake()
        check_requests(requests, self._in_flight, self._positions, self._shape.vocab_size)
        for request in requests:
            temperature, (least, most) = request.params.temperature, TEMPERATURES
            if temperature and not least <= temperature <= most:
                raise ValueError(
                    f"submit: {request.key} has temperature {temperature}, and vLLM draws with {least} to {most}, or "
                    "with 0"
                )
        waiting = Counter(flight.replica for flight in self._in_flight.values())
        chosen: dict[tuple[str, int, str], int] = {}
        shares: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            problem = (request.key.split, request.key.step, request.key.problem)
            replica = chosen.setdefault(problem, min(range(len(self._fleet.replicas)), key=lambda i: (waiting[i], i)))
            waiting[replica] += 1
            shares[replica].append(request)
        for replica, share in shares.items():
            self._issue(replica, share)

    def poll(self, timeout: float) -> list[Completion]:
        """What has ended since the last call; waits up to ``timeout`` seconds for the first of it.

        Raises:
            EngineFailedError: an engine failed, and may not be replaced.
            RuntimeError: there are requests in flight, and no weights for them since the last ones were refused.
        """
        end = time.monotonic() + timeout
        self._take_in()
        if self._in_flight and not self._ready:
            self._require_weights()
        while not self._ready and self._in_flight and (left := end - time.monotonic()) > 0:
            self._fleet.wait(min(left, _GLANCE_SECONDS))
            self._take_in()
        ready, self._ready = self._ready, []
        for completion in ready:
            del self._in_flight[completion.key]
        return ready

    def abort(self, keys: Collection[Key]) -> list[Completion]:
        """Stop requests and return what they have so far: nothing, where an engine failed with it."""
        wanted = list(dict.fromkeys(keys))
        if unknown := [key for key in wanted if key not in self._in_flight]:
            raise KeyError(f"abort: {unknown[0]} is not in flight")
        # They are taken out first: an engine that takes the place of another is not asked for them again.
        flights = {key: self._in_flight.pop(key) for key in wanted}
        stopped: dict[Key, Completion] = {}
        for replica in range(len(self._fleet.replicas)):
            if here := [key for key in wanted if flights[key].replica == replica]:
                partials = self._on(replica, partial(self._abort, here))
                stopped |= {completion.key: completion for completion in partials}
        self._take_in()  # what ended before it could be stopped
        stopped |= {completion.key: completion for completion in self._ready if completion.key in flights}
        self._ready = [completion for completion in self._ready if completion.key not in flights]
        return [stopped.get(key) or unbegun(flight.request) for key, flight in flights.items()]

    def layout(self, kind: WeightKind) -> Layout:
        """The ranks of all engines, one engine after the other.

        Raises:
            ValueError: adapters, which vLLM does not serve for Beam.
        """
        if kind == "adapter":
            raise ValueError("vLLM serves no adapters of Beam; use rollout=local")
        return Layout(self._layout.ranks * len(self._fleet.replicas))

    def receive(self, plan: TransferPlan, version: int, unfinished: Literal["keep", "abort"]) -> None:
        """Bring new weights into all engines, in place.

        Raises:
            FloatingPointError: a value is not finite; nothing was sent, and until better ones come nothing can be
                submitted.
            TransferError: nothing was sent, or an engine does not hold afterwards what was sent.
        """
        if "weights" in self._asleep:
            raise RuntimeError("receive: the engines sleep without weights; wake(['weights']) first")
        source = self._channel.take(plan)
        self._weights = None  # nor is an engine given old ones that fails from here on: they may have been changed
        if unfinished == "abort":
            flights = self._in_flight.copy()
            self._ready = self.abort(flights)  # what had ended already is among them
            self._in_flight = flights
        wrong = source.not_finite(plan)
        if wrong is not None:
            raise FloatingPointError(f"{wrong} of version {version} holds values that are not finite")
        deliveries = self._deliveries(plan, source)
        sums = []
        for replica, delivery in enumerate(deliveries):
            sums.append(self._on(replica, partial(self._deliver, replica, delivery, version)))
            self._reissue(replica)  # if it failed meanwhile, with requests that were to go on
        self._weights = _Weights(version, deliveries, sums, self._fleet.replicas.copy())

    def sleep(self, level: int) -> None:
        """Free the cache (1), and the weights too (2), on all engines."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level must be 1 or 2, not {level}")
        if self._in_flight:
            raise RuntimeError(f"sleep: {len(self._in_flight)} requests are in flight; poll or abort them first")
        freed: set[Memory] = {"cache"} if level == 1 else {"cache", "weights"}
        if freed <= self._asleep:
            return
        self._remember(self._ask_all(lambda number: Sleep(number, level)))
        self._asleep |= freed
        if level == 2:
            self._weights = None

    def wake(self, what: Collection[Memory]) -> None:
        """Take memory again."""
        if "cache" in what and "weights" in self._asleep - set(what):
            raise RuntimeError("wake: the cache needs the weights; wake(['weights']) first")
        if self._asleep & set(what):
            self._remember(self._ask_all(lambda number: Wake(number, list(what))))
            self._asleep -= set(what)

    def statistics(self) -> dict[str, float]:
        """How often an engine was replaced, and how many requests were issued again, since the start."""
        return {"rollout/engine_restarts": self._fleet.restarts, "rollout/requests_reissued": self._reissued}

    def close(self) -> None:
        """End the engines."""
        self._fleet.close()
        self._close_deliveries()

    def _require_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("the sampler sleeps; wake(['weights', 'cache']) first")
        self._require_weights()

    def _require_weights(self) -> None:
        if self._weights is None:
            raise RuntimeError("the sampler has no weights yet; send and receive them first")

    def _issue(self, replica: int, requests: Sequence[Request]) -> None:
        engine = self._fleet.replicas[replica]
        engine.send(Submit([Asked(each, request_seed(self._seed, each.key)) for each in requests]))
        self._in_flight |= {each.key: _Flight(each, replica, engine) for each in requests}

    def _take_in(self) -> None:
        for replica in range(len(self._fleet.replicas)):
            self._on(replica, self._take)

    def _take(self, engine: Replica) -> None:
        self._ready += [completion for finished in engine.take(0.0) for completion in finished.completions]

    def _abort(self, keys: list[Key], engine: Replica) -> list[Completion]:
        """Partials of what an engine has not ended."""
        return engine.ask(Abort(self._fleet.number(), keys), list[Completion])

    def _deliver(self, replica: int, delivery: Delivery, version: int, _: Replica) -> list[list[int]]:
        return delivery.deliver(self._fleet, replica, version)

    def _deliveries(self, plan: TransferPlan, source: Source) -> list[Delivery]:
        """One for each engine; the same as last time where the plan and the source are."""
        if self._planned is None or self._planned[0] is not plan or self._planned[1] is not source:
            self._close_deliveries()
            size, types = len(self._layout.ranks), {each.name: each.dtype for r in self._layout.ranks for each in r}
            shares = shares_of(plan, source.size, size * len(self._fleet.replicas), types)
            engines = [shares[start : start + size] for start in range(0, len(shares), size)]
            settings = self._bucket_bytes, self._group_seconds
            self._planned = (plan, source, [Delivery(each, source, *settings) for each in engines])
        return self._planned[2]

    def _close_deliveries(self) -> None:
        planned, self._planned = self._planned, None
        for delivery in planned[2] if planned else ():
            delivery.close()

    def _on(self, replica: int, action: Callable[[Replica], T]) -> T:
        """Do something with an engine; if it fails, with the one that takes its place and has what it had."""
        while True:
            engine = self._fleet.replicas[replica]
            try:
                self._restore(replica)
                return action(engine)
            except EngineFailedError as error:
                if error.hopeless:
                    raise
                with suppress(EngineFailedError):
                    self._take(engine)  # what it had finished before
                self._fleet.replace(replica, error)

    def _restore(self, replica: int) -> None:
        """Give a new engine the weights of the others, and ask it for what the old one had not ended."""
        weights, engine = self._weights, self._fleet.replicas[replica]
        if weights is None or weights.holders[replica] is engine:
            return
        delivery = weights.deliveries[replica]
        if delivery.checksums() != weights.checksums[replica]:
            raise RuntimeError(
                f"engine {engine.name} was replaced, but weights of version {weights.version} are no longer there: "
                "the learner has changed them since"
            )
        delivery.deliver(self._fleet, replica, weights.version)
        weights.holders[replica] = engine
        self._reissue(replica)

    def _reissue(self, replica: int) -> None:
        """Ask the engine for what was asked of one that it took the place of, and has not ended."""
        engine, done = self._fleet.replicas[replica], {completion.key for completion in self._ready}
        flights = [each for key, each in self._in_flight.items() if each.replica == replica and key not in done]
        lost = [flight.request for flight in flights if flight.engine is not engine]
        self._reissued += len(lost)
        if lost:
            self._issue(replica, lost)

    def _ask_all(self, command: Callable[[int], Sleep | Wake]) -> list[DeviceMemory]:
        return [
            self._on(i, lambda engine: engine.ask(command(self._fleet.number()), DeviceMemory))
            for i in range(len(self._fleet.replicas))
        ]

    def _remember(self, memory: Sequence[DeviceMemory]) -> None:
        self.memory = memory[0]


def request_seed(seed: int, key: Key) -> int:
    """The seed of a request's random stream, from 0 to 2^63 - 1: a function of the run's seed and the key alone."""
    purpose = ("vllm", key.split, key.step, key.problem, key.sample, key.attempt)
    return int(stream(seed, *purpose).random_raw(1)[0] >> np.uint64(1))
