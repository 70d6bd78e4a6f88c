"""Vector instructions that the compiler does not choose by itself.

Sums over taps, the innermost loops of convolutions, stencils, poolings and interpolations, stay in vector registers
until all terms are added. The compiler keeps the sums of plain loops in memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from spmd.kernels.jit import emitted, helper

__all__ = ["ROWS", "add_taps", "combine", "dot_taps", "fetch", "filters", "lanes", "places", "prefetch", "taps"]


@cache
def vector_bytes() -> int:
    """The bytes of a vector register of this machine."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


_WIDTHS = (8, 4, 2, 1)
"""Vectors of neighbours that `combine` sums at once; the narrower ones are for short rows."""


def filters() -> int:
    """Filters for which `add_taps` sums at once: each loaded input serves all of them."""
    return 8 if vector_bytes() == 64 else 4


def _vectors_at_once() -> int:
    """Vectors of neighbours that `add_taps` sums at once: their number times the filters fills the registers."""
    return 2 if vector_bytes() == 64 else 3


ROWS = 4
"""Rows of g that `dot_taps` multiplies at once. Eight would compete for the same lines of the cache, for rows are often
a power of two apart."""


def taps() -> int:
    """Taps whose products with each of these rows `dot_taps` sums at once."""
    return 4 if vector_bytes() == 64 else 3


def lanes(dtype: np.dtype) -> int:
    """The numbers in a vector."""
    return vector_bytes() // dtype.itemsize


def places(dtype: np.dtype) -> int:
    """The neighbours for which `add_taps` sums at once."""
    return _vectors_at_once() * lanes(dtype)


def _sum_of_taps(out, to, n, x, at, offsets, begin, w, first, count):
    total = out.dtype.type(0)
    for d, factor in zip(offsets[begin : begin + count], w.reshape(-1)[first : first + count], strict=True):
        total = total + factor * x[at + d : at + d + n]
    out.reshape(-1)[to : to + n] = total


class _Vectors:
    """Builds instructions on flat arrays of a floating-point type, in vectors or, with one lane, in single numbers."""

    def __init__(self, context, builder, dtype):
        from numba.core import cgutils

        self.context, self.builder, self.cgutils = context, builder, cgutils
        self.item, self.bits = context.get_data_type(dtype), dtype.bitwidth
        self.lanes = vector_bytes() * 8 // self.bits

    def number(self, n: int) -> Any:
        from numba import types

        return self.context.get_constant(types.intp, n)

    def row_start(self, start, pitch, a: int) -> Any:
        """start + a * pitch"""
        return self.builder.add(start, self.builder.mul(pitch, self.number(a))) if a else start

    def vector(self, item, lanes: int) -> Any:
        from llvmlite import ir

        return ir.VectorType(item, lanes) if lanes > 1 else item

    def zeros(self, lanes: int) -> Any:
        from llvmlite import ir

        return ir.Constant(self.vector(self.item, lanes), [0.0] * lanes if lanes > 1 else 0.0)

    def splat(self, number, lanes: int) -> Any:
        """A number in all lanes."""
        from llvmlite import ir

        if lanes == 1:
            return number
        undefined, index = ir.Constant(self.vector(number.type, lanes), ir.Undefined), ir.IntType(32)
        first_lane = self.builder.insert_element(undefined, number, ir.Constant(index, 0))
        return self.builder.shuffle_vector(first_lane, undefined, ir.Constant(self.vector(index, lanes), [0] * lanes))

    def _pointer(self, array, place, lanes: int) -> Any:
        return self.builder.bitcast(self.builder.gep(array.data, [place]), self.vector(self.item, lanes).as_pointer())

    def load(self, array, place, lanes: int) -> Any:
        value = self.builder.load(self._pointer(array, place, lanes))
        value.align = self.bits // 8
        return value

    def store(self, value, array, place, lanes: int) -> None:
        self.builder.store(value, self._pointer(array, place, lanes)).align = self.bits // 8

    def prefetch(self, array, place, *, write: bool = False) -> None:
        _emit_prefetch(self.builder, self._pointer(array, place, 1), write)

    def totals(self, rows: int, columns: int, lanes: int) -> list[list[Any]]:
        """Variables for sums, set to zero, that the compiler keeps in registers."""
        zeros = self.zeros(lanes)
        totals = [[self.cgutils.alloca_once_value(self.builder, zeros) for _ in range(columns)] for _ in range(rows)]
        for total in (total for row in totals for total in row):
            self.builder.store(zeros, total)  # where these instructions are repeated
        return totals

    def add_product(self, total, a, b) -> None:
        """total += a * b, rounded once."""
        from llvmlite import ir

        name = (
            f"llvm.fma.v{a.type.count}f{self.bits}" if isinstance(a.type, ir.VectorType) else f"llvm.fma.f{self.bits}"
        )
        fma = self.cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
        self.builder.store(self.builder.call(fma, [a, b, self.builder.load(total)]), total)


