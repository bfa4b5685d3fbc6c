"""Scalar functions that compilers vectorize, each a fixed sequence of IEEE operations.

``exp`` and ``tanh`` are the polynomials of the Cephes library (S. L. Moshier). Errors are at most 1.02 (``exp``), 2.5
(``sigmoid``) and 3 (``tanh``) units in the last place.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError

from beamline.kernels.compiled import intrinsic, kernel


def call_fma(builder: Any, kind: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit ``a * b + c`` with one rounding, for a float or a vector of them."""
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


@intrinsic
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return call_fma(builder, ir.FloatType(), *arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def bits(_context: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def from_bits(_context: Any, value: Any) -> Any:
    """The float32 with the bits of an int32."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_f = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW, _TO_INTEGER = _f(1.44269504), _f(0.693359375), _f(-2.12194440e-4), _f(12582912.0)
_E5, _E4, _E3, _E2, _E1, _E0 = (
    _f(v)
    for v in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_T4, _T3, _T2, _T1, _T0 = (
    _f(v) for v in (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
)
_E4M3_MOST, _E4M3_LEAST = _f(448), _f(2**-6)
_ZERO, _ONE, _TWO, _LOWEST, _HIGHEST, _NEAR_0 = _f(0), _f(1), _f(2), _f(-87.33), _f(88.37), _f(0.625)


def floats(array: Any) -> Any:
    """The numba type of an array, if it is what instructions on raw memory take for granted.

    Raises:
        TypingError: another element type, or elements that do not lie one after the other.
    """
    if not isinstance(array, types.Array) or array.dtype != types.float32 or array.layout != "C":
        raise TypingError(f"kernels work on contiguous float32 arrays, not {array}")
    return array


_LANES = 16


def _in_chains(builder: Any, length: Any, add: Any) -> Any:
    """Add up ``length`` terms: 16 chains, a lane each, added in pairs; then what is left over, one after the other.

    ``add(kind, k, total)`` emits ``total`` plus the terms from k on, as many as ``kind`` has lanes.
    """
    single = ir.FloatType()
    kind = ir.VectorType(single, _LANES)
    whole = builder.mul(builder.sdiv(length, length.type(_LANES)), length.type(_LANES))

    def chain(step: int, width: Any, first: Any, start: Any, stop: Any) -> Any:
        before = builder.block
        head, body, done = (builder.append_basic_block(f"chain.{name}") for name in ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        k, total = builder.phi(length.type), builder.phi(width)
        builder.cbranch(builder.icmp_signed("<", k, stop), body, done)
        builder.position_at_end(body)
        k.add_incoming(start, before)
        k.add_incoming(builder.add(k, length.type(step)), body)
        total.add_incoming(first, before)
        total.add_incoming(add(width, k, total), body)
        builder.branch(head)
        builder.position_at_end(done)
        return total

    total = chain(_LANES, kind, ir.Constant(kind, [0.0] * _LANES), length.type(0), whole)
    for half in (8, 4, 2, 1):
        mask = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [(i + half) % _LANES for i in range(_LANES)])
        total = builder.fadd(total, builder.shuffle_vector(total, total, mask))
    return chain(1, single, builder.extract_element(total, ir.IntType(32)(0)), whole, length)


def _run(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """The values of an array from ``at`` on: a function from an offset and a type to what stands there."""
    start = builder.gep(context.make_array(kind)(context, builder, array).data, [at])
    return lambda width, k: builder.load(builder.bitcast(builder.gep(start, [k]), width.as_pointer()), align=4)


@intrinsic
def dot(_context: Any, x: Any, x_at: Any, y: Any, y_at: Any, length: Any) -> Any:
    """Sum of products of two runs of contiguous arrays, in 16 chains of fused multiply-adds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = (_run(context, builder, signature.args[i], *arguments[i : i + 2]) for i in (0, 2))
        return _in_chains(
            builder, arguments[4], lambda width, k, sum_: call_fma(builder, width, a(width, k), b(width, k), sum_)
        )

    return types.float32(floats(x), types.intp, floats(y), types.intp, types.intp), generate


@intrinsic
def total(_context: Any, x: Any, x_at: Any, length: Any) -> Any:
    """Sum of a run of a contiguous array, in 16 chains: its :func:`dot` with ones."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a = _run(context, builder, signature.args[0], *arguments[:2])
        return _in_chains(builder, arguments[2], lambda width, k, sum_: builder.fadd(sum_, a(width, k)))

    return types.float32(floats(x), types.intp, types.intp), generate


@kernel
def exp(x: Any) -> Any:
    """``e^x``; 0 where float32 has no normal number that small, never infinite, and not a number for what is none."""
    given = x
    x = min(max(x, _LOWEST), _HIGHEST)
    shifted = fma(x, _LOG2E, _TO_INTEGER)  # the integer nearest to x / ln 2 now stands in the lowest bits
    n = shifted - _TO_INTEGER
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    p = fma(fma(fma(fma(fma(_E5, r, _E4), r, _E3), r, _E2), r, _E1), r, _E0)
    power = from_bits(np.int32((bits(shifted) + 127) << 23))
    result = _ZERO if given < _LOWEST else (fma(p, r * r, r) + _ONE) * power
    return given if given != given else result  # only what is no number differs from itself


@kernel
def sigmoid(x: Any) -> Any:
    """``1 / (1 + e^-x)``."""
    return _ONE / (_ONE + exp(-x))


@kernel
def tanh(x: Any) -> Any:
    """``(e^2x - 1) / (e^2x + 1)``, and a polynomial near 0, where that would cancel."""
    z = x * x
    near = fma(x * z, fma(fma(fma(fma(_T4, z, _T3), z, _T2), z, _T1), z, _T0), x)
    far = _ONE - _TWO / (exp(_TWO * x) + _ONE)
    return near if abs(x) < _NEAR_0 else far


@kernel
def rounded(x: Any, bf16: bool) -> Any:
    """``x`` to the nearest bfloat16, ties to even, if asked."""
    if not bf16 or x != x:  # what is no number stays none
        return x
    b = bits(x)
    return from_bits(np.int32((b + 0x7FFF + ((b >> 16) & 1)) & -0x10000))


@kernel
def rounded_to_8_bits(x: Any) -> Any:
    """``x`` to the nearest float8 e4m3 (4 bits of exponent, 3 of mantissa), ties to even; over 448 it becomes 448."""
    size = min(abs(x), _E4M3_MOST)
    exponent = bits(max(size, _E4M3_LEAST)) & 0x7F800000  # below the least normal number they lie as far apart as above
    step = from_bits(np.int32(exponent - (3 << 23)))
    nearest = np.float32(np.rint(size / step)) * step
    return x if x != x else from_bits(np.int32(bits(nearest) | (bits(x) & -0x80000000)))  # with the sign, of 0 too
