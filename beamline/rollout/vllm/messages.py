"""What is said between this process and an engine process: commands one way, reports the other way.

The order is kept. A command that carries a number is answered by exactly one :class:`Answer` with that number; anything
that goes wrong in the engine ends its process, after a last :class:`Failed`.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from beamline.records import Completion, Key, Request
from beamline.transfer.group import Meeting
from beamline.transfer.plan import Shares

Memory = Literal["weights", "cache"]


class Start(msgspec.Struct, tag=True, frozen=True):
    """Build the engine. ``arguments`` are those of vLLM's ``EngineArgs``; answered by :class:`Started`."""

    number: int
    arguments: dict[str, Any]


class Asked(msgspec.Struct, frozen=True):
    """A request with the seed of its random stream, which fixes its tokens together with the weights."""

    request: Request
    seed: int


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Begin with requests. Not answered: each ends in a :class:`Finished`."""

    asked: list[Asked]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop requests; answered by the list of their partial completions, for those that have not ended yet."""

    number: int
    keys: list[Key]


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Get ready for weights that come cut like this.

    ``shares[r][s]`` is what rank r of this engine is given by rank s of the learner, in the order that it comes;
    ``bucket_bytes`` is how many bytes one hands another at a time, at most. Answered by :class:`Prepared`.
    """

    number: int
    shares: Shares
    bucket_bytes: int


class Join(msgspec.Struct, tag=True, frozen=True):
    """Meet the learner's ranks in a group, through which buckets will come. Answered (None) once all are there."""

    number: int
    meeting: Meeting


class Fill(msgspec.Struct, tag=True, frozen=True):
    """Take bucket ``bucket`` of every pair of ranks; answered (None) once all are taken.

    ``memory[r][s]`` describes memory that rank r of this engine and rank s of the learner both see, as
    :mod:`beamline.transfer.memory` does; it is empty where they have no bucket of this number. Without any memory the
    buckets come through the group (:class:`Join`).
    """

    number: int
    bucket: int
    memory: list[list[bytes]] | None


class Finish(msgspec.Struct, tag=True, frozen=True):
    """All buckets were given: tokens from now on are of ``version``. Answered by the checksums of :class:`Loaded`."""

    number: int
    version: int


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Give memory back, as :class:`~beamline.rollout.sampler.Sampler` says; answered by :class:`DeviceMemory`."""

    number: int
    level: int


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Take memory again; answered by :class:`DeviceMemory`."""

    number: int
    what: list[Memory]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the process. Not answered."""


Command: TypeAlias = Start | Submit | Abort | Prepare | Join | Fill | Finish | Sleep | Wake | Stop


class Started(msgspec.Struct, frozen=True):
    """What was built: on which device, by which versions of libraries, with room for how many tokens."""

    versions: dict[str, str]
    device: str
    cache_tokens: int
    seconds: float

    def __str__(self) -> str:
        """For whoever watches a run."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.device}, room for {self.cache_tokens:,} tokens ({versions}; {self.seconds:.0f} s)"


class Prepared(msgspec.Struct, frozen=True):
    """The GPUs that each rank sees, by UUID: what lies in their memory needs not go through the host's.

    The first of a rank's is the one that it computes on.
    """

    gpus: list[list[str]]


class Loaded(msgspec.Struct, frozen=True):
    """Checksums of a fixed sample of the parts that each rank was given, read back from where they were put."""

    checksums: list[list[int]]


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes in use on the engine's first device before and after, and seconds that it took."""

    before: int
    after: int
    seconds: float


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The result of the command with this number, encoded."""

    number: int
    value: bytes


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Requests that ended by themselves."""

    completions: list[Completion]


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Sent after a step, at most four times a second: how many tokens have been drawn since the process began."""

    tokens: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine's last words: the traceback of what ended it.

    ``hopeless``: one of our own checks refused something, and would again in an engine started anew.
    """

    traceback: str
    hopeless: bool = False


Report: TypeAlias = Answer | Finished | Progress | Failed