class _Sums(_Vectors):
    """Sums over taps, in their order, each addition rounded once: sums in vectors and single sums have the same
    bits."""

    def __init__(self, context, builder, types, out, x, offsets, w):
        super().__init__(context, builder, types[1].dtype)
        arrays = (out, x, offsets, w)
        self.out, self.x, self.offsets, self.w = (
            context.make_array(t)(context, builder, a) for t, a in zip(types, arrays, strict=True)
        )
        self.pitch = self.cgutils.unpack_tuple(builder, self.w.shape)[-1]  # between filters

    def add(self, to, at, begin, first, count, *, pitch: Any = None, filters: int = 1, wide: int, lanes: int) -> None:
        """out[to + a * pitch + j] = sum over t < count of w.flat[first + a * w.shape[-1] + t] * x[at + offsets[begin +
        t] + j], for the filters a."""
        builder = self.builder
        sums = self.totals(filters, wide, lanes)
        if filters > 1:
            for line in (self.row_start(to, pitch, a) for a in range(filters)):
                for k in range(wide):
                    self.prefetch(self.out, builder.add(line, self.number(k * lanes)), write=True)
        with self.cgutils.for_range(builder, count) as loop:
            place = builder.add(at, builder.load(builder.gep(self.offsets.data, [builder.add(begin, loop.index)])))
            inputs = [self.load(self.x, builder.add(place, self.number(k * lanes)), lanes) for k in range(wide)]
            if filters > 1:
                self.prefetch(self.x, builder.add(place, self.number((2 * wide - 1) * lanes)))
            tap = builder.add(first, loop.index)
            for a, row in enumerate(sums):
                weight = self.splat(builder.load(builder.gep(self.w.data, [self.row_start(tap, self.pitch, a)])), lanes)
                for total, values in zip(row, inputs, strict=True):
                    self.add_product(total, values, weight)
        for a, row in enumerate(sums):
            line = self.row_start(to, pitch, a)
            for k, total in enumerate(row):
                self.store(builder.load(total), self.out, builder.add(line, self.number(k * lanes)), lanes)

    def add_pieces(self, to, n, at, begin, first, count, *, wide: int, lanes: int) -> None:
        """`add` for n neighbours, in pieces; the last piece begins early enough to be whole."""
        builder = self.builder
        piece = self.number(wide * lanes)
        with self.cgutils.for_range_slice(builder, self.number(0), n, piece, inc=True) as (j, _):
            last = builder.sub(n, piece)
            j = builder.select(builder.icmp_signed("<", j, last), j, last)
            here, there = builder.add(to, j), builder.add(at, j)
            self.add(here, there, begin, first, count, wide=wide, lanes=lanes)


