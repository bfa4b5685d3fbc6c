"""``metrics.jsonl``: one JSON object a line, one line a step. ``docs/metrics.md`` defines every key."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from beamline.checkpoint.files import write_atomic
from beamline.errors import BeamlineError
from beamline.report.names import is_metric

_NOT_REPRODUCIBLE = ("timing/", "memory/")


class DamagedFileError(BeamlineError, ValueError):
    """A file of a run that does not hold what was written to it."""


class MetricsWriter:
    """Appends to ``metrics.jsonl``, a new file or one that ends in a whole line.

    Raises:
        ValueError: the file ends in a torn line or holds one that is not a line of metrics.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_step = -1.0
        if path.exists():
            lines, torn = _split(path)
            if torn:
                raise ValueError(f"{path} ends in a torn line; cut it with truncate_after(path, step) before appending")
            if lines:
                self._last_step = _parse(path, len(lines), lines[-1])["step"]

    def append(self, line: Mapping[str, float]) -> None:
        """Write one line and wait until it is on disk; a line that is refused leaves the file as it was.

        Raises:
            ValueError: a key is not documented, a value is not finite, or ``step`` is missing or not a later one.
            TypeError: a value is not a plain number.
            OSError: the disk fails or is full; the file may end in a torn line.
        """
        if "step" not in line:
            raise ValueError(f"metrics: a line needs the key 'step'; it has {sorted(line)}")
        for key, value in line.items():
            _check(line["step"], key, value)
        if line["step"] <= self._last_step:
            raise ValueError(f"metrics: step {line['step']} cannot follow step {self._last_step} in {self.path}")
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(dict(line)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path}: {error.strerror}") from error
        self._last_step = line["step"]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All lines of the file, oldest first. A last line that a crash has torn is left out.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: a whole line is not a JSON object of finite numbers with a ``step``.
    """
    lines, _ = _split(path)
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def truncate_after(path: Path, step: int) -> None:
    """Cut the file after the line of ``step``, to go on from that step's checkpoint; all of the cut or none happens.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no line is of that step, or a line cannot be read.
    """
    lines, _ = _split(path)
    steps = [_parse(path, number, line)["step"] for number, line in enumerate(lines, start=1)]
    if step not in steps:
        raise ValueError(f"{path} has no line of step {step}; its last line is of step {steps[-1] if steps else None}")
    write_atomic(path, (line + b"\n" for line in lines[: steps.index(step) + 1]))


def reproducible(line: Mapping[str, float]) -> dict[str, float]:
    """The part of a line that the same seed gives again: everything but ``timing/`` and ``memory/``."""
    return {key: value for key, value in line.items() if not key.startswith(_NOT_REPRODUCIBLE)}


def _check(step: float, key: str, value: object) -> None:
    if not is_metric(key):
        raise ValueError(f"metrics of step {step}: {key!r} is not defined; add it to METRICS and docs/metrics.md")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"metrics of step {step}: {key} must be an int or a float, not {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"metrics of step {step}: {key} is {value}; leave out what has no finite value")


def _split(path: Path) -> tuple[list[bytes], bytes]:
    """The whole lines of a file, without their ends, and what follows the last of them."""
    *lines, torn = path.read_bytes().split(b"\n")
    return lines, torn


def _parse(path: Path, number: int, line: bytes) -> dict[str, float]:
    try:
        record = msgspec.json.decode(line, type=dict[str, int | float])
    except msgspec.DecodeError as error:
        raise DamagedFileError(f"{path}:{number} is not a JSON object of numbers: {error}") from error
    if "step" not in record:
        raise DamagedFileError(f"{path}:{number} has no 'step'")
    return record
