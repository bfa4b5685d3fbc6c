"""The grading pool: tasks a second, the way there and back, starts of workers, and what a response that hangs costs.

    python -m benchmarks.grading

The mix is what a run on competition problems meets: 80 % of the responses end in an integer, 15 % in a fraction or a
decimal, 5 % in something that needs symbolic algebra, all of them different, all graded by ``math``. The same tasks are
graded without a pool, in one process, as the limit: what a second worker adds and what the pool takes. ``in graders``
is the share of the workers' time that they spent inside a grader. Figures are medians over ``--rounds``.
"""

import random
import time
from statistics import median
from typing import Any

from rich.table import Table

from beamline.tasks.graders.tolerant import grade_math
from beamline.tasks.pool import GradingPool, GradingTask
from benchmarks.harness import median_seconds, parser, write

WORKERS = (1, 2)
TASKS = 4000
AIMED_AT = 1500  # tasks a second, the mix on two workers
DEADLINE, MEMORY_MB = 10.0, 1024
HANGING_DEADLINE, HANGING = 1.0, GradingTask("math", r"Answer: \boxed{5}", r"\sum_{n=1}^{10^9} \frac{1}{n^n}")
THOUGHTS = "We look at the remainders, of which there are finitely many, and add them up one after the other. " * 3
KINDS = ("mix", "integers", "symbolic")


def main() -> None:
    """Measure and write the results."""
    arguments = parser(__doc__, rounds=5).parse_args()
    rates = {kind: _rates(kind, arguments.rounds) for kind in KINDS}
    record = {
        "tasks": TASKS,
        "aimed_at": AIMED_AT,
        "rates": rates,
        "start_seconds": {name: _start(name, arguments.rounds) for name in ("integer", "math")},
        "round_trip_us": _round_trip(),
        "hanging": _hanging(),
    }
    write("grading", record, _table(record), arguments.results)


def tasks_of(kind: str, count: int = TASKS, seed: int = 0) -> list[GradingTask]:
    """Right and wrong responses of a kind; a smaller number is the beginning of a larger one."""
    draw = random.Random(f"{seed} {kind}")
    symbolic = {"mix": 0.05, "integers": 0.0, "symbolic": 1.0}[kind]
    integers = {"mix": 0.80, "integers": 1.0, "symbolic": 0.0}[kind]
    tasks = []
    for _ in range(count):
        share, n, m = draw.random(), draw.randrange(1, 1000), draw.randrange(2, 1000)
        said = n + draw.randrange(
            2
        )  # half of them wrong, but for those that need algebra: numbers tell wrong ones apart
        if share < symbolic:
            response, answer = rf"\frac{{{n}\sqrt{{{m}}}}}{{{m}}}", rf"\frac{{{n}}}{{\sqrt{{{m}}}}}"
        elif share < symbolic + integers:
            response, answer = str(said), str(n)
        else:
            response, answer = (
                (rf"\frac{{{said}}}{{{m}}}", rf"\frac{{{n}}}{{{m}}}") if m % 2 else (f"{said}.5", f"{n}.5")
            )
        tasks.append(GradingTask("math", rf"{THOUGHTS}Answer: \boxed{{{response}}}", answer))
    return tasks


