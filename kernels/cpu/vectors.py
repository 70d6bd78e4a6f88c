"""Instructions that a compiler does not choose by itself.

Sums over taps, the innermost loops of convolutions, stencils, poolings and interpolations, are built of vector
instructions: sums stay in the registers until all their terms are added. A compiler that makes vectors of plain loops
keeps them in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from spmd.kernels.jit import helper, lowered

__all__ = ["FILTERS", "add_taps", "combine", "fetch", "places", "prefetch"]


@cache
def vector_bytes() -> int:
    """The size of a vector register of this machine."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


FILTERS = 8
"""Outputs that `add_taps` makes at once: each input that it loads serves all of them."""

_WIDE = 2
_WIDTHS = (8, 4, 2, 1)
"""Vectors of neighbouring places in work at once: as many sums, times the filters, as there are registers for. Short
rows have fewer."""


def places(dtype: np.dtype) -> int:
    """How many neighbouring places `add_taps` works on at once."""
    return _WIDE * vector_bytes() // dtype.itemsize


def _plain(out, to, n, x, at, offsets, begin, w, first, count):
    total = out.dtype.type(0)
    for d, factor in zip(offsets[begin : begin + count], w.reshape(-1)[first : first + count], strict=True):
        total = total + factor * x[at + d : at + d + n]
    out.reshape(-1)[to : to + n] = total


class _Sums:
    """Builds instructions that add taps up, in vectors and in single numbers alike: in the order of the taps, rounded
    once for each."""

    def __init__(self, context, builder, types, out, x, offsets, w):
        from numba.core import cgutils

        self.context, self.builder, self.cgutils = context, builder, cgutils
        arrays = (out, x, offsets, w)
        self.out, self.x, self.offsets, self.w = (
            context.make_array(t)(context, builder, a) for t, a in zip(types, arrays, strict=True)
        )
        self.item, self.bits = context.get_data_type(types[1].dtype), types[1].dtype.bitwidth
        self.lanes = vector_bytes() * 8 // self.bits
        # From one filter to the next, and from one line of outputs to the next.
        self.pitch = cgutils.unpack_tuple(builder, self.w.shape)[-1]
        self.length = cgutils.unpack_tuple(builder, self.out.shape)[-1]

    def number(self, n: int) -> Any:
        from numba import types

        return self.context.get_constant(types.intp, n)

    def add(self, to, at, begin, first, count, *, filters: int, wide: int, lanes: int) -> None:
        """out[a, to + j] = sum over t < count of w.flat[first + a * pitch + t] * x[at + offsets[begin + t] + j]."""
        from llvmlite import ir

        builder, cgutils = self.builder, self.cgutils
        kind = ir.VectorType(self.item, lanes) if lanes > 1 else self.item
        name = f"llvm.fma.v{lanes}f{self.bits}" if lanes > 1 else f"llvm.fma.f{self.bits}"
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        zero = ir.Constant(kind, [0.0] * lanes if lanes > 1 else 0.0)

        def pointer(array, index):
            return builder.bitcast(builder.gep(array.data, [index]), kind.as_pointer())

        def spread(one):
            if lanes == 1:
                return one
            undefined, index = ir.Constant(kind, ir.Undefined), ir.IntType(32)
            with_one = builder.insert_element(undefined, one, ir.Constant(index, 0))
            return builder.shuffle_vector(with_one, undefined, ir.Constant(ir.VectorType(index, lanes), [0] * lanes))

        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(wide)] for _ in range(filters)]
        for one in (s for row in sums for s in row):
            builder.store(zero, one)  # where these instructions are repeated
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(at, builder.load(builder.gep(self.offsets.data, [builder.add(begin, loop.index)])))
            inputs = []
            for k in range(wide):
                loaded = builder.load(pointer(self.x, builder.add(place, self.number(k * lanes))))
                loaded.align = self.bits // 8
                inputs.append(loaded)
            for a in range(filters):
                tap = builder.add(builder.mul(self.pitch, self.number(a)), loop.index)
                weight = spread(builder.load(builder.gep(self.w.data, [builder.add(first, tap)])))
                for k in range(wide):
                    builder.store(builder.call(fma, [inputs[k], weight, builder.load(sums[a][k])]), sums[a][k])
        for a in range(filters):
            line = builder.add(builder.mul(self.length, self.number(a)), to)
            for k in range(wide):
                to_here = pointer(self.out, builder.add(line, self.number(k * lanes)))
                stored = builder.store(builder.load(sums[a][k]), to_here)
                stored.align = self.bits // 8

    def add_pieces(self, to, n, at, begin, first, count, *, wide: int, lanes: int) -> None:
        """`add` for n neighbours, in pieces; a last one that would be cut begins earlier."""
        builder = self.builder
        piece = self.number(wide * lanes)
        with self.cgutils.for_range_slice(builder, self.number(0), n, piece, inc=True) as (j, _):
            last = builder.sub(n, piece)
            j = builder.select(builder.icmp_signed("<", j, last), j, last)
            here, there = builder.add(to, j), builder.add(at, j)
            self.add(here, there, begin, first, count, filters=1, wide=wide, lanes=lanes)


