"""The plots of the report, as plain plotly.js figures: a pure function of the lines of ``metrics.jsonl``.

Colors are written ``var(--name)``; the page fills them in from its style sheet, for light and dark alike.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Lines = Sequence[dict[str, float]]
Trace = dict[str, Any]

PHASES = ("sampling", "grading", "old_logprobs", "update", "transfer", "evaluation", "checkpoint", "report")

_COLORS = tuple(f"var(--series-{n})" for n in range(1, 9))
_GREY = "var(--series-grey)"
_MOST_MARKED_POINTS, _MOST_THICK_POINTS, _MOST_BARS, _MOST_LABELED_STEPS = 40, 300, 120, 10
_AXIS: dict[str, Any] = {
    "gridcolor": "var(--grid)",
    "linecolor": "var(--grid)",
    "zeroline": False,
    "automargin": True,
    "title": {"font": {"size": 12, "color": "var(--quiet)"}, "standoff": 8},
}


_OPTIONAL = {"correction", "divergence"}  # plots that some runs have nothing for

LOOK: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink)"},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--edge)", "font": {"color": "var(--ink)"}},
}
"""The part of a layout that is the same in all plots."""

_SPIKE = {"spikecolor": "var(--quiet)", "spikethickness": -1, "spikedash": "solid"}  # -1: without a white outline


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot. ``traces`` is empty when the run has recorded nothing for it."""

    id: str
    title: str
    note: str
    traces: list[Trace]
    layout: dict[str, Any]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """An evaluation set as the metrics name it: ``eval/<name>/avg@<k>``."""

    name: str
    k: int

    def key(self, metric: str) -> str:
        """Name of one of its metrics: ``avg``, ``avg_low``, ``avg_high``, ``pass`` or ``maj``."""
        measure, _, bound = metric.partition("_")
        return f"eval/{self.name}/{measure}@{self.k}" + (f"_{bound}" if bound else "")


def evaluation_sets(lines: Lines) -> list[EvaluationSet]:
    """The evaluation sets that the lines hold, in order of appearance."""
    matches = (re.fullmatch(r"eval/([^/]+)/avg@(\d+)", key) for line in lines for key in line)
    return list(dict.fromkeys(EvaluationSet(match[1], int(match[2])) for match in matches if match))


def figures(lines: Lines) -> list[Figure]:
    """All plots of the report, in order; ``lines`` has one line at least."""
    plots: tuple[Callable[[Lines], Figure], ...] = (
        _accuracy,
        _reward,
        _response_length,
        _mismatch,
        _correction,
        _entropy,
        _clip_share,
        _divergence,
        _grad_norm,
        _timing,
    )
    drawn = [figure for figure in (plot(lines) for plot in plots) if figure.traces or figure.id not in _OPTIONAL]
    if lines[-1]["step"] - lines[0]["step"] <= _MOST_LABELED_STEPS:
        for figure in drawn:
            figure.layout["xaxis"]["dtick"] = 1  # plotly.js would mark halves of a step
    return drawn


def _accuracy(lines: Lines) -> Figure:
    traces = _line(lines, "train/accuracy", "training samples", _GREY, ".1%", width=1)
    for number, evaluation in enumerate(evaluation_sets(lines)):
        color = _COLORS[number % len(_COLORS)]
        name = escape(evaluation.name)
        traces += _line(lines, evaluation.key("pass"), f"{name} pass@{evaluation.k}", color, ".1%", dash="dot")
        traces += _line(lines, evaluation.key("maj"), f"{name} maj@{evaluation.k}", color, ".1%", dash="dash")
        traces += _with_interval(lines, evaluation, f"{name} avg@{evaluation.k}", color)
    note = "avg@k: mean share of right answers over k samples a problem, with its 95 % interval over problems. "
    note += (
        "pass@k: share of problems with at least one right answer. maj@k: share whose most frequent answer is right."
    )
    return Figure("accuracy", "Accuracy", note, traces, _layout("accuracy", ".0%", rangemode="tozero"), wide=True)


def _reward(lines: Lines) -> Figure:
    keys = ("train/reward_mean", "train/reward_std")
    points = [(line["step"], line[keys[0]], line[keys[1]]) for line in lines if all(key in line for key in keys)]
    bounds = [(step, mean - std, mean + std) for step, mean, std in points]
    traces = _band(bounds, _COLORS[0], "mean ± std") + _line(lines, keys[0], "mean", _COLORS[0], ".3f")
    note = "Mean reward of the graded responses of a step; the band is one standard deviation of single responses."
    return Figure("reward", "Training reward", note, traces, _layout("reward", legend=False))


