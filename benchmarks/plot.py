"""The ratios of all benchmarks in one picture: ``docs/benchmarks.svg``.

    python -m benchmarks.plot

A dot is the median over the pairs of runs, its whisker the range, a bar across the row what was aimed at. Equal results
give an equal file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.harness import parser

PICTURE = Path("docs/benchmarks.svg")
SPEEDS = (
    ("sampling", "ragged-64", "Sampling, 64 prompts × 8–256 tokens\nagainst transformers generate"),
    ("sampling", "ragged-512", "Sampling, 512 prompts × 8–256 tokens\nagainst transformers generate"),
    ("sampling", "even-512", "Sampling, 512 prompts × 64 tokens\nagainst transformers generate"),
    ("learner", "ragged-64", "Forward and backward, 64 sequences\nagainst the padded transformers module"),
    ("learner", "parity", "Forward and backward with policy.parity\nagainst our learner without it"),
    ("step", "grpo-8x8", "GRPO step, 8 prompts × 8 samples\nagainst the GRPOTrainer of TRL"),
)
MEMORY = "Sampling, 512 × 256 tokens\nagainst weights, cache and records"
MET, MISSED, TARGET, QUIET = "#1f6fb4", "#c8553d", "#222222", "#8a8a8a"


@dataclass(frozen=True, slots=True)
class Row:
    """One ratio of the picture."""

    label: str
    ratio: float
    low: float
    high: float
    target: float
    met: bool


def main() -> None:
    """Read the results and draw."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    arguments = options.parse_args()
    save(draw(speeds(arguments.results), memory(arguments.results)), arguments.out)


def save(figure: Figure, path: Path) -> None:
    """Write a picture; an equal one is an equal file."""
    mpl.rcParams["svg.hashsalt"] = "beamline"  # else the ids in the file are random
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def speeds(results: Path) -> list[Row]:
    """The peer's seconds over ours."""
    rows = []
    for benchmark, workload, label in SPEEDS:
        found = _read(results, benchmark)["workloads"][workload]
        ratio, target = found["ratio"], found["target"]
        rows.append(Row(label, ratio["median"], ratio["min"], ratio["max"], target, ratio["median"] >= target))
    return rows


def memory(results: Path) -> list[Row]:
    """Memory over its floor."""
    found = _read(results, "memory")
    ratio, limit = found["ratio"], found["limit"]
    return [Row(MEMORY, ratio, ratio, ratio, limit, ratio <= limit)]


def draw(faster: list[Row], smaller: list[Row]) -> Figure:
    """Both kinds of ratio, one above the other."""
    figure = Figure(figsize=(8.6, 5.6))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    above, below = figure.subplots(2, 1, height_ratios=[len(faster), 1.25])
    _rows(above, faster, "Times as fast as the peer (more is better)", "target")
    _rows(below, smaller, "Memory over the least that it takes (less is better)", "at most")
    handles = [
        Line2D([], [], color=MET, marker="o", label="median and range, target met"),
        Line2D([], [], color=MISSED, marker="o", markerfacecolor="white", label="target missed"),
        Line2D([], [], color=TARGET, marker="|", markersize=13, markeredgewidth=2, linestyle="", label="target"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _rows(axes: Axes, rows: list[Row], title: str, goal: str) -> None:
    for y, row in enumerate(rows):
        color = MET if row.met else MISSED
        axes.plot([row.target] * 2, [y - 0.25, y + 0.25], color=TARGET, linewidth=2)
        axes.errorbar(
            row.ratio,
            y,
            xerr=[[row.ratio - row.low], [row.high - row.ratio]],
            fmt="o",
            color=color,
            markerfacecolor=color if row.met else "white",
            capsize=4,
            markersize=7,
        )
        beside: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{row.ratio:.2f}×", (1, y), (8, 6), **beside, color=color, fontsize=10, fontweight="bold")
        axes.annotate(f"{goal} {row.target:.2g}×", (1, y), (8, -7), **beside, fontsize=8.5)
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.06 * max(max(row.high, row.target) for row in rows))
    axes.axvline(1, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _read(results: Path, benchmark: str) -> Any:
    path = results / f"{benchmark}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run python -m benchmarks.{benchmark} first")
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
