"""Policy losses side by side on the quickstart, in ``benchmarks/results/algorithms.json`` and a picture.

    python -m benchmarks.algorithms

Everything but the loss is the quickstart's. Four updates a step instead of one, because with one the ratio of every
update is 1, where the losses have the same gradient; the learning rate is a quarter, since four times as many updates
at the quickstart's rate make all of them collapse. GSPO averages over sequences first, as its authors do. One run a
loss and seed, one after the other. Differences of a run or two on a small model say what the losses do, not which is
best.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from beamline.report import read_metrics
from benchmarks.harness import parser, train, write
from benchmarks.plot import save

PICTURE = Path("docs/images/algorithms.svg")
SHARED = [
    "algorithm.prompts_per_update=8",
    "learner.optimizer.lr=5e-5",
    "learner.optimizer.warmup_updates=20",
    "evaluation.every=10",
    "report.rollouts_every=0",
    "checkpoint.export=false",
]
RUNS = {
    "GRPO (clip)": ["algorithm.loss=clip"],
    "GSPO": ["algorithm.loss=gspo", "algorithm.aggregation=sequence_mean_token_mean"],
    "CISPO": ["algorithm.loss=cispo"],
    "DPPO (tv)": ["algorithm.loss=dppo"],
}
AVERAGE = "eval/arithmetic/avg@8"
CURVES = {
    AVERAGE: "accuracy on held-out problems (avg@8)",
    "train/reward_mean": "training reward (mean of 5 steps)",
    "policy/entropy": "entropy, nats a token (mean of 5 steps)",
    "policy/clip_share": "tokens on which a bound took hold (mean of 5 steps)",
}
COLORS = ("#1f6fb4", "#c8553d", "#3a9d5d", "#8a5fb0")


def main() -> None:
    """Run everything, write the results and draw."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("build/bench/algorithms"), help="where the runs go")
    options.add_argument("--seeds", type=int, default=2, help="runs of each loss")
    options.add_argument("--picture", type=Path, default=PICTURE, help="the picture")
    arguments = options.parse_args()
    runs = {
        name: [_measure(name, overrides, seed, arguments.out) for seed in range(arguments.seeds)]
        for name, overrides in RUNS.items()
    }
    write("algorithms", {"shared": SHARED, "runs": runs}, _table(runs), arguments.results)
    save(draw(runs), arguments.picture)


def _measure(name: str, overrides: list[str], seed: int, out: Path) -> dict[str, Any]:
    folder = out / f"{name.split()[0].lower()}-{seed}"
    train("quickstart", [*SHARED, *overrides, f"seed={seed}"], folder)
    lines = read_metrics(folder / "metrics.jsonl")
    for line in lines:
        if "policy/clip_share_low" in line:
            line["policy/clip_share"] = line["policy/clip_share_low"] + line["policy/clip_share_high"]
    curves = {key: [[int(line["step"]), line[key]] for line in lines if key in line] for key in CURVES}
    last = [line for line in lines if AVERAGE in line][-1]
    interval = [last[f"{AVERAGE}_low"], last[f"{AVERAGE}_high"]]
    return {"seed": seed, "overrides": overrides, "accuracy": last[AVERAGE], "interval": interval, "curves": curves}


def _table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table("loss", "seed", "before", "after", "95 % interval", "clipped", "entropy at the end")
    for name, of_seeds in runs.items():
        for run in of_seeds:
            curves = run["curves"]
            clipped = [value for _, value in curves["policy/clip_share"]]
            table.add_row(
                name,
                str(run["seed"]),
                f"{curves[AVERAGE][0][1]:.1%}",
                f"{run['accuracy']:.1%}",
                "[{:.1%}, {:.1%}]".format(*run["interval"]),
                f"{sum(clipped) / len(clipped):.2%}",
                f"{curves['policy/entropy'][-1][1]:.3f}",
            )
    return table


def draw(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Four curves over steps: a line a run, a colour a loss."""
    figure = Figure(figsize=(10, 6.4))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(2, 2).ravel()
    for axes, (key, title) in zip(panels, CURVES.items(), strict=True):
        _curve(axes, runs, key, title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(runs), frameon=False)
    return figure


def _curve(axes: Axes, runs: dict[str, list[dict[str, Any]]], key: str, title: str) -> None:
    for color, (name, of_seeds) in zip(COLORS, runs.items(), strict=True):
        for run in of_seeds:
            steps, values = zip(*run["curves"][key], strict=True)
            smooth = (
                values
                if key == AVERAGE
                else [sum(values[max(0, i - 4) : i + 1]) / min(i + 1, 5) for i in range(len(values))]
            )
            style = "-" if run["seed"] == 0 else "--"
            axes.plot(steps, smooth, style, color=color, linewidth=1.6, label=name if run["seed"] == 0 else None)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    if key == "policy/clip_share":
        axes.set_yscale("symlog", linthresh=1e-4)  # from one token in 100,000 to one in three
    axes.set_ylim(bottom=None if key == "train/reward_mean" else 0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
