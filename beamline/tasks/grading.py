"""Judging responses: only what stands in the final channel counts."""

import re

from beamline.chat.beam import Channels
from beamline.config.schema import RewardConfig
from beamline.records import Grade

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")  # longer ones are no answer to anything, and int() of them is slow


def is_integer(text: str) -> bool:
    """Whether a text is one integer in decimal digits."""
    return _INTEGER.fullmatch(text) is not None


def grade(channels: Channels, answer: str, tokens: int, limit: int, config: RewardConfig) -> Grade:
    """Grade a response of ``tokens`` tokens, of which ``limit`` were allowed, and shape its reward.

    The answer is right when the whole final channel is the expected integer; without a closed final channel it is
    wrong. ``parts`` holds ``answer`` and, where it is switched on, the ``overlong`` penalty.
    """
    parsed = (channels.final or "").strip()
    correct = is_integer(parsed) and int(parsed) == int(answer)
    parts = {"answer": config.right if correct else config.wrong}
    if config.overlong.buffer_tokens:
        parts["overlong"] = overlong_penalty(tokens, limit, config.overlong.buffer_tokens, config.overlong.factor)
    return Grade(
        correct,
        sum(parts.values()),
        parts,
        well_formed=channels.well_formed,
        parsed=parsed if is_integer(parsed) else None,
    )


def overlong_penalty(tokens: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment: 0 up to ``limit - buffer`` tokens, then linear down to ``-factor`` at ``limit``.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    over = max(tokens - (limit - buffer), 0)
    return -factor * min(over / buffer, 1.0) if over else 0.0
