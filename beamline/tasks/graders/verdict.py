"""What a grader says about a response."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a response is right, and the answer that was read from it.

    ``parsed`` is normalized, so that equal answers to one problem usually have equal text (for majority votes);
    ``None`` means that the response commits to no answer.
    """

    correct: bool
    parsed: str | None
