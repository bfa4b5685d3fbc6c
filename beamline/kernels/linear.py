"""Matrix products whose elements do not depend on the size of the matrices.

``out[i, o]`` is ``fma(x[i, K-1], w[K-1, o], ... fma(x[i, 0], w[0, o], 0))``: one chain over the contracted dimension.
A tile of 4 rows by 32 columns (16 without AVX-512) keeps its chains in vector registers; smaller tiles at the borders
compute the same.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types

from beamline.kernels.arithmetic import call_fma, floats
from beamline.kernels.compiled import intrinsic, kernel

_VECTOR = 16  # floats; compilers cut it into what the machine has
_WIDE = 32 if llvm.get_host_cpu_features().get("avx512f") else 16  # columns that fit into registers with 4 rows


def _in_each_lane(builder: Any, kind: Any, value: Any) -> Any:
    """A float as it is, or as many of it as a vector has lanes."""
    if not isinstance(kind, ir.VectorType):
        return value
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, first, mask)


def _tile(rows: int, columns: int) -> Any:
    """An intrinsic that computes a tile of ``out (+)= x @ w`` over ``depth`` terms.

    Arrays are contiguous float32; offsets and strides count elements. With ``go_on`` the chains start from ``out``.
    """
    lanes = min(columns, _VECTOR)
    kind: Any = ir.VectorType(ir.FloatType(), lanes) if lanes > 1 else ir.FloatType()
    vectors = columns // lanes

    @intrinsic
    def tile(
        _context: Any, x: Any, x_at: Any, x_stride: Any, w: Any, w_at: Any, w_stride: Any,
        out: Any, out_at: Any, out_stride: Any, depth: Any, go_on: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 3, 6)]
            (_, x_at, x_stride, _, w_at, w_stride, _, out_at, out_stride, depth, go_on) = arguments
            x, w, out = (builder.gep(p, [at]) for p, at in zip(data, (x_at, w_at, out_at), strict=True))

            def vector(pointer: Any, row: Any, stride: Any, column: int) -> Any:
                at = builder.gep(pointer, [builder.add(builder.mul(row, stride), ir.Constant(row.type, column))])
                return builder.bitcast(at, kind.as_pointer())

            def index(value: int) -> Any:
                return ir.Constant(depth.type, value)

            cells = [(r, c) for r in range(rows) for c in range(vectors)]
            targets = {(r, c): vector(out, index(r), out_stride, c * lanes) for r, c in cells}
            zero = ir.Constant(kind, [0.0] * lanes if lanes > 1 else 0.0)
            first = {cell: builder.select(go_on, builder.load(targets[cell], align=4), zero) for cell in cells}

            before = builder.block
            head, body, done = (builder.append_basic_block(f"tile.{name}") for name in ("head", "body", "done"))
            builder.branch(head)
            builder.position_at_end(head)
            k = builder.phi(depth.type)
            sums = {cell: builder.phi(kind) for cell in cells}
            builder.cbranch(builder.icmp_signed("<", k, depth), body, done)

            builder.position_at_end(body)
            columns_k = [builder.load(vector(w, k, w_stride, c * lanes), align=4) for c in range(vectors)]
            following = {}
            for r in range(rows):
                at = builder.gep(x, [builder.add(builder.mul(index(r), x_stride), k)])
                value = _in_each_lane(builder, kind, builder.load(at))
                for c in range(vectors):
                    following[r, c] = call_fma(builder, kind, value, columns_k[c], sums[r, c])
            after = builder.add(k, index(1))
            builder.branch(head)

            k.add_incoming(index(0), before)
            k.add_incoming(after, body)
            for cell in cells:
                sums[cell].add_incoming(first[cell], before)
                sums[cell].add_incoming(following[cell], body)
            builder.position_at_end(done)
            for cell in cells:
                builder.store(sums[cell], targets[cell], align=4)
            return context.get_dummy_value()

        i, array = types.intp, [floats(a) for a in (x, w, out)]
        return types.void(array[0], i, i, array[1], i, i, array[2], i, i, i, types.boolean), generate

    return tile


_4x32, _2x32, _1x32 = (_tile(rows, _WIDE) for rows in (4, 2, 1))
_4x16, _2x16, _1x16 = (_tile(rows, 16) for rows in (4, 2, 1))
_4x1, _2x1, _1x1 = (_tile(rows, 1) for rows in (4, 2, 1))


_PACKED_ROWS, _PACKED_DEPTH = 16, 256  # from here on a copy of a panel costs less than its scattered rows


@kernel
def product(
    x: Any, x_at: int, x_stride: int, w: Any, w_at: int, w_stride: int,
    out: Any, out_at: int, out_stride: int, rows: int, columns: int, depth: int, go_on: bool,
) -> None:  # fmt: skip
    """``out[rows, columns] = x[rows, depth] @ w[depth, columns]`` on parts of contiguous arrays.

    Offsets (``_at``) and strides count elements. With ``go_on`` the chains go on from what ``out`` holds.
    """
    packs = rows >= _PACKED_ROWS and depth >= _PACKED_DEPTH
    packed = np.empty(depth * _WIDE if packs else 0, np.float32)
    c = 0
    while c < columns:
        left = columns - c
        width = _WIDE if left >= _WIDE else (16 if left >= 16 else 1)
        panel, at, stride = w, w_at + c, w_stride
        if packs:
            panel, at, stride = packed, 0, width
            for k in range(depth):
                source, target = w_at + k * w_stride + c, k * width
                for j in range(width):
                    packed[target + j] = w[source + j]
        _panel(x, x_at, x_stride, panel, at, stride, out, out_at + c, out_stride, rows, width, depth, go_on)
        c += width


@kernel
def multiply(x: Any, w: Any, out: Any) -> None:
    """``out = x @ w`` of whole matrices."""
    rows, depth = x.shape
    columns = w.shape[1]
    product(x.reshape(-1), 0, depth, w.reshape(-1), 0, columns, out.reshape(-1), 0, columns,
            rows, columns, depth, False)  # fmt: skip


@kernel
def _panel(
    x: Any, x_at: int, x_stride: int, w: Any, w_at: int, w_stride: int,
    out: Any, out_at: int, out_stride: int, rows: int, width: int, depth: int, go_on: bool,
) -> None:  # fmt: skip
    """One tile's width of columns.

    Each tile is called by its name: numba finds no kernel in its cache that closes over an intrinsic, since the hash of
    an intrinsic differs between processes.
    """
    r = 0
    while r < rows:
        height = 4 if rows - r >= 4 else (2 if rows - r >= 2 else 1)
        a, o = x_at + r * x_stride, out_at + r * out_stride
        if width == _WIDE:
            if height == 4:
                _4x32(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
            elif height == 2:
                _2x32(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
            else:
                _1x32(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
        elif width == 16:
            if height == 4:
                _4x16(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
            elif height == 2:
                _2x16(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
            else:
                _1x16(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
        elif height == 4:
            _4x1(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
        elif height == 2:
            _2x1(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
        else:
            _1x1(x, a, x_stride, w, w_at, w_stride, out, o, out_stride, depth, go_on)
        r += height
