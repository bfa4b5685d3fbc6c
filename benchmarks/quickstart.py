"""The quickstarts, measured: sums with three seeds, problems in English with one, and controls that learn nothing.

    python -m benchmarks.quickstart

Runs the real command line, one run after the other, and writes ``benchmarks/results/quickstart.json``: accuracy before
and after with its 95 % interval over problems, seconds, peak memory, and what it ran on. Prints a table.
"""

from pathlib import Path
from typing import Any

from rich.table import Table

from beamline.report import read_metrics
from benchmarks.harness import parser, train, write

_CONTROL = ["seed=0", "learner.optimizer.lr=0"]
_SUMS = {
    "seed 0": ["seed=0"],
    "seed 1": ["seed=1"],
    "seed 2": ["seed=2"],
    "control, learning rate 0": _CONTROL,
}
_MATH = {"math, seed 0": ["seed=0"], "math, control, learning rate 0": _CONTROL}


def main() -> None:
    """Run everything and write the results."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("build/bench"), help="where the runs go")
    arguments = options.parse_args()
    sums = {name: _measure(name, "quickstart", "arithmetic", of, arguments.out) for name, of in _SUMS.items()}
    math = {name: _measure(name, "quickstart-math", "competition", of, arguments.out) for name, of in _MATH.items()}
    write("quickstart", {"runs": sums, "mean": _mean(sums), "math": math}, _table(sums | math), arguments.results)


def _measure(name: str, recipe: str, evaluation: str, overrides: list[str], out: Path) -> dict[str, Any]:
    folder = out / name.replace(" ", "_").replace(",", "")
    seconds = train(recipe, overrides, folder)
    lines = read_metrics(folder / "metrics.jsonl")
    average = f"eval/{evaluation}/avg@8"
    evaluated = [line for line in lines if average in line]
    return {
        "overrides": overrides,
        "seconds": round(seconds, 1),
        "before": _accuracy(evaluated[0], average),
        "after": _accuracy(evaluated[-1], average),
        "gain_points": round(100 * (evaluated[-1][average] - evaluated[0][average]), 1),
        "response_tokens_mean": round(_average(lines, "train/response_tokens_mean"), 1),
        "sampling_tokens_per_s": round(_average(lines, "timing/sampling_tokens_per_s")),
        "training_tokens_per_s": round(_average(lines, "timing/training_tokens_per_s")),
        "peak_memory_bytes": int(max(line["memory/peak_bytes"] for line in lines)),
        "seconds_by_phase": {
            phase: round(sum(line.get(f"timing/{phase}", 0.0) for line in lines), 1)
            for phase in (
                "sampling",
                "grading",
                "old_logprobs",
                "update",
                "transfer",
                "evaluation",
                "checkpoint",
                "report",
            )
        },
    }


def _accuracy(line: dict[str, float], average: str) -> dict[str, float]:
    return {"avg@8": line[average], "low": line[f"{average}_low"], "high": line[f"{average}_high"]}


def _average(lines: list[dict[str, float]], key: str) -> float:
    values = [line[key] for line in lines if key in line]
    return sum(values) / len(values)


def _mean(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    seeds = [run for name, run in runs.items() if name.startswith("seed")]
    count = len(seeds)
    return {
        "before": sum(run["before"]["avg@8"] for run in seeds) / count,
        "after": sum(run["after"]["avg@8"] for run in seeds) / count,
        "gain_points": sum(run["gain_points"] for run in seeds) / count,
        "seconds": sum(run["seconds"] for run in seeds) / count,
    }


def _table(runs: dict[str, dict[str, Any]]) -> Table:
    table = Table("run", "before", "after", "gain", "seconds", "peak memory")
    for name, run in runs.items():
        table.add_row(
            name,
            *(f"{a['avg@8']:.1%} [{a['low']:.1%}, {a['high']:.1%}]" for a in (run["before"], run["after"])),
            f"{run['gain_points']:+.1f}",
            f"{run['seconds']:.0f}",
            f"{run['peak_memory_bytes'] / 2**30:.2f} GiB",
        )
    return table


if __name__ == "__main__":
    main()
