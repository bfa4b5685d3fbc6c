"""Gradients of the row kernels: given that of the output, that of each input. Shapes are those of the kernels.

Gradients of weights are added up over the rows that a call is given; callers add those of several calls.
"""

from typing import Any

import numpy as np

from beamline.kernels.arithmetic import dot, sigmoid, total
from beamline.kernels.attention import BLOCK, key_at, whole_blocks
from beamline.kernels.compiled import kernel
from beamline.kernels.linear import product
from beamline.kernels.rows import exponentials, inverse_rms
from beamline.kernels.vocabulary import restrict, soft_cap, temper

_ONE = np.float32(1)


@kernel
def rms_norm_gradient(x: Any, weight: Any, eps: float, factor: float, dy: Any, dx: Any, dweight: Any) -> None:
    """Of ``y = factor * rms_norm(x)``: with ``t = weight dy`` and ``r = 1 / rms``, ``dx = r (t - x r^2 mean(t x))``."""
    width = x.shape[1]
    source, target = x.reshape(-1), dx.reshape(-1)
    t, f = np.empty(width, np.float32), np.float32(factor)
    for i in range(len(x)):
        _norm_gradient(source, i * width, weight, eps, f, dy[i], t, target, dweight)


@kernel
def _norm_gradient(
    source: Any, at: int, weight: Any, eps: float, factor: Any, dy: Any, t: Any, target: Any, dweight: Any
) -> None:
    """Of one normed run from ``at`` on, to the same place of ``target``; ``t`` is scratch of its width."""
    width = len(weight)
    row, result = source[at : at + width], target[at : at + width]
    scale = inverse_rms(source, at, width, eps)
    for j in range(width):
        t[j] = weight[j] * dy[j] * factor
    pull = scale * scale * scale * dot(t, 0, source, at, width) / np.float32(width)
    for j in range(width):
        result[j] = scale * t[j] - pull * row[j]
    for j in range(width):
        dweight[j] += dy[j] * factor * row[j] * scale


@kernel
def swiglu_gradient(gate_up: Any, dy: Any, dgate_up: Any) -> None:
    """``dgate = dy up (s + silu (1 - s))`` and ``dup = dy silu`` with ``s = sigmoid(gate)``, ``silu = gate s``."""
    width = dy.shape[1]
    source, given, target = gate_up.reshape(-1), dy.reshape(-1), dgate_up.reshape(-1)
    for i in range(len(dy)):
        at = 2 * i * width
        gate, up = source[at : at + width], source[at + width : at + 2 * width]
        dgate, dup, d = target[at : at + width], target[at + width : at + 2 * width], given[i * width : (i + 1) * width]
        for j in range(width):
            s = sigmoid(gate[j])
            silu = gate[j] * s
            dgate[j] = d[j] * up[j] * (s + silu * (_ONE - s))
            dup[j] = d[j] * silu


@kernel
def open_gate_gradient(
    attended: Any, qkvg: Any, gate_at: int, bias: Any, dy: Any, dattended: Any, dqkvg: Any, dbias: Any
) -> None:
    """``dattended = dy s`` and ``dgate = dy attended s (1 - s)`` with ``s = sigmoid(gate + bias)``."""
    heads, width = len(bias), attended.shape[1]
    size = width // heads
    gates, values, given = qkvg.reshape(-1), attended.reshape(-1), dy.reshape(-1)
    to_value, to_gate = dattended.reshape(-1), dqkvg.reshape(-1)
    for i in range(len(dy)):
        for head in range(heads):
            at, gate_from = i * width + head * size, i * qkvg.shape[1] + gate_at + head * size
            gate, value, d = gates[gate_from : gate_from + size], values[at : at + size], given[at : at + size]
            dvalue, dgate = to_value[at : at + size], to_gate[gate_from : gate_from + size]
            b = bias[head]
            for j in range(size):
                s = sigmoid(gate[j] + b)
                dvalue[j] = d[j] * s
                dgate[j] = d[j] * value[j] * s * (_ONE - s)
            added = np.float32(0)
            for j in range(size):
                added += dgate[j]
            dbias[head] += added


