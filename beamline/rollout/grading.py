"""Grading while sampling goes on: each response is given to the graders as it finishes."""

from collections.abc import Sequence
from dataclasses import replace

from beamline.chat import BeamChat, Channels
from beamline.config.schema import RewardConfig
from beamline.records import Completion, Group, Key, Rollout
from beamline.rollout.collect import Job
from beamline.tasks.grading import grade, grading_task
from beamline.tasks.pool import GradingPool, Outcome

_POLL_SECONDS = 1.0


class Grading:
    """The grades of one job's samples, in the making."""

    def __init__(self, pool: GradingPool, job: Job, chat: BeamChat, config: RewardConfig) -> None:
        self._pool, self._chat, self._config, self._limit = pool, chat, config, job.params.max_tokens
        self._answers = {problem.id: problem.answer for problem in job.problems}
        self._channels: dict[Key, Channels] = {}
        self._outcomes: dict[Key, Outcome | None] = {}

    def add(self, completion: Completion) -> None:
        """Have a finished response graded; does not wait for it."""
        key = completion.key
        self._channels[key] = self._chat.channels(completion.token_ids)
        task = grading_task(self._channels[key], self._answers[key.problem], self._config)
        if task is None:
            self._outcomes[key] = None
        else:
            self._pool.submit(key, task)
        self._collect(0.0)

    def finish(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with a grade on each rollout, once all are there: a response takes one deadline at most."""
        while self._pool.pending:
            self._collect(_POLL_SECONDS)
        return [replace(group, rollouts=tuple(map(self._graded, group.rollouts))) for group in groups]

    def _collect(self, seconds: float) -> None:
        for key, outcome in self._pool.poll(seconds):
            assert isinstance(key, Key)
            self._outcomes[key] = outcome

    def _graded(self, rollout: Rollout) -> Rollout:
        key = rollout.key
        made = grade(self._channels[key], self._outcomes[key], rollout.response_tokens, self._limit, self._config)
        return replace(rollout, grade=made)
