"""What a run shows while it works: one line a step that stays, and bars for the phase at hand."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from beamline.kernels.compiled import first_use

_SHOWN = (
    ("train/reward_mean", "reward", "+.3f"),
    ("train/accuracy", "right", ".1%"),
    ("train/response_tokens_mean", "length", ".1f"),
    ("policy/entropy", "entropy", ".3f"),
    ("mismatch/logprob_abs_diff_mean", "mismatch", ".1e"),
    ("policy/grad_norm", "grad", ".2f"),
    ("timing/sampling_tokens_per_s", "sample tok/s", ",.0f"),
    ("timing/training_tokens_per_s", "train tok/s", ",.0f"),
    ("timing/step", "s", ".1f"),
)
_SHOWN_IF_ANY = (
    ("train/groups_left_out", "left out"),
    ("train/groups_missing", "missing"),
    ("train/ungraded", "ungraded"),
)
_WIDE = 200  # columns where there is no terminal that tables have to fit into


def _interval(line: Mapping[str, float], key: str) -> str:
    if f"{key}_low" not in line:  # of one problem
        return ""
    return f" [{line[key + '_low']:.1%}, {line[key + '_high']:.1%}]"


class PhaseBar:
    """A bar over the items of a phase that shows tokens a second."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self._tokens = progress, task, 0

    def advance(self, tokens: int) -> None:
        """One more item of so many tokens is done."""
        self._tokens += tokens
        elapsed = self._progress.tasks[self._progress.task_ids.index(self._task)].elapsed or 0.0
        rate = f"{self._tokens / elapsed:,.0f} tok/s" if elapsed > 0.1 else ""
        self._progress.update(self._task, advance=1, rate=rate)


class RunConsole:
    """Progress of a run on the terminal; where there is none, only the lines that stay are printed."""

    def __init__(self, steps: int, done: int) -> None:
        self._steps = steps
        self.console = Console(soft_wrap=True, emoji=False, width=None if sys.stdout.isatty() else _WIDE)
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._run = self._progress.add_task("run", total=steps - done, rate="steps", visible=steps > done)

    def __enter__(self) -> "RunConsole":
        if first_use():
            self.print("first use: the kernels are compiled as they are needed, which adds about a minute, once")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def phase(self, name: str, items: int) -> Iterator[PhaseBar]:
        """A bar over the items of one phase, gone when it ends."""
        task = self._progress.add_task(name, total=items, rate="")
        try:
            yield PhaseBar(self._progress, task)
        finally:
            self._progress.remove_task(task)

    def print(self, text: str) -> None:
        """A line that stays, above the bars."""
        self.console.print(text, highlight=False, markup=False)

    def show(self, table: Table) -> None:
        """A table that stays."""
        self.console.print(table, highlight=False)

    def step_line(self, line: Mapping[str, float]) -> None:
        """Print what a step came to, and advance the bar of the run."""
        parts = [f"step {line['step']:>{len(str(self._steps))}}/{self._steps}"]
        for key, label, form in _SHOWN:
            if key in line:
                parts.append(f"{label} {line[key]:{form}}" if line[key] else f"{label} 0")
        parts += [f"{label} {line[key]:.0f}" for key, label in _SHOWN_IF_ANY if line.get(key)]
        accuracies = [key for key in line if "/avg@" in key and not key.endswith(("_low", "_high"))]
        parts += [f"{key} {line[key]:.1%}{_interval(line, key)}" for key in accuracies]
        if len(parts) > 2 or line["step"]:  # step 0 without an evaluation has nothing to tell
            self.print("  ".join(parts))
        if line["step"]:
            self._progress.advance(self._run)