def _response_length(lines: Lines) -> Figure:
    traces = _line(lines, "train/response_tokens_max", "max", _COLORS[2], ".0f", width=1)
    traces += _line(lines, "train/response_tokens_mean", "mean", _COLORS[0], ".1f")
    traces += _line(lines, "train/truncated_share", "truncated", _COLORS[5], ".2%", yaxis="y2")
    layout = _layout("tokens", rangemode="tozero", domain=[0.38, 1])
    layout["yaxis2"] = axis("truncated", ".2~%", rangemode="tozero", domain=[0, 0.24], nticks=3)
    layout["xaxis"]["anchor"] = "y2"
    layout["hoversubplots"] = "axis"  # one label for both panels
    note = "Tokens that the policy chose in a response, and the share of responses cut at the limit."
    return Figure("response-length", "Response length", note, traces, layout)


def _mismatch(lines: Lines) -> Figure:
    keys = {name: f"mismatch/logprob_abs_diff_{name}" for name in ("max", "p99", "mean")}
    traces = _line(lines, keys["max"], "max", _COLORS[2], ".2e", width=1)
    traces += _line(lines, keys["p99"], "99 %", _COLORS[1], ".2e", width=1)
    traces += _line(lines, keys["mean"], "mean", _COLORS[0], ".2e")
    values = [line[key] for line in lines for key in keys.values() if key in line]
    note = "How far the sampler's and the learner's log-probabilities of the same token lie apart."
    if any(values):
        axis: dict[str, Any] = {"type": "log", "dtick": 1} if all(values) else {"rangemode": "tozero"}
    else:
        axis = {"range": [-5e-8, 1e-6]}
        note += " They have the same bits: the difference is exactly 0."
    layout = _layout("|Δ log p|", ".0e", **axis)
    return Figure("mismatch", "Sampler against learner", note, traces, layout)


def _correction(lines: Lines) -> Figure:
    traces = _line(lines, "correction/kept_share", "kept", _COLORS[0], ".2%")
    traces += _line(lines, "correction/kept_share_length_q4", "kept of long responses", _COLORS[0], ".2%", dash="dot")
    for color, rule in zip(_COLORS[1:], ("veto", "sequence_mask", "weight"), strict=False):
        name = "dropped by " + rule.replace("_", " ")
        traces += _line(lines, f"correction/dropped_share_{rule}", name, color, ".2%", width=1)
    traces += _line(lines, "correction/capped_share", "weight capped", _COLORS[5], ".2%", width=1)
    note = (
        "Share of tokens that the correction between sampler and learner keeps, and that each of its rules leaves out."
    )
    layout = _layout("share of tokens", ".2~%", rangemode="tozero")
    return Figure("correction", "Correction", note, traces, layout)


def _entropy(lines: Lines) -> Figure:
    quarters = zip(
        range(1, 5), _COLORS[1:], ("first quarter", "second quarter", "third quarter", "last quarter"), strict=False
    )
    traces = [
        trace
        for n, color, name in quarters
        for trace in _line(lines, f"policy/entropy_position_q{n}", name, color, ".3f", width=1)
    ]
    traces += _line(lines, "policy/entropy", "all tokens", _COLORS[0], ".3f")
    note = "Mean entropy of the policy's next-token distribution at the sampling temperature, by place in the response."
    return Figure("entropy", "Entropy", note, traces, _layout("nats per token", rangemode="tozero"))


def _clip_share(lines: Lines) -> Figure:
    traces = _line(lines, "policy/clip_share_low", "low", _COLORS[0], ".3%")
    traces += _line(lines, "policy/clip_share_high", "high", _COLORS[2], ".3%")
    note = "Share of trained tokens on which a bound of the ratio took hold, the lower and the upper one."
    return Figure("clip-share", "Clip share", note, traces, _layout("share of tokens", ".2~%", rangemode="tozero"))


def _divergence(lines: Lines) -> Figure:
    moved = any(line.get("policy/kl_old") for line in lines)  # with one update a step it never does
    traces = _line(lines, "policy/kl_old", "from the start of the step", _COLORS[0], ".2e") if moved else []
    traces += _line(lines, "policy/kl_reference", "from the reference", _COLORS[2], ".2e")
    note = "Estimates of the divergence of the policy: within a step, and from the model that it began as."
    return Figure("divergence", "Divergence", note, traces, _layout("nats per token", ".0e", rangemode="tozero"))


def _grad_norm(lines: Lines) -> Figure:
    traces = _line(lines, "policy/grad_norm", "gradient norm", _COLORS[0], ".4f")
    note = "Global norm of the gradient before clipping, mean over the updates of a step."
    return Figure("grad-norm", "Gradient norm", note, traces, _layout("norm", legend=False, rangemode="tozero"))


