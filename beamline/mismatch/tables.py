"""What was found, for the terminal."""

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from beamline.report.mismatch import Mismatch, Routing, conclusion, number
from beamline.runtime.console import RunConsole

_BAR = 20  # characters of the longest bar


def show(console: RunConsole, found: Mismatch) -> None:
    """Print tables with bars, and the conclusion."""
    changed = f", with {' '.join(found.settings)}" if found.settings else ""
    console.print(
        f"{found.model}, step {found.step}{changed}: {found.sequences} sequences with {found.tokens:,} response tokens"
    )
    seen = found.observed
    console.print(
        f"|Δ log p| of sampler and learner: mean {number(seen.mean)}, 99 % {number(seen.p99)}, max {number(seen.max)}"
    )
    console.show(_alone(found))
    console.show(_chain(found))
    if found.routing is not None and found.routing.any_layer:
        console.show(_routes(found.routing))
    console.print(conclusion(found))


def _alone(found: Mismatch) -> Table:
    table = _table(
        "each cause alone", "learner", "switched to", numbers=("", "mean", "99 %", "max"), bars="logarithmic"
    )
    least, largest = _decades([cause.alone.mean for cause in found.causes if cause.alone])
    for cause in found.causes:
        cells = map(escape, (cause.name, cause.learner, cause.switched))
        if cause.alone is None:
            table.add_row(*cells)
        else:
            mean, (mark, character) = cause.alone.mean, ("", "█") if cause.differs else ("what if", "░")
            bar = _bar(math.log10(mean) - least, largest - least, character) if mean else ""
            table.add_row(*cells, mark, *map(number, (mean, cause.alone.p99, cause.alone.max)), bar)
    return table


def _decades(means: Sequence[float]) -> tuple[float, float]:
    """Where bars begin and end that show logarithms: at a power of ten, and at the largest."""
    seen = [math.log10(mean) for mean in means if mean]
    return math.ceil(min(seen, default=0.0)) - 1, max(seen, default=0.0)


def _chain(found: Mismatch) -> Table:
    table = _table("from learner to sampler", "learner", "sampler", numbers=("change", "left"))
    mean = found.observed.mean
    table.add_row("as they are", "", "", "", number(mean), _bar(mean, mean))
    for cause in found.causes:
        if cause.change is not None and cause.left is not None:
            cells = map(escape, (cause.name, cause.learner, cause.sampler))
            table.add_row(*cells, number(cause.change), number(cause.left), _bar(cause.left, mean))
    return table


def _routes(routing: Routing) -> Table:
    table = _table("other experts", numbers=("rows",))
    shares = [(f"layer {layer.layer}", layer.share) for layer in routing.layers]
    for name, share in [*shares, ("any layer", routing.any_layer)]:
        table.add_row(name, f"{share:.2%}", _bar(share, routing.any_layer))
    return table


def _table(name: str, *texts: str, numbers: Sequence[str], bars: str = "") -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(name, no_wrap=True, min_width=len("batch composition"))
    for column in texts:
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=32)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True, min_width=7)
    table.add_column(bars, no_wrap=True, overflow="crop")
    return table


def _bar(value: float, largest: float, character: str = "█") -> str:
    """A bar of at least one character where the value is not 0."""
    return character * max(round(_BAR * value / largest), 1) if value else ""
