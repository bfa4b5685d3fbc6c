"""Measuring two sides fairly: runs in turn, a process for each side, medians with their range, and what it ran on."""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from beamline.runtime.determinism import cpu_family

RESULTS = Path("benchmarks/results")
THREADS = 2  # of torch, on both sides
Figures = Mapping[str, float]
Side = Callable[[], Figures]
Check = Callable[[Figures, Figures], None]

# How often an idle thread of GNU OpenMP looks for work before it sleeps. The peers, with thousands of small operations,
# are a fifth faster with the library's default; ours is as Beamline sets it for itself.
OURS, PEER = {"GOMP_SPINCOUNT": "3000"}, {"GOMP_SPINCOUNT": "300000"}


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


class Apart:
    """A side in a process of its own, with its own environment; it works only while it is called.

    ``factory`` makes the side there, and is called at once. A side that is a context is entered and left there.
    """

    def __init__(self, factory: Callable[[], Any], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, factory))
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        other.close()

    def __enter__(self) -> Side:
        self._receive()  # when it is ready
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()

    def __call__(self) -> Figures:
        self._connection.send(None)
        return self._receive()

    def _receive(self) -> Figures:
        try:
            return cast(Figures, self._connection.recv())
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a side ended with code {self._process.exitcode}; its error stands above") from None


def _serve(connection: Any, factory: Callable[[], Any]) -> None:
    made = factory()
    with made if isinstance(made, AbstractContextManager) else nullcontext(made) as side:
        connection.send({})
        while True:
            try:
                connection.recv()
            except EOFError:
                return
            connection.send(side())


def both(
    ours: Callable[[], Any], peer: Callable[[], Any], rounds: int, label: str, check: Check | None = None
) -> Comparison:
    """:func:`paired` with each side apart, in the environment in which it is fastest (:data:`OURS`, :data:`PEER`)."""
    with Apart(ours, OURS) as one, Apart(peer, PEER) as other:
        return paired(one, other, rounds, label=label, check=check)


def paired(
    ours: Side, peer: Side, rounds: int, warmup: int = 1, label: str = "", check: Check | None = None
) -> Comparison:
    """Run the two sides in turn: ``warmup`` pairs that do not count, then ``rounds`` that do.

    Each run gives its own figures, ``seconds`` among them, so that it decides what is inside the clock. What slows the
    machine for a while slows both runs of a pair, which is why the ratio is taken pair by pair. ``check`` sees the
    figures of every pair and raises if they cannot be compared.
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

        pairs = []
        for _ in range(warmup + rounds):
            pairs.append((once(ours), once(peer)))
            if check is not None:
                check(*pairs[-1])
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


def median_seconds(work: Callable[[], Any], rounds: int) -> float:
    """Median time of a piece of work, which is done once before it is timed."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


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


def train(recipe: str, overrides: Sequence[str], folder: Path) -> float:
    """Train a recipe into a folder, anew and by the real command line; returns the seconds of the process."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "beamline", "train", f"recipes/{recipe}.yaml", *overrides, f"output={folder}"]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


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
    return f"{target:.2g} ({'met' if ratio >= target else 'missed'})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