def _timing(lines: Lines) -> Figure:
    timed = [line for line in lines if "timing/step" in line]
    size = -(-len(timed) // _MOST_BARS)
    bins = [timed[start : start + size] for start in range(0, len(timed), size or 1)]
    traces = [
        _bar(bins, [_mean_seconds(group, phase) for group in bins], phase.replace("_", " "), color)
        for phase, color in zip(PHASES, _COLORS, strict=True)
        if any(f"timing/{phase}" in line for line in timed)
    ]
    if timed:
        rest = [max(0.0, _mean_seconds(group, "step") - sum(_mean_seconds(group, p) for p in PHASES)) for group in bins]
        traces.append(_bar(bins, rest, "other", _GREY))
    layout = _layout("seconds a step") | {"barmode": "stack", "bargap": 0.15}
    note = "Wall-clock time of a step by phase; the height of a bar is the whole step."
    if size > 1:
        note += f" A bar is the mean of {size} steps."
    return Figure("timing", "Time by phase", note, traces, layout, wide=True)


def _mean_seconds(lines: Lines, phase: str) -> float:
    """Mean over lines; a phase that a step did not have took it no time."""
    return sum(line.get(f"timing/{phase}", 0.0) for line in lines) / len(lines)


def _with_interval(lines: Lines, evaluation: EvaluationSet, name: str, color: str) -> list[Trace]:
    """The line of avg@k with its band, or with whiskers where a single evaluation gives a band no width."""
    keys = [evaluation.key("avg_low"), evaluation.key("avg"), evaluation.key("avg_high")]
    [trace] = _line(lines, keys[1], name, color, ".1%")
    points = [(line["step"], *(line[key] for key in keys)) for line in lines if all(key in line for key in keys)]
    if len(points) == len(trace["x"]):
        trace["customdata"] = [[low, high] for _, low, _, high in points]
        trace["hovertemplate"] = "%{y:.1%}  [%{customdata[0]:.1%}, %{customdata[1]:.1%}]"
    if len(points) == len(trace["x"]) == 1:
        _, low, mean, high = points[0]
        trace["error_y"] = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
    return [*_band([(step, low, high) for step, low, _, high in points], color, f"{name} interval"), trace]


def _line(
    lines: Lines, key: str, name: str, color: str, hover: str, width: float = 2, dash: str = "solid", yaxis: str = "y"
) -> list[Trace]:
    """One trace over the steps that hold ``key``; none where no step does."""
    points = [(line["step"], line[key]) for line in lines if key in line]
    if not points:
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(points) <= _MOST_MARKED_POINTS else "lines",
            "name": name,
            "x": [step for step, _ in points],
            "y": [value for _, value in points],
            "yaxis": yaxis,
            "line": {"color": color, "width": width if len(points) <= _MOST_THICK_POINTS else 1, "dash": dash},
            "marker": {"size": 5, "color": color},
            "hovertemplate": f"%{{y:{hover}}}",
        }
    ]


def _band(bounds: list[tuple[float, float, float]], color: str, name: str) -> list[Trace]:
    """The area between ``(step, low, high)``; none where fewer than two steps span one."""
    if len(bounds) < 2:
        return []
    there = [(step, high) for step, _, high in bounds]
    back = [(step, low) for step, low, _ in reversed(bounds)]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [step for step, _ in there + back],
            "y": [value for _, value in there + back],
            "fill": "toself",
            "fillcolor": f"{color}24",  # two hexadecimal digits of opacity, after the six of the color
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _bar(bins: Sequence[Lines], seconds: list[float], name: str, color: str) -> Trace:
    """One phase, stacked on the others; a bar stands at the middle of the steps that it is the mean of."""
    return {
        "type": "bar",
        "name": name,
        "x": [(lines[0]["step"] + lines[-1]["step"]) / 2 for lines in bins],
        "y": seconds,
        "marker": {"color": color, "line": {"width": 0}},
        "hovertemplate": "%{y:.2f} s",
    }


def axis(title: str, tickformat: str = "", **options: Any) -> dict[str, Any]:
    """An axis of a layout as all plots have it; ``options`` are plotly's."""
    return _AXIS | {"title": _AXIS["title"] | {"text": title}, "tickformat": tickformat} | options


def _layout(y_title: str, tickformat: str = "", legend: bool = True, **y_options: Any) -> dict[str, Any]:
    return LOOK | {
        "xaxis": axis("step", showgrid=False, unifiedhovertitle={"text": "step %{x}"}) | _SPIKE,
        "yaxis": axis(y_title, tickformat, **y_options),
        "margin": {"l": 56, "r": 12, "t": 36 if legend else 16, "b": 44},
        "showlegend": legend,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "xanchor": "left",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "hovermode": "x unified",
    }
