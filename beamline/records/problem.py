"""A task whose answer can be checked."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat before it is rendered to tokens; ``reasoning`` is what the assistant thought before it spoke.

    A past turn of the assistant must carry its reasoning, and no other turn has any.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What the policy is asked and how its answer is judged; read-only.

    ``id`` is unique within a data set and stable over runs: random streams are keyed by it.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    source: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The contents of all messages, for comparing problems by what they ask."""
        return "\n".join(message.content for message in self.messages)
