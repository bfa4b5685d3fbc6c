"""An evaluation as tables for the terminal."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from beamline.algorithms.evaluation import ProblemResult, SetResult
from beamline.data.wording import bare

_NUMBER = 7  # characters of one: `100.0 %`


def evaluation_table(measured: Mapping[str, SetResult], k: int) -> Table:
    """One row a set (and how many problems it has): avg@k with its interval first, shares in percent."""
    table = _table(("set",), (f"avg@{k}", "95 %", f"pass@{k}", f"maj@{k}", "cut", "tokens", "ungraded"))
    for name, of in measured.items():
        figures = of.metrics
        low, high = (figures.get(f"avg@{k}_{end}") for end in ("low", "high"))
        average, passed, majority = (_percent(figures.get(f"{measure}@{k}")) for measure in ("avg", "pass", "maj"))
        table.add_row(
            f"{escape(name)} ({len(of.problems):,})",
            average,
            "" if low is None or high is None else f"{100 * low:.1f}-{100 * high:.1f}",
            passed,
            majority,
            _percent(figures["truncated_share"]),
            f"{figures['response_tokens_mean']:,.1f}",
            f"{figures['ungraded']:,.0f}",
        )
    return table


def problem_table(name: str, problems: Sequence[ProblemResult]) -> Table:
    """One row a problem of a set: how many of its graded responses are right, and the answer given most often."""
    table = _table((name,), ("right", "cut", "tokens"), ("answer", "most often", "question"))
    for result in problems:
        table.add_row(
            escape(result.problem),
            f"{result.right}/{result.graded}",
            f"{result.truncated}",
            f"{result.tokens_mean:,.1f}",
            escape(result.answer),
            escape(result.majority_answer or ""),
            escape(" ".join(bare(result.question).split())),
        )
    return table


def _table(before: Sequence[str], numbers: Sequence[str], after: Sequence[str] = ()) -> Table:
    """An empty table of texts, numbers and texts, that cuts texts and not numbers where the terminal is narrow."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in before:
        table.add_column(escape(column), no_wrap=True, overflow="ellipsis", max_width=40)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True, min_width=_NUMBER)
    for column in after:
        table.add_column(escape(column), no_wrap=True, overflow="ellipsis", max_width=40)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
