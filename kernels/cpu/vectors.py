"""The innermost loop of a convolution, in vectors: sums stay in the registers until all their terms are added.

A compiler that makes vectors of plain loops does not find this by itself: it keeps the sums in memory. So the loop is
built of vector instructions, of as many numbers as the processor's registers hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from spmd.kernels.jit import lowered

__all__ = ["FILTERS", "add_taps", "add_taps_of_one", "places"]


@cache
def vector_bytes() -> int:
    """The size of a vector register of this machine."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


FILTERS = 8
"""Outputs that `add_taps` makes at once: each input that it loads serves all of them."""

_WIDE, _WIDE_OF_ONE = 2, 8
"""Vectors of neighbouring places in work at once: as many sums, times the filters, as there are registers for."""


def places(dtype: np.dtype, filters: int) -> int:
    """How many neighbouring places `add_taps` (or `add_taps_of_one`, for one filter) works on at once."""
    return (_WIDE_OF_ONE if filters == 1 else _WIDE) * vector_bytes() // dtype.itemsize


def _plain(out: Any, to: int, x: Any, at: int, offsets: Any, w: Any, row: int, filters: int) -> None:
    wide = places(x.dtype, filters)
    for a in range(filters):
        out[a, to : to + wide] = sum(w[row + a, t] * x[at + d : at + d + wide] for t, d in enumerate(offsets))


def _build(filters: int, wide: int) -> Callable[..., Any]:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    word = ir.IntType(64)

    def number(n: int) -> ir.Constant:
        return ir.Constant(word, n)

    @intrinsic
    def add_taps(typing, out, to, x, at, offsets, w, row):
        def build(context, builder, signature, args):
            arrays = [
                context.make_array(t)(context, builder, a)
                for t, a in zip(signature.args, args, strict=True)
                if isinstance(t, types.Array)
            ]
            (into, source, table, weights), to, start, first = arrays, args[1], args[3], args[6]
            item = context.get_data_type(x.dtype)
            lanes = vector_bytes() // (x.dtype.bitwidth // 8)
            align = x.dtype.bitwidth // 8
            vector = ir.VectorType(item, lanes)
            name = f"llvm.fma.v{lanes}f{x.dtype.bitwidth}"
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
            taps = cgutils.unpack_tuple(builder, weights.shape)[1]
            length = cgutils.unpack_tuple(builder, into.shape)[1]

            def pointer(array, index):
                return builder.bitcast(builder.gep(array.data, [index]), vector.as_pointer())

            def spread(one):
                undefined = ir.Constant(vector, ir.Undefined)
                with_one = builder.insert_element(undefined, one, ir.Constant(ir.IntType(32), 0))
                zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                return builder.shuffle_vector(with_one, undefined, zeros)

            before = builder.block
            loop, after = builder.append_basic_block("taps"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            t = builder.phi(word)
            t.add_incoming(number(0), before)
            sums = [[builder.phi(vector) for _ in range(wide)] for _ in range(filters)]
            for one in (s for row_ in sums for s in row_):
                one.add_incoming(ir.Constant(vector, [0.0] * lanes), before)
            place = builder.add(start, builder.load(builder.gep(table.data, [t])))
            inputs = []
            for k in range(wide):
                loaded = builder.load(pointer(source, builder.add(place, number(k * lanes))))
                loaded.align = align
                inputs.append(loaded)
            new = []
            for a in range(filters):
                index = builder.add(builder.mul(builder.add(first, number(a)), taps), t)
                weight = spread(builder.load(builder.gep(weights.data, [index])))
                new.append([builder.call(fma, [inputs[k], weight, sums[a][k]]) for k in range(wide)])
            following = builder.add(t, number(1))
            t.add_incoming(following, builder.block)
            for a in range(filters):
                for k in range(wide):
                    sums[a][k].add_incoming(new[a][k], builder.block)
            builder.cbranch(builder.icmp_signed("<", following, taps), loop, after)
            builder.position_at_end(after)
            for a in range(filters):
                line = builder.add(builder.mul(length, number(a)), to)
                for k in range(wide):
                    stored = builder.store(new[a][k], pointer(into, builder.add(line, number(k * lanes))))
                    stored.align = align
            return context.get_dummy_value()

        return types.void(out, types.intp, x, types.intp, offsets, w, types.intp), build

    instruction: Any = add_taps
    return lambda out, to, x, at, offsets, w, row: instruction(out, to, x, at, offsets, w, row)


@lowered(lambda: _build(FILTERS, _WIDE))
def add_taps(out: Any, to: int, x: Any, at: int, offsets: Any, w: Any, row: int) -> None:
    """out[a, to + j] = sum over t of w[row + a, t] * x[at + offsets[t] + j], for FILTERS rows and `places` j.

    out: 2-d. x: flat. offsets: int64, at least one. w: (rows, taps). All C-contiguous, of float32 or float64.
    """
    _plain(out, to, x, at, offsets, w, row, FILTERS)


@lowered(lambda: _build(1, _WIDE_OF_ONE))
def add_taps_of_one(out: Any, to: int, x: Any, at: int, offsets: Any, w: Any, row: int) -> None:
    """The same for a single row."""
    _plain(out, to, x, at, offsets, w, row, 1)
