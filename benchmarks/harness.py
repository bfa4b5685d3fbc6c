"""Measuring two sides fairly: alternating runs in one process, medians with their range, and what it all ran on."""

import argparse
import gc
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from beamline.runtime.determinism import cpu_family

RESULTS = Path("benchmarks/results")
THREADS = 2  # of torch, on both sides
Figures = Mapping[str, float]
Side = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Summary:
    """A figure over the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_short(self.median)} [{_short(self.min)}, {_short(self.max)}]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Each side's figures over the rounds. ``ratio`` is the peer's seconds over ours, taken in each pair of runs."""

    rounds: int
    ours: dict[str, Summary]
    peer: dict[str, Summary]
    ratio: Summary


def paired(ours: Side, peer: Side, rounds: int, warmup: int = 1, label: str = "") -> Comparison:
    """Run the two sides in turn: ``warmup`` pairs that do not count, then ``rounds`` that do.

    Each run gives its own figures, ``seconds`` among them, so that it decides what is inside the clock. What slows the
    machine for a while slows both runs of a pair, which is why the ratio is taken pair by pair.
    """
    if rounds < 1:
        raise ValueError(f"paired: rounds must be at least 1, not {rounds}")
    with _progress() as bar:
        task = bar.add_task(label, total=2 * (warmup + rounds))

        def once(side: Side) -> Figures:
            gc.collect()
            figures = side()
            bar.advance(task)
            return figures

        pairs = [(once(ours), once(peer)) for _ in range(warmup + rounds)]
    return compare(pairs[warmup:])


def compare(pairs: Sequence[tuple[Figures, Figures]]) -> Comparison:
    """The summary of pairs of runs, ours first."""
    ours, peer = zip(*pairs, strict=True)
    ratios = [theirs["seconds"] / own["seconds"] for own, theirs in pairs]
    return Comparison(len(pairs), _summaries(ours), _summaries(peer), Summary.of(ratios))


def _summaries(runs: Sequence[Figures]) -> dict[str, Summary]:
    return {name: Summary.of([run[name] for run in runs]) for name in runs[0]}


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )


def parser(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """The options that benchmarks share: where results go and, where there are any, the number of rounds."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, default=RESULTS, help="the folder of the JSON files")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="pairs of runs that count")
    return made


def machine() -> dict[str, Any]:
    """What figures depend on, beside the code. A package that is not installed has no version."""
    return {
        "cpu": cpu_family(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build, which the package's metadata may lack
        **{package: _version(package) for package in ("transformers", "numba", "trl")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(name: str, record: Mapping[str, Any], table: Table, folder: Path = RESULTS) -> None:
    """Write ``<folder>/<name>.json``, with the command and the machine in front, and print the table."""
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, "machine": machine(), **record}, indent=2)
    (folder / f"{name}.json").write_text(text + "\n")
    Console().print(table)


def record(comparison: Comparison, target: float) -> dict[str, Any]:
    """A comparison as JSON, with the ratio that is aimed at."""
    return asdict(comparison) | {"target": target}


def comparison_table(
    title: str, comparisons: Mapping[str, Comparison], targets: Mapping[str, float], figure: str, unit: str
) -> Table:
    """One row a workload: a figure of both sides (its median), the ratio with its range, and what was aimed at."""
    table = Table("workload", "ours", "peer", "ratio", "target", title=f"{title}, {unit}")
    for name, comparison in comparisons.items():
        ours, peer = (_short(side[figure].median) for side in (comparison.ours, comparison.peer))
        table.add_row(name, ours, peer, str(comparison.ratio), verdict(comparison.ratio.median, targets[name]))
    return table


def verdict(ratio: float, target: float) -> str:
    """The target of a ratio, and whether it is met."""
    return f"{target:g} ({'met' if ratio >= target else 'missed'})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
