"""Dumps of what was sampled: ``<run>/rollouts/step_000012.jsonl.zst``, one JSON object a sample."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec
import zstandard

from beamline.checkpoint.files import write_atomic
from beamline.records import Finish, GradeStatus
from beamline.report.metrics import DamagedFileError

_LEVEL = 3


class RolloutRow(TypedDict):
    """One sample, which ``step``, ``problem``, ``sample`` and ``attempt`` name together.

    ``response`` is the text with its control tokens; ``tokens`` and ``logprob_mean`` are over what the policy chose.
    ``reward`` is the sum of ``parts``. What could not be graded has no ``correct`` and no ``reward``, and an ``error``
    that says why.
    """

    step: int
    problem: str
    sample: int
    attempt: int
    question: str
    answer: str
    response: str
    parsed: str | None
    correct: bool | None
    reward: float | None
    parts: dict[str, float]
    status: GradeStatus
    error: NotRequired[str]
    finish: Finish
    tokens: int
    logprob_mean: float


def rollouts_path(run: Path, step: int) -> Path:
    """Where the dump of a step lies."""
    return run / "rollouts" / f"step_{step:06d}.jsonl.zst"


def find_rollouts(run: Path) -> list[Path]:
    """The dumps of a run, by step."""
    dumps = (run / "rollouts").glob("step_*.jsonl.zst")
    return sorted((path for path in dumps if re.fullmatch(r"step_\d+\.jsonl\.zst", path.name)), key=step_of)


def step_of(dump: Path) -> int:
    """The step that a dump is of."""
    return int(dump.name.removeprefix("step_").partition(".")[0])


def write_rollouts(path: Path, rows: Iterable[RolloutRow]) -> None:
    """Write a dump, whole or not at all, and its folder where there is none. The same rows give the same bytes.

    Raises:
        ValueError: a number is not finite.
    """
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, _compressed(rows))


def read_rollouts(path: Path) -> list[RolloutRow]:
    """The rows of a dump.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: the file is damaged.
    """
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        data = decompressor.decompress(path.read_bytes())
    except zstandard.ZstdError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error
    if not decompressor.eof:
        raise DamagedFileError(f"{path} is damaged: it ends before its last row")
    try:
        return [msgspec.convert(json.loads(line), RolloutRow) for line in data.splitlines()]
    except (ValueError, msgspec.ValidationError) as error:
        raise DamagedFileError(f"{path} holds a row that is not one of ours: {error}") from error


def _compressed(rows: Iterable[RolloutRow]) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
    for row in rows:
        try:
            line = json.dumps(row, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"rollout of problem {row['problem']!r}, sample {row['sample']}: {error}") from error
        yield compressor.compress(line.encode() + b"\n")
    yield compressor.flush()
