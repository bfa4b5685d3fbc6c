"""Each function of rows against its formula in double precision, and against the module's own code in bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.beam.modeling_beam import BeamRMSNorm, apply_rotary_pos_emb, depth_scaled_residual_add

from beamline.kernels.rows import (
    add_residual,
    exponentials,
    inverse_rms,
    open_gate,
    rms_norm,
    round_rows,
    swiglu,
    turn_heads,
)
from tests.exact import Floats, bits

ROWS, WIDTH, HEADS, SIZE, FIRST = 67, 45, 3, 14, 5  # none of them a whole number of vectors
COLUMNS = FIRST + HEADS * SIZE + 4  # heads lie between other columns
EPS, POSITIONS = 1e-5, 3000

Doubles = NDArray[np.float64]


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


@dataclass(frozen=True)
class Operation:
    """A function of rows: compiled, written in double precision, and as transformers has it."""

    inputs: tuple[NDArray[Any], ...]  # each has a row for each row
    compiled: Callable[..., Floats]  # of the inputs and bf16
    written: Callable[..., Doubles]
    module: Callable[..., Tensor]


def silu(x: Doubles) -> Doubles:
    return x / (1 + np.exp(-x))


# The norm of rows

NORM_WEIGHT = (1 + 0.2 * normal(3, WIDTH)).astype(np.float32)  # of which the second is meant


def compiled_norm(x: Floats, bf16: bool) -> Floats:
    out = np.empty_like(x)
    rms_norm(x, NORM_WEIGHT, WIDTH, EPS, out, bf16)
    return out


def written_norm(x: Doubles, weight: Floats = NORM_WEIGHT[1]) -> Doubles:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def module_norm(x: Tensor, weight: Floats = NORM_WEIGHT[1]) -> Tensor:
    norm = BeamRMSNorm(len(weight), EPS)
    norm.weight.data = torch.from_numpy(weight)
    normed: Tensor = norm(x).detach()
    return normed


# Residuals

N_TH = 5


def compiled_residual(x: Floats, h: Floats, bf16: bool) -> Floats:
    out = h.copy()
    add_residual(x, N_TH, out, bf16)
    return out


def written_residual(x: Doubles, h: Doubles) -> Doubles:
    return x / np.sqrt(N_TH) + h * np.sqrt((N_TH - 1) / N_TH)


# Gates


def compiled_swiglu(gate_up: Floats, bf16: bool) -> Floats:
    out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
    swiglu(gate_up, out, bf16)
    return out


def written_swiglu(gate_up: Doubles) -> Doubles:
    gate, up = np.split(gate_up, 2, axis=1)
    return silu(gate) * up


def module_swiglu(gate_up: Tensor) -> Tensor:
    """The line of BeamMLP and of BeamExperts."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


GATE_BIAS = torch.from_numpy(normal(HEADS)).bfloat16().float().numpy()


def compiled_gate(attended: Floats, qkvg: Floats, bf16: bool) -> Floats:
    out = np.empty_like(attended)
    open_gate(attended, qkvg, FIRST, GATE_BIAS, out, bf16)
    return out


def gates(qkvg: Any) -> Any:
    return qkvg[:, FIRST : FIRST + HEADS * SIZE].reshape(-1, HEADS, SIZE)


def written_gate(attended: Doubles, qkvg: Doubles) -> Doubles:
    opened = 1 / (1 + np.exp(-(gates(qkvg) + GATE_BIAS[:, None])))
    return attended * opened.reshape(attended.shape)


def module_gate(attended: Tensor, qkvg: Tensor) -> Tensor:
    """Two lines of BeamAttention."""
    gate = gates(qkvg) + torch.from_numpy(GATE_BIAS).to(qkvg.dtype)[None, :, None]
    return attended * torch.sigmoid(gate).reshape(attended.shape)


# Heads

HEAD_WEIGHT = (1 + 0.2 * normal(SIZE)).astype(np.float32)
ANGLES = torch.arange(POSITIONS)[:, None] * 10.0 ** -torch.arange(0, SIZE // 2)
COS, SIN = ANGLES.cos().float().numpy(), ANGLES.sin().float().numpy()
STRETCH = (1 + (np.arange(POSITIONS, dtype=np.float32) + 1) / 2048) ** np.float32(0.1)


def compiled_heads(qkvg: Floats, positions: NDArray[np.int64], bf16: bool, sliding: bool, query: bool) -> Floats:
    out = np.empty((len(qkvg), HEADS * SIZE), np.float32)
    turn_heads(qkvg, FIRST, HEADS, HEAD_WEIGHT, EPS, positions, COS, SIN, STRETCH, sliding, query, out, bf16)
    return out


def written_heads(qkvg: Doubles, positions: NDArray[np.int64], sliding: bool, query: bool) -> Doubles:
    x = written_norm(gates(qkvg), HEAD_WEIGHT)
    if sliding:
        low, high = np.split(x, 2, axis=2)
        cos, sin = COS[positions][:, None].astype(np.float64), SIN[positions][:, None]
        x = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)
    elif query:
        x = x * STRETCH[positions, None, None]
    return x.reshape(len(x), -1)


