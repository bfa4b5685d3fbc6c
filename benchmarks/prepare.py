"""Time and memory of preparing a data set of the shape of DAPO-Math-17k.

    python -m benchmarks.prepare

Makes a Parquet file of 1,791,700 rows in a temporary folder: 17,917 rows a hundred times in random order, among them
17,405 distinct ones and 7 prompts with two answers, so that 17,391 are left; ``extra_info`` differs in every row. Each
run is ``beamline data prepare dapo`` in a process of its own, from its start to its end, with the most memory that it
had resident. Then the prepared file is read as a training set, once in a process of its own; reading counts from the
call on, imports are not in it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from beamline.data.wording import dapo
from benchmarks.harness import Summary, parser, write

REPEATS, BASE, PROMPTS, CONFLICTS = 100, 17_917, 17_398, 7
LIMITS = {"seconds": 60.0, "peak_bytes": 4e9}
WORDS = r"""
Let $ABC$ be a triangle with $AB=13$, the and of such that $x^2+y^2$ positive integers $\frac{m}{n}$ where find number
sequence $\sqrt{2}$ for all real numbers $\left(a,b\right)$ prime divisor circle center radius probability 求 整数 满足
polynomial $P(x)$ coefficients distinct set $\{1,2,\ldots,n\}$ is are relatively smallest value
"""


def main() -> None:
    """Make the file, measure, and write the results."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=3, help="runs that count")
    options.add_argument("--make", type=Path, help="make the raw file, and nothing else")
    options.add_argument("--read", type=Path, help="print how long reading this file takes, and nothing else")
    arguments = options.parse_args()
    if arguments.make is not None:
        make(arguments.make)
    elif arguments.read is not None:
        print(_seconds_to_read(arguments.read))
    else:
        record = _measure(arguments.runs)
        write("prepare", record, _table(record), arguments.results)


def make(path: Path) -> None:
    """The raw file. It is made in a process of its own: a parent's memory counts as its child's until that starts."""
    rng, words = np.random.default_rng(0), WORDS.split()
    lengths = np.clip(rng.lognormal(np.log(45), 0.6, PROMPTS), 8, 400).astype(int)
    prompts = [dapo(f"({n}) {' '.join(rng.choice(words, length))}") for n, length in enumerate(lengths)]
    distinct = [(n, str(n % 1000)) for n in range(PROMPTS)] + [(n * 2000, "-1") for n in range(CONFLICTS)]
    rows = distinct + distinct[: BASE - len(distinct)]
    base = pl.DataFrame(
        {
            "data_source": ["math_dapo"] * BASE,
            "prompt": [[{"content": prompts[n], "role": "user"}] for n, _ in rows],
            "ability": ["MATH"] * BASE,
            "reward_model": [{"ground_truth": answer, "style": "rule-lighteval/MATH_v2"} for _, answer in rows],
        }
    )
    order = rng.permutation(np.tile(np.arange(BASE), REPEATS))
    index = pl.Series("index", rng.permutation(BASE * REPEATS)).cast(pl.String).str.pad_start(36, "0")
    base[order].with_columns(extra_info=pl.DataFrame([index]).to_struct("extra_info")).write_parquet(path)


def _measure(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        raw, out = Path(folder) / "raw.parquet", Path(folder) / "out"
        with Console().status("making the raw file"):
            subprocess.run([sys.executable, "-m", "benchmarks.prepare", "--make", str(raw)], check=True)
        size, figures = raw.stat().st_size, []
        for run in range(runs):
            with Console().status(f"run {run + 1} of {runs}"):
                figures.append(_run(raw, out))
        prepared = out / "dapo-math-17k-cleaned.parquet"
        _check(json.loads(prepared.with_suffix(".manifest.json").read_text())["rows"])
        read = [sys.executable, "-m", "benchmarks.prepare", "--read", str(prepared)]
        seconds = float(subprocess.run(read, check=True, capture_output=True, text=True).stdout)
    return {
        "rows": BASE * REPEATS,
        "file_bytes": size,
        "polars": pl.__version__,
        "runs": runs,
        "prepare": {name: asdict(Summary.of([figure[name] for figure in figures])) for name in LIMITS},
        "limits": LIMITS,
        "read_seconds": seconds,
    }


def _run(raw: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "beamline", "data", "prepare", "dapo", "--from", str(raw), "--out", str(out)]
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"preparing ended with code {os.waitstatus_to_exitcode(status)}; its error stands above")
    return {"seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024.0}  # Linux counts KiB


def _check(rows: dict[str, Any]) -> None:
    left = PROMPTS - CONFLICTS
    found = (rows["in"], rows["out"], rows["conflicting_answers"]["rows"], rows["conflicting_answers"]["prompts"])
    if found != (BASE * REPEATS, left, 2 * CONFLICTS, CONFLICTS):
        raise RuntimeError(f"the data set was not cleaned as it should: {rows}")


def _seconds_to_read(path: Path) -> float:
    from beamline.config.schema import FileSource
    from beamline.data import load

    start = time.perf_counter()
    problems = load("train", FileSource(path=path), 0, "train")
    seconds = time.perf_counter() - start
    if len(problems) != PROMPTS - CONFLICTS:
        raise RuntimeError(f"{len(problems)} problems were read")
    return seconds


def _table(record: dict[str, Any]) -> Table:
    table = Table("figure", "median [min, max]", "limit", title=f"preparing {record['rows']:,} rows")
    seconds, memory = (Summary(**record["prepare"][name]) for name in LIMITS)
    gigabytes = Summary(*(value / 1e9 for value in (memory.median, memory.min, memory.max)))
    table.add_row("seconds", str(seconds), f"{LIMITS['seconds']:.0f}")
    table.add_row("peak memory, GB", str(gigabytes), f"{LIMITS['peak_bytes'] / 1e9:.0f}")
    table.add_row("seconds to read the prepared file", f"{record['read_seconds']:.2f}", "")
    return table


if __name__ == "__main__":
    main()
