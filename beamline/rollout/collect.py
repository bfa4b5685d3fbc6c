"""From problems to groups of samples: what training and evaluation share."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from beamline.chat import BeamChat
from beamline.errors import BeamlineError
from beamline.records import Completion, Group, Key, Problem, Request, Rollout, SamplingParams, Split, Turn
from beamline.rollout.sampler import Sampler

_POLL_SECONDS = 0.2


class SamplingStalledError(BeamlineError, RuntimeError):
    """No response finished within the deadline."""


@dataclass(frozen=True, slots=True)
class Job:
    """Samples to draw: ``samples`` of each problem, under keys of one split and step."""

    split: Split
    step: int
    problems: Sequence[Problem]
    samples: int
    params: SamplingParams

    @property
    def size(self) -> int:
        """How many samples that makes."""
        return len(self.problems) * self.samples


def requests(job: Job, chat: BeamChat) -> list[list[Request]]:
    """One list of requests a problem. A problem that occurs twice gets new sample numbers, so every key is unique."""
    seen: Counter[str] = Counter()
    groups = []
    for problem in job.problems:
        first = seen[problem.id]
        seen[problem.id] += job.samples
        prompt = chat.prompt_ids(problem.messages)
        keys = [Key(job.split, job.step, problem.id, sample) for sample in range(first, first + job.samples)]
        groups.append([Request(key, prompt, job.params) for key in keys])
    return groups


def sample(
    sampler: Sampler, job: Job, chat: BeamChat, deadline: float, *on_finish: Callable[[Completion], object]
) -> list[Group]:
    """Draw all samples of a job; groups and rollouts come in the order of the job, whatever finished first.

    Each function of ``on_finish`` is given each completion as it comes.

    Raises:
        SamplingStalledError: nothing finished for ``deadline`` seconds.
    """
    asked = requests(job, chat)
    sampler.submit([request for group in asked for request in group])
    done: dict[Key, Completion] = {}
    wanted = {request.key for group in asked for request in group}
    missing = len(wanted)
    last = time.monotonic()
    while len(done) < missing:
        for completion in sampler.poll(_POLL_SECONDS):
            if completion.key not in wanted or completion.finish == "abort":
                raise SamplingStalledError(f"the sampler gave up or was not asked for {completion.key}")
            done[completion.key] = completion
            last = time.monotonic()
            for observe in on_finish:
                observe(completion)
        if time.monotonic() - last > deadline:
            first = next(request.key for group in asked for request in group if request.key not in done)
            raise SamplingStalledError(
                f"no response finished for {deadline:.0f} s; {missing - len(done)} of {missing} are missing, "
                f"first {first}; "
                "raise rollout.deadline_seconds if the model needs longer"
            )
    return [
        Group(problem, tuple(to_rollout(request, done[request.key]) for request in group))
        for problem, group in zip(job.problems, asked, strict=True)
    ]


def to_rollout(request: Request, completion: Completion) -> Rollout:
    """The sequence that a completion makes of its request: prompt and response, not graded yet."""
    prompt, new = len(request.prefix_ids), len(completion.token_ids)
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
    )