class _Dots(_Vectors):
    """Sums of the products of each of some rows of g with each of some rows of x."""

    def __init__(self, context, builder, types, sums, g, x, offsets):
        super().__init__(context, builder, types[1].dtype)
        arrays = (sums, g, x, offsets)
        self.sums, self.g, self.x, self.offsets = (
            context.make_array(t)(context, builder, a) for t, a in zip(types, arrays, strict=True)
        )

    def add(self, row, tap, at, g_pitch, count, base, shape, steps) -> None:
        """See `dot_taps`."""
        builder, lanes = self.builder, self.lanes
        zero, one = self.number(0), self.number(1)
        (rows, columns), (g_step, x_step) = (self.cgutils.unpack_tuple(builder, pair) for pair in (shape, steps))
        lines, last = [], builder.sub(count, one)
        for a in range(ROWS):  # rows beyond the count repeat the last one
            there = builder.icmp_signed("<", self.number(a), last)
            lines.append(builder.add(at, builder.mul(builder.select(there, self.number(a), last), g_pitch)))
        begins = [
            builder.add(base, builder.load(builder.gep(self.offsets.data, [self.row_start(tap, one, t)])))
            for t in range(taps())
        ]
        totals = self.totals(ROWS, taps(), lanes)

        def add_vectors(y, j, mask):
            """mask: the lanes to add, if not all: the others were added before."""
            along_g, along_x = (builder.add(builder.mul(y, step), j) for step in (g_step, x_step))

            def load(array, place):
                loaded = self.load(array, place, lanes)
                return loaded if mask is None else builder.select(mask, loaded, self.zeros(lanes))

            inputs = [load(self.x, builder.add(begin, along_x)) for begin in begins]
            for line, row in zip(lines, totals, strict=True):
                factors = load(self.g, builder.add(line, along_g))
                for values, total in zip(inputs, row, strict=True):
                    self.add_product(total, factors, values)

        rest = builder.srem(columns, self.number(lanes))
        last_lanes = self._lanes_from(builder.sub(self.number(lanes), rest))
        with self.cgutils.for_range(builder, rows) as loop:
            whole = builder.sub(columns, rest)
            with self.cgutils.for_range_slice(builder, zero, whole, self.number(lanes), inc=True) as (j, _):
                add_vectors(loop.index, j, None)
            with builder.if_then(builder.icmp_signed("!=", rest, zero)):
                add_vectors(loop.index, builder.sub(columns, self.number(lanes)), last_lanes)
        pitch = self.cgutils.unpack_tuple(builder, self.sums.shape)[-1]
        for a, totals_of_row in enumerate(totals):
            line = builder.add(self.row_start(builder.mul(row, pitch), pitch, a), tap)
            for t, total in enumerate(totals_of_row):
                place = builder.gep(self.sums.data, [self.row_start(line, one, t)])
                builder.store(builder.fadd(builder.load(place), self._lane_sum(builder.load(total))), place)

    def _lanes_from(self, first) -> Any:
        """A mask of this lane and those behind it."""
        from llvmlite import ir

        numbers = ir.Constant(self.vector(first.type, self.lanes), list(range(self.lanes)))
        return self.builder.icmp_signed(">=", numbers, self.splat(first, self.lanes))

    def _lane_sum(self, total) -> Any:
        """The sum of a vector's lanes, as a double."""
        from llvmlite import ir

        form = ir.FunctionType(self.item, [self.item, total.type])
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f{self.bits}"
        add = self.cgutils.get_or_insert_function(self.builder.module, form, name)
        one = self.builder.call(add, [ir.Constant(self.item, 0.0), total], fastmath=("reassoc",))
        return one if self.bits == 64 else self.builder.fpext(one, ir.DoubleType())


def _emit_add_taps(context: Any, builder: Any, signature: Any, args: Any) -> None:
    out, to, pitch, x, at, offsets, w, row = args
    sums = _Sums(context, builder, [signature.args[i] for i in (0, 3, 5, 6)], out, x, offsets, w)
    count, first = sums.pitch, builder.mul(row, sums.pitch)
    shape: Any = {"pitch": pitch, "filters": filters(), "wide": _vectors_at_once(), "lanes": sums.lanes}
    sums.add(to, at, sums.number(0), first, count, **shape)


def _emit_combine(context: Any, builder: Any, signature: Any, args: Any) -> None:
    out, to, n, x, at, offsets, begin, w, first, count = args
    sums = _Sums(context, builder, [signature.args[i] for i in (0, 3, 5, 7)], out, x, offsets, w)

    def pieces(widths: tuple[int, ...]) -> None:
        """In the widest pieces that fit, or in single numbers."""
        if not widths:
            sums.add_pieces(to, n, at, begin, first, count, wide=1, lanes=1)
            return
        fit = builder.icmp_signed(">=", n, sums.number(widths[0] * sums.lanes))
        with builder.if_else(fit) as (then, otherwise):
            with then:
                sums.add_pieces(to, n, at, begin, first, count, wide=widths[0], lanes=sums.lanes)
            with otherwise:
                pieces(widths[1:])

    pieces(_WIDTHS)


