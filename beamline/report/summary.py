"""What the report says in words and numbers: headlines, cautions and sample responses."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from beamline.report.figures import EvaluationSet, Lines, evaluation_sets
from beamline.report.rollouts import RolloutRow

_CONTROL_TOKEN = re.compile(r"(<\|[^<>|\s]+\|>)")
_CONTROL_CHARACTERS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "␡"}


@dataclass(frozen=True, slots=True)
class Headline:
    """A number to read first, and a word about it."""

    label: str
    value: str
    detail: str = ""
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a response: a control token, or the text between two of them."""

    text: str
    control: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled response as the page shows it. ``verdict`` is ``right``, ``wrong`` or ``ungraded``."""

    row: RolloutRow
    verdict: str
    pieces: list[Piece]


def headlines(lines: Lines, steps: int | None) -> list[Headline]:
    """Accuracy from first to last evaluation, progress, tokens, time and memory. ``steps`` is how many are planned."""
    last_step = int(lines[-1]["step"])
    cards = [_accuracy(lines, evaluation) for evaluation in evaluation_sets(lines)]
    cards.append(Headline("Steps", f"{last_step:,}", f"of {steps:,}" if steps is not None else ""))
    tokens = sum(line.get("train/tokens", 0) for line in lines)
    rates = [line["timing/sampling_tokens_per_s"] for line in lines if "timing/sampling_tokens_per_s" in line]
    rate = f"{compact(median(rates))}/s, median" if rates else ""
    cards.append(Headline("Tokens sampled", compact(tokens), rate))
    times = [line["timing/step"] for line in lines if "timing/step" in line]
    if times:
        cards.append(Headline("Time", duration(sum(times)), f"{duration(sum(times) / len(times))} a step"))
    peaks = [line["memory/peak_bytes"] for line in lines if "memory/peak_bytes" in line]
    if peaks:
        cards.append(Headline("Peak memory", f"{max(peaks) / 2**30:.2f} GiB"))
    return cards


def cautions(lines: Lines) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = []
    if not evaluation_sets(lines):
        notes.append("No evaluation has been recorded yet. Accuracy on training samples is not a measure of the model.")
    ungraded = sum(line.get("train/ungraded", 0) for line in lines)
    if ungraded:
        total = ungraded + sum(line.get("train/graded", 0) for line in lines)
        notes.append(
            f"{ungraded:,} of {total:,} training responses could not be graded; they are left out of every mean."
        )
    for evaluation in evaluation_sets(lines):
        key = f"eval/{evaluation.name}/ungraded"
        missing = sum(line.get(key, 0) for line in lines)
        if missing:
            notes.append(f"{missing:,} evaluation responses of {evaluation.name} could not be graded and are left out.")
    return notes


def choose_samples(rows: Sequence[RolloutRow], count: int) -> list[Sample]:
    """Up to ``count`` responses of as many problems as possible: right and wrong in equal parts where there are."""
    by_turn = sorted(rows, key=lambda row: row["sample"])  # the first sample of every problem, then the second ...
    right = [row for row in by_turn if _verdict(row) == "right"]
    others = [row for row in by_turn if _verdict(row) != "right"]
    wanted = min(len(others), max(count // 2, count - len(right)))
    return [Sample(row, _verdict(row), pieces(row["response"])) for row in right[: count - wanted] + others[:wanted]]


def pieces(response: str) -> list[Piece]:
    """Cut a response at its control tokens, and make invisible control characters visible."""
    parts = _CONTROL_TOKEN.split(response)
    return [Piece(part.translate(_CONTROL_CHARACTERS), n % 2 == 1) for n, part in enumerate(parts) if part]


def duration(seconds: float) -> str:
    """Seconds as people say them, in at most two units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def compact(count: float) -> str:
    """A count, in thousands, millions or billions where it is long."""
    for least, size, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if count >= least:
            return f"{count / size:.1f} {unit}"
    return f"{count:,.0f}"


def _accuracy(lines: Lines, evaluation: EvaluationSet) -> Headline:
    """``start → end`` of avg@k, with the interval of each, pass@k and maj@k."""
    found = [line for line in lines if evaluation.key("avg") in line]
    ends = [found[0], found[-1]] if len(found) > 1 else found
    low, high = evaluation.key("avg_low"), evaluation.key("avg_high")
    details = []
    if all(low in line and high in line for line in ends):
        details.append("95\u00a0% interval " + _arrow(f"{100 * line[low]:.0f}–{100 * line[high]:.0f}" for line in ends))
    for measure in ("pass", "maj"):
        key = evaluation.key(measure)
        if all(key in line for line in ends):
            details.append(f"{measure}@{evaluation.k}\u00a0" + _arrow(f"{100 * line[key]:.0f}" for line in ends))
    value = _arrow(f"{100 * line[evaluation.key('avg')]:.1f}" for line in ends)
    return Headline(f"{evaluation.name} avg@{evaluation.k}", value, " · ".join(details), wide=True)


def _arrow(percentages: Iterable[str]) -> str:
    return "\u00a0→\u00a0".join(percentages) + "\u00a0%"


def _verdict(row: RolloutRow) -> str:
    if row["status"] != "graded":
        return "ungraded"
    return "right" if row["correct"] else "wrong"