def _rates(kind: str, rounds: int) -> dict[str, Any]:
    """Tasks a second without a pool and by workers."""
    tasks = tasks_of(kind, TASKS // 8 if kind == "symbolic" else TASKS)
    found: dict[str, Any] = {
        "tasks": len(tasks),
        "without": len(tasks) / median_seconds(lambda: _without(tasks), rounds),
    }
    for workers in WORKERS:
        with GradingPool(workers, DEADLINE, MEMORY_MB) as pool:
            _warm(pool, workers)
            runs = [_run(pool, tasks) for _ in range(rounds + 1)][1:]
        figures = {name: median(run[name] for run in runs) for name in runs[0]}
        figures["in_graders"] /= workers
        found[f"workers_{workers}"] = figures
    return found


def _run(pool: GradingPool, tasks: list[GradingTask]) -> dict[str, float]:
    """Tasks a second, seconds in graders by second, and microseconds of this process's CPU by task."""
    wall, own = time.perf_counter(), time.process_time()
    outcomes = pool.grade_all(tasks)
    own, wall = time.process_time() - own, time.perf_counter() - wall
    lost = [outcome for outcome in outcomes if outcome.status != "graded"]
    if lost:
        raise RuntimeError(f"{len(lost)} tasks were not graded, for instance: {lost[0]}")
    inside = sum(outcome.seconds for outcome in outcomes)
    return {"rate": len(tasks) / wall, "in_graders": inside / wall, "pool_us": 1e6 * own / len(tasks)}


def _without(tasks: list[GradingTask]) -> None:
    for task in tasks:
        grade_math(task.response, task.answer)


def _warm(pool: GradingPool, workers: int) -> None:
    """Have all workers import what ``math`` needs."""
    pool.grade_all(tasks_of("symbolic", 100 * workers, seed=1))


def _start(grader: str, rounds: int) -> float:
    """Seconds from nothing to the first outcome."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        with GradingPool(1, DEADLINE, MEMORY_MB) as pool:
            pool.grade_all([GradingTask(grader, "Answer: 5", "5")])
            times.append(time.perf_counter() - start)
    return median(times)


def _round_trip() -> dict[str, float]:
    """Microseconds of one task at a time: in all, and in the grader."""
    (task,) = tasks_of("integers", 1)
    times, inside = [], []
    with GradingPool(1, DEADLINE, MEMORY_MB) as pool:
        pool.grade_all([task] * 100)
        for _ in range(1000):
            start = time.perf_counter()
            (outcome,) = pool.grade_all([task])
            times.append(time.perf_counter() - start)
            inside.append(outcome.seconds)
    return {"total": 1e6 * median(times), "grader": 1e6 * median(inside)}


def _hanging() -> dict[str, Any]:
    """Seconds for 1,000 tasks of the mix of which four hang, on two workers."""
    tasks = tasks_of("mix", 1000)
    for n in range(100, 1000, 250):
        tasks[n] = HANGING
    with GradingPool(2, HANGING_DEADLINE, MEMORY_MB) as pool:
        _warm(pool, 2)
        start = time.perf_counter()
        outcomes = pool.grade_all(tasks)
        seconds = time.perf_counter() - start
    timeouts = sum(outcome.status == "timeout" for outcome in outcomes)
    return {"tasks": len(tasks), "deadline": HANGING_DEADLINE, "timeouts": timeouts, "seconds": seconds}


def _table(record: dict[str, Any]) -> Table:
    table = Table("what", "figure", title="the grading pool")
    for kind, rates in record["rates"].items():
        table.add_row(f"{kind}, without a pool", f"{rates['without']:,.0f} tasks/s")
        for workers in WORKERS:
            found = rates[f"workers_{workers}"]
            table.add_row(
                f"{kind}, {workers} worker{'s' * (workers > 1)}",
                f"{found['rate']:,.0f} tasks/s, {found['in_graders']:.0%} in graders, "
                f"{found['pool_us']:.0f} us of the pool a task",
            )
    met = "met" if record["rates"]["mix"]["workers_2"]["rate"] >= AIMED_AT else "missed"
    table.add_row("aimed at: mix, 2 workers", f"{AIMED_AT:,} tasks/s ({met})")
    for name, seconds in record["start_seconds"].items():
        table.add_row(f"first outcome of a new pool, {name}", f"{1e3 * seconds:.0f} ms")
    trip = record["round_trip_us"]
    table.add_row("one task, there and back", f"{trip['total']:.0f} us, {trip['grader']:.0f} us of it in the grader")
    hanging = record["hanging"]
    table.add_row(
        f"{hanging['tasks']:,} tasks, {hanging['timeouts']} of them hang for {hanging['deadline']:g} s",
        f"{hanging['seconds']:.1f} s",
    )
    return table


if __name__ == "__main__":
    main()
