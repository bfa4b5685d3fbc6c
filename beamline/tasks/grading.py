"""From what a grader found to a shaped reward: only what stands in the final channel counts."""

from beamline.chat import Channels
from beamline.config.schema import RewardConfig
from beamline.records import Grade
from beamline.tasks.graders.verdict import Verdict
from beamline.tasks.pool import GradingPool, GradingTask, Outcome


def open_pool(config: RewardConfig) -> GradingPool:
    """The processes that grade a run's responses, to be used as a context."""
    workers = config.grading
    return GradingPool(workers.workers, workers.deadline_seconds, workers.memory_mb)


def grading_task(channels: Channels, answer: str, config: RewardConfig) -> GradingTask | None:
    """What is to be graded of a response; None where it has no closed final channel, so that nothing can be right."""
    return None if channels.final is None else GradingTask(config.grader, channels.final, answer)


def grade(channels: Channels, outcome: Outcome | None, tokens: int, limit: int, config: RewardConfig) -> Grade:
    """The grade of a response of ``tokens`` tokens, of which ``limit`` were allowed.

    ``outcome`` is that of its grading task; without one the response is wrong. ``parts`` holds ``answer`` and, where
    it is switched on, the ``overlong`` penalty. A response whose grading ended in a timeout or an error has no reward.
    """
    if outcome is not None and outcome.verdict is None:
        return Grade(False, 0.0, {}, outcome.status, channels.well_formed, error=outcome.error)
    verdict = Verdict(correct=False, parsed=None) if outcome is None else outcome.verdict
    assert verdict is not None
    parts = {"answer": config.right if verdict.correct else config.wrong}
    if config.overlong.buffer_tokens:
        parts["overlong"] = overlong_penalty(tokens, limit, config.overlong.buffer_tokens, config.overlong.factor)
    return Grade(verdict.correct, sum(parts.values()), parts, well_formed=channels.well_formed, parsed=verdict.parsed)


def overlong_penalty(tokens: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment: 0 up to ``limit - buffer`` tokens, then linear down to ``-factor`` at ``limit``.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    over = max(tokens - (limit - buffer), 0)
    return -factor * min(over / buffer, 1.0) if over else 0.0