@kernel
def turn_heads_gradient(
    qkvg: Any, first: int, heads: int, weight: Any, eps: float, positions: Any, cos: Any, sin: Any, stretch: Any,
    sliding: bool, query: bool, dy: Any, dqkvg: Any, dweight: Any,
) -> None:  # fmt: skip
    """The turn is undone by its transpose, then the norm's gradient follows."""
    size = len(weight)
    half = size // 2
    source, given, target = qkvg.reshape(-1), dy.reshape(-1), dqkvg.reshape(-1)
    d, t = np.empty(size, np.float32), np.empty(size, np.float32)
    for i in range(len(dy)):
        position = positions[i]
        c, s, factor = cos[position], sin[position], stretch[position] if query else _ONE
        for head in range(heads):
            at = i * dy.shape[1] + head * size
            low, high = given[at : at + half], given[at + half : at + size]
            for j in range(half):
                if sliding:
                    d[j] = low[j] * c[j] + high[j] * s[j]
                    d[half + j] = high[j] * c[j] - low[j] * s[j]
                else:
                    d[j] = low[j] * factor
                    d[half + j] = high[j] * factor
            at = i * qkvg.shape[1] + first + head * size
            _norm_gradient(source, at, weight, eps, _ONE, d, t, target, dweight)


@kernel
def weigh_gradient(scores: Any, chosen: Any, weights: Any, normalize: bool, dweights: Any, dlogits: Any) -> None:
    """To the router's logits, whose sigmoids are ``scores``; those of experts that were not chosen get 0."""
    E, K = scores.shape[1], chosen.shape[1]
    for i in range(len(scores)):
        for e in range(E):
            dlogits[i, e] = 0
        mass, shared = np.float32(0), np.float32(0)
        for k in range(K):
            mass += scores[i, chosen[i, k]]
            shared += dweights[i, k] * weights[i, k]
        for k in range(K):
            s = scores[i, chosen[i, k]]
            ds = (dweights[i, k] - shared) / (mass + np.float32(1e-20)) if normalize else dweights[i, k]
            dlogits[i, chosen[i, k]] = ds * s * (_ONE - s)