@emitted(_emit_add_taps)
def add_taps(out: Any, to: int, pitch: int, x: Any, at: int, offsets: Any, w: Any, row: int) -> None:
    """out[to + a * pitch + j] = sum over t of w[row + a, t] * x[at + offsets[t] + j], for `filters` a and `places` j.

    out, x: flat. offsets: int64, at least one. w: (rows, taps). All C-contiguous, of float32 or float64.
    """
    for a in range(filters()):
        _sum_of_taps(out, to + a * pitch, places(x.dtype), x, at, offsets, 0, w[row + a], 0, len(offsets))


@emitted(_emit_combine)
def combine(
    out: Any, to: int, n: int, x: Any, at: int, offsets: Any, begin: int, w: Any, first: int, count: int
) -> None:
    """out[to + j] = sum over t < count of w[first + t] * x[at + offsets[begin + t] + j], for j < n.

    All C-contiguous, of float32 or float64, with flat indices; offsets: int64. The bits of an entry do not depend on n.
    """
    _sum_of_taps(out, to, n, x, at, offsets, begin, w, first, count)


def _emit_dot(context: Any, builder: Any, signature: Any, args: Any) -> None:
    sums, row, tap, g, at, pitch, count, x, base, offsets, shape, steps = args
    dots = _Dots(context, builder, [signature.args[i] for i in (0, 3, 7, 9)], sums, g, x, offsets)
    dots.add(row, tap, at, pitch, count, base, shape, steps)


@emitted(_emit_dot)
def dot_taps(
    sums: Any,
    row: int,
    tap: int,
    g: Any,
    at: int,
    pitch: int,
    count: int,
    x: Any,
    base: int,
    offsets: Any,
    shape: tuple[int, int],
    steps: tuple[int, int],
) -> None:
    """sums[row + a, tap + t] += sum over y, j of g[at + a * pitch + y * steps[0] + j] * x[base + offsets[tap + t] +
    y * steps[1] + j], for ROWS a, of which only `count` have a g, and `taps` t.

    shape: (rows y, columns j), at least a vector of columns. sums: (filters, taps), float64; arbitrary beyond the
    count. g, x: flat, of float32 or float64; no other entries are read. offsets: int64. All C-contiguous. Within a call
    sums have the dtype of g.
    """
    for a in range(ROWS):
        for t in range(taps()):
            line, place = at + min(a, count - 1) * pitch, base + offsets[tap + t]
            for y in range(shape[0]):
                factors = g[line + y * steps[0] :][: shape[1]]
                sums[row + a, tap + t] += float(factors @ x[place + y * steps[1] :][: shape[1]])


def _emit_prefetch(builder: Any, pointer: Any, write: bool = False) -> None:
    from llvmlite import ir

    place = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    flag = ir.IntType(32)
    instruction = builder.module.declare_intrinsic(
        "llvm.prefetch", [place.type], ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
    )
    into_first_cache, data = 3, 1
    builder.call(instruction, [place, *(ir.Constant(flag, n) for n in (int(write), into_first_cache, data))])


def _emit_prefetch_of(context: Any, builder: Any, signature: Any, args: Any) -> None:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    _emit_prefetch(builder, builder.gep(array.data, [args[1]]))


@emitted(_emit_prefetch_of)
def prefetch(x: Any, at: int) -> None:
    """Start to fetch the line of memory with entry `at` of a flat array, which is read soon."""


_LINE_BYTES, _AHEAD_BYTES = 64, 2048


@helper
def fetch(x, done, upto, size):
    """`prefetch` the entries done:upto of a flat array and some more; return where that ends. size: bytes of an entry.
    For loops that read several rows at once, which machines foresee less well than one."""
    upto = min(x.size, upto + _AHEAD_BYTES // size)
    while done < upto:
        prefetch(x, done)
        done += _LINE_BYTES // size
    return done
