"""What happens to each row of activations: norms, residuals, gates, heads. Arrays are contiguous ``[rows, width]``."""

import math
from typing import Any

import numpy as np

from beamline.kernels.arithmetic import dot, exp, rounded, sigmoid
from beamline.kernels.compiled import kernel

_ONE = np.float32(1)


@kernel
def inverse_rms(x: Any, at: int, width: int, eps: float) -> Any:
    """``1 / sqrt(mean(x^2) + eps)`` of ``width`` values from ``at``."""
    return _ONE / np.float32(math.sqrt(dot(x, at, x, at, width) / np.float32(width) + np.float32(eps)))


@kernel
def rms_norm(x: Any, weight: Any, weight_at: int, eps: float, out: Any, bf16: bool) -> None:
    """``out = x * inverse_rms(x) * weight``, one rounding. ``weight`` is read from ``weight_at``."""
    width = x.shape[1]
    source, w, target = x.reshape(-1), weight.reshape(-1)[weight_at : weight_at + width], out.reshape(-1)
    for i in range(len(x)):
        scale = inverse_rms(source, i * width, width, eps)
        row, result = source[i * width : (i + 1) * width], target[i * width : (i + 1) * width]
        for j in range(width):
            result[j] = rounded(row[j] * scale * w[j], bf16)


@kernel
def add_residual(x: Any, n: int, h: Any, bf16: bool) -> None:
    """``h = x / sqrt(n) + h * sqrt((n - 1) / n)`` in place: Beam's ``n``-th residual, scaled by depth."""
    keep, new = np.float32(math.sqrt((n - 1) / n)), np.float32(1 / math.sqrt(n))
    added, kept = x.reshape(-1), h.reshape(-1)
    for j in range(len(kept)):
        kept[j] = rounded(rounded(added[j] * new, bf16) + rounded(kept[j] * keep, bf16), bf16)


@kernel
def swiglu(gate_up: Any, out: Any, bf16: bool) -> None:
    """``out = silu(gate) * up`` of rows ``[gate | up]``, one rounding."""
    width = out.shape[1]
    source, target = gate_up.reshape(-1), out.reshape(-1)
    for i in range(len(out)):
        gate = source[2 * i * width : (2 * i + 1) * width]
        up = source[(2 * i + 1) * width : (2 * i + 2) * width]
        result = target[i * width : (i + 1) * width]
        for j in range(width):
            result[j] = rounded(gate[j] * sigmoid(gate[j]) * up[j], bf16)


@kernel
def open_gate(attended: Any, qkvg: Any, gate_at: int, bias: Any, out: Any, bf16: bool) -> None:
    """``out = attended * sigmoid(gate + bias[head])``; the gate lies in columns ``gate_at...`` of ``qkvg``."""
    heads, width = len(bias), out.shape[1]
    size = width // heads
    gates, values, target = qkvg.reshape(-1), attended.reshape(-1), out.reshape(-1)
    for i in range(len(out)):
        for head in range(heads):
            at, gate_from = i * width + head * size, i * qkvg.shape[1] + gate_at + head * size
            gate, value, result = gates[gate_from : gate_from + size], values[at : at + size], target[at : at + size]
            b = bias[head]
            for j in range(size):
                result[j] = rounded(value[j] * rounded(sigmoid(rounded(gate[j] + b, bf16)), bf16), bf16)


@kernel
def turn_heads(
    qkvg: Any, first: int, heads: int, weight: Any, eps: float, positions: Any, cos: Any, sin: Any, stretch: Any,
    sliding: bool, query: bool, out: Any, bf16: bool,
) -> None:  # fmt: skip
    """Norm each head; in sliding layers rotate it, in full layers multiply queries by ``stretch`` of their position.

    The heads lie in columns ``first...`` of ``qkvg``; ``cos`` and ``sin`` are ``[positions, d / 2]``.
    """
    size = len(weight)
    half = size // 2
    source, target = qkvg.reshape(-1), out.reshape(-1)
    for i in range(len(out)):
        position = positions[i]
        c, s, factor = cos[position], sin[position], stretch[position] if query else _ONE
        for head in range(heads):
            at = i * qkvg.shape[1] + first + head * size
            scale = inverse_rms(source, at, size, eps)
            a, b = source[at : at + half], source[at + half : at + size]
            to = i * out.shape[1] + head * size
            low, high = target[to : to + half], target[to + half : to + size]
            for j in range(half):
                x, y = rounded(a[j] * scale * weight[j], bf16), rounded(b[j] * scale * weight[half + j], bf16)
                if sliding:
                    low[j] = rounded(x * c[j] - y * s[j], bf16)
                    high[j] = rounded(y * c[j] + x * s[j], bf16)
                else:
                    low[j] = rounded(x * factor, bf16)
                    high[j] = rounded(y * factor, bf16)


@kernel
def exponentials(scores: Any, at: int, stride: int, rows: int, length: int, scale: Any) -> None:
    """Replace ``rows`` runs of ``length`` scores by ``exp(scale * (score - the run's largest))``."""
    for r in range(rows):
        run = scores[at + r * stride : at + r * stride + length]
        largest = run[0]
        for j in range(length):
            largest = max(largest, run[j])
        for j in range(length):
            run[j] = exp((run[j] - largest) * scale)


@kernel
def round_rows(x: Any, bf16: bool) -> None:
    """Round rows in place."""
    if bf16:
        for i in range(len(x)):
            row = x[i]
            for j in range(x.shape[1]):
                row[j] = rounded(row[j], True)