@kernel
def spread_to_experts(
    dy: Any, order: Any, weights: Any, factor: float, outer: Any, douter: Any, dweights: Any, first: int, last: int
) -> None:
    """Of ``y[i] = factor sum_k weights[i, k] outer[place of (i, k)]``, for the sorted choices first..last."""
    K, D = weights.shape[1], dy.shape[1]
    given, results, flat = dy.reshape(-1), outer.reshape(-1), dweights.reshape(-1)
    w, f = weights.reshape(-1), np.float32(factor)
    for p in range(first, last):
        choice = order[p]
        row, target = dy[choice // K], douter[p]
        scale = w[choice] * f
        for j in range(D):
            target[j] = row[j] * scale
        flat[choice] = f * dot(given, choice // K * D, results, p * D, D)


@kernel
def gather_rows(drows: Any, place: Any, choices: int, dx: Any) -> None:
    """``dx[i] = sum of drows[place[i, k]]`` over a row's choices k, in their order."""
    for i in range(len(dx)):
        row = dx[i]
        for k in range(choices):
            part = drows[place[i * choices + k]]
            if k == 0:
                for j in range(dx.shape[1]):
                    row[j] = part[j]
            else:
                for j in range(dx.shape[1]):
                    row[j] += part[j]


@kernel
def score_rows_gradient(
    logits: Any, cap: float, targets: Any, temperature: Any, ids: Any, borders: Any, dlogprobs: Any
) -> None:
    """Overwrite logits ``[rows, V]``, not capped yet, by the gradient of their targets' log-probabilities.

    ``(onehot(y) - softmax(l)) / T * (1 - (l T / cap)^2)`` with ``l = cap tanh(z / cap) / T``, the softmax over the
    tokens ``ids[borders[i]:borders[i + 1]]`` of row i, or over all if there are none; 0 for the others.
    """
    V = logits.shape[1]
    probs, limit = np.empty(V, np.float32), np.float32(cap)
    for i in range(len(logits)):
        row = logits[i]
        soft_cap(row, cap)
        restrict(row, ids[borders[i] : borders[i + 1]], probs)
        _, mass, _ = temper(row, temperature[i], probs)
        scale = dlogprobs[i] / temperature[i]
        share = scale / mass
        to_capped = temperature[i] / limit
        own = row[targets[i]] * to_capped
        for v in range(V):
            slope = row[v] * to_capped
            row[v] = -share * probs[v] * (_ONE - slope * slope)
        row[targets[i]] += scale * (_ONE - own * own)


@kernel
def _transposed(x: Any, first: int, heads: int, size: int, places: int) -> Any:
    """Columns ``first...`` of the rows, in the layout of cached keys: ``[heads, places / 16, d, 16]``, flat."""
    out = np.zeros(heads * places * size, np.float32)
    for i in range(len(x)):
        for head in range(heads):
            at = head * places * size + key_at(i, size)
            for j in range(size):
                out[at + j * BLOCK] = x[i, first + head * size + j]
    return out


@kernel
def attend_gradient(
    q: Any, k: Any, qkvg: Any, v_first: int, attended: Any, dy: Any, window: int, kv_heads: int, group: int, size: int,
    dq: Any, dk: Any, dqkvg: Any,
) -> None:  # fmt: skip
    """Of one sequence's attention, 16 queries at a time; ``dk`` must be 0, gradients of values go to ``dqkvg``.

    With ``p`` the attention weights: ``dv = p^T dy``, ``ds = p (dy v^T - rowsum(dy out)) / sqrt(d)``, ``dq = ds k``,
    ``dk = ds^T q``.
    """
    S, width, kv_width, wide = len(q), q.shape[1], k.shape[1], qkvg.shape[1]
    places = whole_blocks(S)
    keys = _transposed(k, 0, kv_heads, size, places)
    values = _transposed(qkvg, v_first, kv_heads, size, places)
    scores, p = np.zeros(BLOCK * places, np.float32), np.zeros(BLOCK * places, np.float32)
    p_turned, ds_turned = np.zeros(BLOCK * places, np.float32), np.zeros(BLOCK * places, np.float32)
    qs, ks, dys, outs = q.reshape(-1), k.reshape(-1), dy.reshape(-1), attended.reshape(-1)
    dqs, dks, dvs = dq.reshape(-1), dk.reshape(-1), dqkvg.reshape(-1)
    scale = np.float32(1 / np.sqrt(size))
    for i in range(S):
        for j in range(kv_width):
            dqkvg[i, v_first + j] = 0
    for start in range(0, S, BLOCK):
        rows = min(BLOCK, S - start)
        low = max(0, start - window + 1) // BLOCK * BLOCK
        span = start + rows - low
        for head in range(kv_heads * group):
            kv_head = head // group
            query = start * width + head * size
            for block in range(low, start + rows, BLOCK):
                at = (kv_head * places + block) * size
                to = block - low
                product(qs, query, width, keys, at, BLOCK, p, to, places, rows, BLOCK, size, False)
                product(dys, query, width, values, at, BLOCK, scores, to, places, rows, BLOCK, size, False)
            for r in range(rows):
                first = max(0, start + r - window + 1) - low
                end = start + r + 1 - low
                row, ds = p[r * places : r * places + span], scores[r * places : r * places + span]
                exponentials(p, r * places + first, places, 1, end - first, scale)
                row[:first] = 0
                row[end:] = 0
                share = _ONE / total(p, r * places, span)
                pull = dot(dys, query + r * width, outs, query + r * width, size)
                for j in range(span):
                    row[j] = row[j] * share
                for j in range(span):
                    ds[j] = row[j] * (ds[j] - pull) * scale
                for j in range(span):
                    p_turned[j * BLOCK + r] = row[j]
                    ds_turned[j * BLOCK + r] = ds[j]
            kv = low * kv_width + kv_head * size
            product(scores, 0, places, ks, kv, kv_width, dqs, query, width, rows, size, span, False)
            product(ds_turned, 0, BLOCK, qs, query, width, dks, kv, kv_width, span, size, rows, True)
            v = low * wide + v_first + kv_head * size
            product(p_turned, 0, BLOCK, dys, query, width, dvs, v, wide, span, size, rows, True)