def module_heads(qkvg: Tensor, positions: Tensor, sliding: bool, query: bool) -> Tensor:
    x = module_norm(gates(qkvg), HEAD_WEIGHT)
    if sliding:
        cos, sin = (torch.from_numpy(table)[positions].repeat(1, 2) for table in (COS, SIN))
        x, _ = apply_rotary_pos_emb(x, x, cos, sin)
    elif query:
        x = (x.float() * torch.from_numpy(STRETCH)[positions, None, None]).to(x.dtype)
    return x.flatten(1)


def heads(sliding: bool, query: bool) -> Operation:
    inputs = normal(ROWS, COLUMNS), np.random.default_rng(0).integers(0, POSITIONS, ROWS)
    kind = {"sliding": sliding, "query": query}
    return Operation(
        inputs, partial(compiled_heads, **kind), partial(written_heads, **kind), partial(module_heads, **kind)
    )


OPERATIONS = {
    "norm": Operation((normal(ROWS, WIDTH),), compiled_norm, written_norm, module_norm),
    "residual": Operation(
        (normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)),
        compiled_residual,
        written_residual,
        partial(depth_scaled_residual_add, residual_add_idx=N_TH),
    ),
    "swiglu": Operation((2 * normal(ROWS, 2 * WIDTH),), compiled_swiglu, written_swiglu, module_swiglu),
    "gate": Operation((normal(ROWS, HEADS * SIZE), normal(ROWS, COLUMNS)), compiled_gate, written_gate, module_gate),
    "sliding query": heads(sliding=True, query=True),
    "sliding key": heads(sliding=True, query=False),
    "full query": heads(sliding=False, query=True),
    "full key": heads(sliding=False, query=False),
}
operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())


@operations
def test_values_are_those_of_the_formula(operation: Operation) -> None:
    """To a few roundings of 6e-8 each; sums of numbers around 1 may cancel."""
    in_double = [x.astype(np.float64) if x.dtype == np.float32 else x for x in operation.inputs]
    expected = operation.written(*in_double)
    np.testing.assert_allclose(operation.compiled(*operation.inputs, False), expected, rtol=1e-6, atol=1e-6)


@operations
def test_bfloat16_is_rounded_where_the_module_rounds(operation: Operation) -> None:
    """Except where values differ in the last bits of float32 just beside a tie: one in some thousands."""
    tensors = [torch.from_numpy(x) for x in operation.inputs]
    in_bf16 = [x.bfloat16() if x.is_floating_point() else x for x in tensors]
    expected = operation.module(*in_bf16)
    assert expected.dtype == torch.bfloat16
    ours = operation.compiled(*(x.float().numpy() if x.is_floating_point() else x.numpy() for x in in_bf16), True)
    assert (ours != expected.float().numpy()).mean() < 1e-3


@operations
@pytest.mark.parametrize("bf16", [False, True])
def test_a_row_has_the_same_bits_alone(operation: Operation, bf16: bool) -> None:
    together = operation.compiled(*operation.inputs, bf16)
    for row in range(ROWS):
        alone = operation.compiled(*(x[row : row + 1] for x in operation.inputs), bf16)
        assert np.array_equal(bits(alone[0]), bits(together[row])), row


def test_the_inverse_of_the_root_mean_square_is_of_a_run() -> None:
    around = np.full(100, np.nan, np.float32)
    around[30 : 30 + WIDTH] = x = normal(WIDTH)
    expected = 1 / np.sqrt((x.astype(np.float64) ** 2).mean() + EPS)
    assert inverse_rms(around, 30, WIDTH, EPS) == pytest.approx(expected, rel=1e-6)


def test_exponentials_are_taken_of_runs_and_leave_the_rest() -> None:
    """The exponent is off by a few roundings of 6e-8, and so much is its power, for exponents down to -20."""
    at, stride, rows, length, scale = 3, 50, 4, 37, np.float32(0.25)
    scores = (10 * normal(at + rows * stride)).astype(np.float32)
    out = scores.copy()
    exponentials(out, at, stride, rows, length, scale)
    runs, results = (x[at:].reshape(rows, stride) for x in (scores, out))
    part = runs[:, :length].astype(np.float64)
    expected = np.exp((part - part.max(1, keepdims=True)) * 0.25)
    np.testing.assert_allclose(results[:, :length], expected, rtol=5e-6)
    assert (results[:, :length].max(1) == 1).all()
    assert np.array_equal(bits(results[:, length:]), bits(runs[:, length:]))
    assert np.array_equal(bits(out[:at]), bits(scores[:at]))


def test_rows_are_rounded_in_place_if_asked() -> None:
    x = normal(5, WIDTH)
    kept, rounded_x = x.copy(), x.copy()
    round_rows(kept, False)
    round_rows(rounded_x, True)
    assert np.array_equal(kept, x)
    assert np.array_equal(rounded_x, torch.from_numpy(x).bfloat16().float().numpy())
