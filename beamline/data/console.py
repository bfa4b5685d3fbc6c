"""Preparing data on a terminal: a bar while rows are read, then a table of what became of them."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from beamline.data.cleaning import Wording
from beamline.data.files import row_count
from beamline.data.prepare import Prepared, find, prepare


def prepare_and_show(source: str, out: Path, file: Path | None, wording: Wording) -> Prepared:
    """Find a source, prepare it, and print the counts of its manifest.

    Raises:
        DataError: it cannot be had or used.
        OSError: the disk fails.
    """
    console = Console(soft_wrap=True, emoji=False)
    raw = find(source, out, file, wording)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:,.0f} rows"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task(f"reading {raw.file.name}", total=row_count(raw.file))
        prepared = prepare(raw, out, wording, lambda rows: progress.advance(task, rows))
    console.print(_table(raw.file, prepared.manifest["rows"]))
    for excluded in prepared.manifest["rows"]["unusable"]["examples"]:
        console.print(f"left out    {excluded['where']}: {excluded['reason']}", highlight=False, markup=False)
    console.print(f"{prepared.file}\n{prepared.manifest_file}", highlight=False, markup=False)
    return prepared


def _table(file: Path, rows: dict[str, Any]) -> Table:
    table = Table("", title=f"{file.name}")
    table.add_column("rows", justify="right")
    conflicting = rows["conflicting_answers"]
    table.add_row("read", f"{rows['in']:,}")
    table.add_row("exact duplicates", f"{rows['exact_duplicates']:,}")
    table.add_row(f"of {conflicting['prompts']:,} prompts with several answers", f"{conflicting['rows']:,}")
    table.add_row("cannot be used", f"{rows['unusable']['rows']:,}")
    table.add_row("written", f"{rows['out']:,}")
    return table
