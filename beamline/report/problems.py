"""How the problems of each evaluation set came out, from ``export/evals/step_25/<set>.problems.jsonl``."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from beamline.algorithms.evaluation import ProblemResult
from beamline.checkpoint.files import write_atomic
from beamline.report.metrics import DamagedFileError

_SUFFIX = ".problems.jsonl"


@dataclass(frozen=True, slots=True)
class SetHistory:
    """The problems of a set at its last evaluation, with the row of each at the first one, hardest problems first."""

    name: str
    first_step: int
    last_step: int
    rows: list[tuple[ProblemResult | None, ProblemResult]]


def write_problems(folder: Path, name: str, rows: Iterable[ProblemResult]) -> None:
    """Write the results of a set, whole or not at all."""
    write_atomic(folder / f"{name}{_SUFFIX}", (json.dumps(asdict(row)).encode() + b"\n" for row in rows))


def evaluation_folder(run: Path, step: int) -> Path:
    """Where the dumps of an evaluation lie."""
    return run / "export" / "evals" / f"step_{step}"


def find_evaluations(run: Path) -> list[tuple[int, Path]]:
    """The steps with dumps of an evaluation, and their folders, by step."""
    folders = (run / "export" / "evals").glob("step_*")
    return sorted((int(path.name[5:]), path) for path in folders if re.fullmatch(r"step_\d+", path.name))


def read_results(run: Path) -> list[SetHistory]:
    """The first and last results of every evaluation set that a run has measured.

    Raises:
        ValueError: a file is damaged.
    """
    by_set: dict[str, list[tuple[int, Path]]] = {}
    for step, folder in find_evaluations(run):
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            by_set.setdefault(path.name.removesuffix(_SUFFIX), []).append((step, path))
    return [_results(name, found) for name, found in by_set.items()]


def _results(name: str, found: list[tuple[int, Path]]) -> SetHistory:
    (first_step, first), (last_step, last) = found[0], found[-1]
    before = {row.problem: row for row in _read(first)}
    rows = [(before.get(row.problem), row) for row in _read(last)]
    rows.sort(key=lambda pair: pair[1].right / max(pair[1].graded, 1))
    return SetHistory(name, first_step, last_step, rows)


def _read(path: Path) -> list[ProblemResult]:
    try:
        return [msgspec.convert(json.loads(line), ProblemResult) for line in path.read_bytes().splitlines()]
    except (ValueError, msgspec.ValidationError) as error:
        raise DamagedFileError(f"{path} holds a row that is not one of ours: {error}") from error