def _build(*_: Any) -> Callable[..., Any]:
    from numba import types
    from numba.extending import intrinsic

    index = types.intp

    @intrinsic
    def add_taps(typing, out, to, x, at, offsets, w, row):
        def build(context, builder, signature, args):
            out, to, x, at, offsets, w, row = args
            sums = _Sums(context, builder, [signature.args[i] for i in (0, 2, 4, 5)], out, x, offsets, w)
            count, zero = sums.pitch, sums.number(0)
            sums.add(to, at, zero, builder.mul(row, count), count, filters=FILTERS, wide=_WIDE, lanes=sums.lanes)
            return context.get_dummy_value()

        return types.void(out, index, x, index, offsets, w, index), build

    instruction: Any = add_taps
    return lambda out, to, x, at, offsets, w, row: instruction(out, to, x, at, offsets, w, row)


def _build_combine(*_: Any) -> Callable[..., Any]:
    from numba import types
    from numba.extending import intrinsic

    index = types.intp

    @intrinsic
    def combine(typing, out, to, n, x, at, offsets, begin, w, first, count):
        def build(context, builder, signature, args):
            out, to, n, x, at, offsets, begin, w, first, count = args
            sums = _Sums(context, builder, [signature.args[i] for i in (0, 3, 5, 7)], out, x, offsets, w)
            given = (to, n, at, begin, first, count)

            def pieces(widths):
                """In the widest pieces that fit, or in single numbers."""
                if not widths:
                    sums.add_pieces(*given, wide=1, lanes=1)
                    return
                fit = builder.icmp_signed(">=", n, sums.number(widths[0] * sums.lanes))
                with builder.if_else(fit) as (then, otherwise):
                    with then:
                        sums.add_pieces(*given, wide=widths[0], lanes=sums.lanes)
                    with otherwise:
                        pieces(widths[1:])

            pieces(_WIDTHS)
            return context.get_dummy_value()

        return types.void(out, index, index, x, index, offsets, index, w, index, index), build

    instruction: Any = combine
    return lambda out, to, n, x, at, offsets, begin, w, first, count: instruction(
        out, to, n, x, at, offsets, begin, w, first, count
    )


@lowered(_build)
def add_taps(out: Any, to: int, x: Any, at: int, offsets: Any, w: Any, row: int) -> None:
    """out[a, to + j] = sum over t of w[row + a, t] * x[at + offsets[t] + j], for FILTERS rows and `places` j.

    out: 2-d. x: flat. offsets: int64, at least one. w: (rows, taps). All C-contiguous, of float32 or float64.
    """
    taps = len(offsets)
    for a in range(FILTERS):
        _plain(out[a], to, places(x.dtype), x, at, offsets, 0, w[row + a], 0, taps)


@lowered(_build_combine)
def combine(
    out: Any, to: int, n: int, x: Any, at: int, offsets: Any, begin: int, w: Any, first: int, count: int
) -> None:
    """out[to + j] = sum over t < count of w[first + t] * x[at + offsets[begin + t] + j], for j < n.

    All C-contiguous, of float32 or float64, and counted flat; offsets of int64. The bits of an entry do not depend
    on n.
    """
    _plain(out, to, n, x, at, offsets, begin, w, first, count)


def _build_prefetch(*_: Any) -> Callable[..., Any]:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def prefetch(typing, x, at):
        def build(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(8).as_pointer())
            flag = ir.IntType(32)
            instruction = builder.module.declare_intrinsic(
                "llvm.prefetch", [place.type], ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
            )
            read, into_first_cache, data = (ir.Constant(flag, n) for n in (0, 3, 1))
            builder.call(instruction, [place, read, into_first_cache, data])
            return context.get_dummy_value()

        return types.void(x, types.intp), build

    instruction: Any = prefetch
    return lambda x, at: instruction(x, at)


@lowered(_build_prefetch)
def prefetch(x: Any, at: int) -> None:
    """Tell the machine that entry `at` of a flat array is read soon; its line of memory is then fetched meanwhile."""


_LINE, _AHEAD = 64, 2048  # bytes


@helper
def fetch(x, done, upto, size):
    """`prefetch` for the entries done:upto of a flat array, and some more, as far as it goes; gives how far that is.
    size: bytes of an entry. Loops that read several rows at once call it: machines foresee one row better than many."""
    upto = min(x.size, upto + _AHEAD // size)
    while done < upto:
        prefetch(x, done)
        done += _LINE // size
    return done
