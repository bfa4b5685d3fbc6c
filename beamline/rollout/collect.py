"""From problems to groups of samples: what training and evaluation share."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from beamline.chat import BeamChat
from beamline.errors import BeamlineError
from beamline.model.beam import BeamShape
from beamline.records import Completion, Group, Key, Problem, Request, Rollout, SamplingParams, Split, Support, Turn
from beamline.rollout.routes import check_routes
from beamline.rollout.sampler import Sampler

_POLL_SECONDS = 0.2


class SamplingStalledError(BeamlineError, RuntimeError):
    """No response finished within the deadline."""


@dataclass(frozen=True, slots=True)
class Cutoff:
    """What makes a job shorter: of its groups only ``groups`` are drawn to their end.

    Which of them is decided when every response has ended or has ``tokens`` tokens.
    """

    tokens: int
    groups: int


@dataclass(frozen=True, slots=True)
class Job:
    """Samples to draw: ``samples`` of each problem, under keys of one split, step and attempt.

    ``params`` are those of a whole response. With a ``cutoff`` not all groups are drawn to their end. ``routes_of`` is
    the model whose routes every completion has to come with; None where nothing looks at them.
    """

    split: Split
    step: int
    problems: Sequence[Problem]
    samples: int
    params: SamplingParams
    attempt: int = 0
    cutoff: Cutoff | None = None
    routes_of: BeamShape | None = None

    @property
    def size(self) -> int:
        """How many samples that makes."""
        return len(self.problems) * self.samples


@dataclass(frozen=True, slots=True)
class Sampled:
    """The groups of a job that were drawn to their end, in its order, and what was left out of it."""

    groups: list[Group]
    groups_left_out: int = 0
    tokens_left_out: int = 0


Observer = Callable[[Completion], object]


def requests(job: Job, chat: BeamChat) -> list[list[Request]]:
    """One list of requests a problem. A problem that occurs twice gets new sample numbers, so every key is unique."""
    seen: Counter[str] = Counter()
    groups = []
    for problem in job.problems:
        first = seen[problem.id]
        seen[problem.id] += job.samples
        prompt = chat.prompt_ids(problem.messages)
        numbers = range(first, first + job.samples)
        keys = [Key(job.split, job.step, problem.id, sample, job.attempt) for sample in numbers]
        groups.append([Request(key, prompt, job.params) for key in keys])
    return groups


def sample(sampler: Sampler, job: Job, chat: BeamChat, deadline: float, *on_finish: Observer) -> list[Group]:
    """Draw all samples of a job; groups and rollouts come in the order of the job, whatever finished first.

    Each function of ``on_finish`` is given each completion as it comes.

    Raises:
        SamplingStalledError: nothing finished for ``deadline`` seconds.
        RouteError: a completion came without the routes that the job asks for.
    """
    asked = requests(job, chat)
    done = _complete(sampler, job, [request for group in asked for request in group], deadline, *on_finish)
    return _groups(zip(job.problems, asked, strict=True), done)


def sample_until(
    sampler: Sampler, job: Job, chat: BeamChat, deadline: float, on_keep: Observer, on_end: Observer
) -> Sampled:
    """Draw the samples of a job, or where it has a cutoff those of as many groups as it names.

    First every response gets up to the cutoff's tokens. Then the groups with the fewest unfinished responses (of equal
    ones those that the job names first) are kept, and their responses go on to the end; the others are left out.
    Nothing of that depends on what finishes first, and what is drawn is what it would have been in one go.

    ``on_keep`` is given each response that is kept when it is whole, ``on_end`` each response of the job when it is
    whole or left out.

    Raises:
        SamplingStalledError: nothing finished for ``deadline`` seconds.
        RouteError: a completion came without the routes that the job asks for.
    """
    if job.cutoff is None:
        return Sampled(sample(sampler, job, chat, deadline, on_keep, on_end))
    tokens, limit = job.cutoff.tokens, job.params.max_tokens

    def is_whole(completion: Completion) -> bool:
        return completion.finish == "stop" or len(completion.token_ids) == limit

    asked = requests(job, chat)
    parts = [_first_part(request, tokens) for group in asked for request in group]
    done = _complete(sampler, job, parts, deadline, lambda part: on_end(part) if is_whole(part) else None)
    unfinished = [sum(not is_whole(done[request.key]) for request in group) for group in asked]
    order = sorted(range(len(asked)), key=lambda i: (unfinished[i], i))
    kept, dropped = sorted(order[: job.cutoff.groups]), order[job.cutoff.groups :]
    left_out = [done[request.key] for i in dropped for request in asked[i]]
    for partial in left_out:
        if not is_whole(partial):
            on_end(partial)

    def finish(rest: Completion) -> None:
        whole = done[rest.key] = joined(done[rest.key], rest)
        on_keep(whole)
        on_end(whole)

    going_on = []
    for request in (request for i in kept for request in asked[i]):
        if is_whole(done[request.key]):
            on_keep(done[request.key])
        else:
            going_on.append(_rest(request, done[request.key]))
    _complete(sampler, job, going_on, deadline, finish)
    return Sampled(
        groups=_groups([(job.problems[i], asked[i]) for i in kept], done),
        groups_left_out=len(dropped),
        tokens_left_out=sum(len(completion.token_ids) for completion in left_out),
    )


def _first_part(request: Request, tokens: int) -> Request:
    """A request for the first tokens of what another one asks for."""
    params = request.params
    most, least = min(params.max_tokens, tokens), min(params.min_tokens, tokens)
    return replace(request, params=replace(params, max_tokens=most, min_tokens=least))


def _rest(request: Request, begin: Completion) -> Request:
    """A request for what is left of a response that has begun."""
    params, drawn = request.params, len(begin.token_ids)
    left = replace(params, max_tokens=params.max_tokens - drawn, min_tokens=max(0, params.min_tokens - drawn))
    return Request(request.key, np.concatenate([request.prefix_ids, begin.token_ids]), left)


def joined(begin: Completion, rest: Completion) -> Completion:
    """A response that was drawn in two parts, the first of which ends the prefix of the second.

    Both say which experts evaluated the first part; what counts is those that it was drawn with.
    """
    routes, support = None, None
    if begin.routes is not None:
        assert rest.routes is not None
        routes = np.concatenate([begin.routes, rest.routes[len(begin.routes) :]])
    if begin.support is not None:
        assert rest.support is not None
        support = Support.joined([begin.support, rest.support])
    return Completion(
        key=rest.key,
        token_ids=np.concatenate([begin.token_ids, rest.token_ids]),
        logprobs=np.concatenate([begin.logprobs, rest.logprobs]),
        versions=np.concatenate([begin.versions, rest.versions]),
        routes=routes,
        finish=rest.finish,
        support=support,
    )


def _complete(
    sampler: Sampler, job: Job, asked: Sequence[Request], deadline: float, *on_finish: Observer
) -> dict[Key, Completion]:
    """Have a job's requests completed, and each completion checked and then observed as it comes."""
    sampler.submit(asked)
    done: dict[Key, Completion] = {}
    wanted = {request.key: len(request.prefix_ids) for request in asked}
    last, befell = time.monotonic(), sampler.statistics()
    while len(done) < len(wanted):
        for completion in sampler.poll(_POLL_SECONDS):
            if completion.key not in wanted or completion.finish == "abort":
                raise SamplingStalledError(f"the sampler gave up or was not asked for {completion.key}")
            if job.routes_of is not None:
                tokens = wanted[completion.key] + len(completion.token_ids)
                check_routes(completion.key, completion.routes, tokens, job.routes_of)
            done[completion.key] = completion
            last = time.monotonic()
            for observe in on_finish:
                observe(completion)
        if (found := sampler.statistics()) != befell:  # an engine was replaced, which takes its own time
            befell, last = found, time.monotonic()
        if time.monotonic() - last > deadline:
            missing = [request.key for request in asked if request.key not in done]
            raise SamplingStalledError(
                f"no response finished for {deadline:.0f} s; {len(missing)} of {len(wanted)} are missing, "
                f"first {missing[0]}; raise rollout.deadline_seconds if the model needs longer"
            )
    return done


def _groups(asked: Iterable[tuple[Problem, list[Request]]], done: Mapping[Key, Completion]) -> list[Group]:
    return [Group(problem, tuple(to_rollout(r, done[r.key]) for r in group)) for problem, group in asked]


def to_rollout(request: Request, completion: Completion) -> Rollout:
    """The sequence that a completion makes of its request: prompt and response, not graded yet."""
    prompt, new = len(request.prefix_ids), len(completion.token_ids)
    support = completion.support
    return Rollout(
        key=request.key,
        token_ids=np.concatenate([request.prefix_ids, completion.token_ids]),
        policy_mask=np.arange(prompt + new) >= prompt,
        logprobs=np.concatenate([np.zeros(prompt, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(prompt, -1, np.int32), completion.versions]),
        routes=completion.routes,
        turns=(Turn("prompt", 0, prompt), Turn("policy", prompt, prompt + new)),
        finish=completion.finish,
        temperature=request.params.temperature,
        support=None if support is None else Support.joined([Support.unrestricted(prompt), support]),
    )
