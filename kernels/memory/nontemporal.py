"""Copies and sums of more than the caches hold, written past them.

What is stored by plain instructions goes into the caches, so the machine first reads each line of memory that is going
to be overwritten. Where so much is written that the first of it has left the caches before the last is there, that is
for nothing: such copies take two thirds of the time by instructions that write whole lines to memory. Whoever reads
the result then has to read it from there, which he would have to in any case.

The loops need numba; without it, and for what is smaller, they say that they have done nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spmd.kernels import jit

__all__ = ["LEAST", "add", "copy", "large", "least", "pays", "possible", "together"]

_LINE = 64
"""Bytes of a line of memory, of which all are written at once."""
_ROW = 512
"""The least bytes in a row of a copy: at both ends of each a part of a line is stored in the plain way."""
_COPY = 1 << 16
"""The least bytes in a copy: less is done by NumPy before it is found out how."""
LEAST = 16 << 20
"""Bytes below which nothing is written past them on any machine."""
_MOST = 64 << 20

_amount: ContextVar[int] = ContextVar("bytes that are written together", default=0)


@lru_cache(maxsize=1)
def least() -> int:
    """The bytes written from which on it pays: those of the largest cache, as the system tells them. At least 16 MB; at
    most 64: of a larger cache others have their share. Where it tells of 480 MB, copies of 64 MB were seen to take 0.68
    of the time, with two threads that read them afterwards 0.85, with two that write over them 1.2; of 128 MB 0.68 to
    0.83."""
    found = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            found.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return min(max(LEAST, *found), _MOST) if found else _MOST


def pays(nbytes: int, copies: int = 1) -> bool:
    """Whether to write so many bytes past the caches, in so many copies: by themselves, or with what is written at the
    same time."""
    return large(nbytes) and max(nbytes, _amount.get()) >= least() and possible(nbytes, copies)


def large(nbytes: int) -> bool:
    """Whether so many bytes, with what is written at the same time, are past the caches of some machine."""
    return max(nbytes, _amount.get()) >= LEAST


def possible(nbytes: int, copies: int = 1) -> bool:
    """Whether so many bytes, in so many copies, can be written past the caches; for who has another reason to."""
    return nbytes >= copies * _COPY and jit.available() and _has_numba()


@lru_cache(maxsize=1)
def _has_numba() -> bool:
    """Whether numba can be imported: one that is for another NumPy cannot, and it is no error to do without."""
    try:
        import_module("numba.extending")
    except ImportError:
        return False
    return True


@contextmanager
def together(nbytes: int) -> Iterator[None]:
    """Within the block arrays of so many bytes in all are written, each by itself."""
    token = _amount.set(nbytes)
    try:
        yield
    finally:
        _amount.reset(token)


def copy(to: np.ndarray, x: np.ndarray) -> bool:
    """Copy x into an array that does not overlap with it, past the caches. False, and nothing is done, where that is
    not for such arrays: they have one shape and dtype, and rows that are long."""
    if to.dtype != x.dtype or to.shape != x.shape or to.size < 2 or to.dtype.hasobject or not to.flags.writeable:
        return False
    lengths, steps = _merged(to.shape, to.strides, x.strides)
    if len(lengths) > 2 or steps[-1] != (to.itemsize, to.itemsize) or lengths[-1] * to.itemsize < _ROW:
        return False
    rows, (pitch, step) = (lengths[0], steps[0]) if len(lengths) == 2 else (1, (0, 0))
    _copy_rows(_address(to), _address(x), rows, lengths[-1] * to.itemsize, pitch, step)
    return True


def add(out: np.ndarray, x: np.ndarray, y: np.ndarray) -> bool:
    """Write x + y into an array that does not overlap with them, past the caches; as np.add does, but that no overflow
    is told. False, and nothing is done, where that is not for such arrays: they are C-contiguous, of one shape, and of
    float32, float64 or complex numbers of these."""
    dtype = out.dtype
    if dtype.char not in "fdFD" or not dtype.isnative or not out.flags.writeable:
        return False
    for a in (out, x, y):
        if a.dtype != dtype or a.shape != out.shape or not (a.flags.c_contiguous and a.flags.aligned):
            return False
    number = dtype.char.lower()  # Complex numbers are added by their parts.
    _add_rows(*[a.reshape(-1).view(number) for a in (out, x, y)])
    return True


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _merged(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[list[int], list[tuple[int, ...]]]:
    """The same entries in as few dimensions as the strides of all arrays allow, and those of each dimension."""
    lengths: list[int] = []
    steps: list[tuple[int, ...]] = []
    for n, step in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if steps and all(before == n * after for before, after in zip(steps[-1], step, strict=True)):
            lengths[-1] *= n
            steps[-1] = step
        else:
            lengths.append(n)
            steps.append(step)
    return lengths, steps


# The instructions


def _stored_past(builder: Any, value: Any, address: Any) -> None:
    """Store a whole line where it belongs, at a multiple of its length, past the caches."""
    from llvmlite import ir

    stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    stored.align = _LINE
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _loaded(builder: Any, kind: Any, address: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _build_copy(*_: Any) -> Callable[..., Any]:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    index = types.intp

    @intrinsic
    def copy_past(typing, to, at, n):
        def build(context, builder, signature, args):
            to, at, n = args
            number = lambda k: ir.Constant(to.type, k)
            byte, line = ir.IntType(8).as_pointer(), ir.VectorType(ir.IntType(8), _LINE)

            def plainly(begin, count):
                there, here = (builder.inttoptr(builder.add(p, begin), byte) for p in (to, at))
                cgutils.raw_memcpy(builder, there, here, count, 1)

            head = builder.and_(builder.neg(to), number(_LINE - 1))
            head = builder.select(builder.icmp_signed("<", head, n), head, n)
            end = builder.add(head, builder.and_(builder.sub(n, head), number(-_LINE)))
            plainly(number(0), head)
            with cgutils.for_range_slice(builder, head, end, number(_LINE), inc=True) as (i, _):
                _stored_past(builder, _loaded(builder, line, builder.add(at, i), 1), builder.add(to, i))
            plainly(end, builder.sub(n, end))
            return context.get_dummy_value()

        return types.void(index, index, index), build

    instruction: Any = copy_past
    return lambda to, at, n: instruction(to, at, n)


def _build_add(*_: Any) -> Callable[..., Any]:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def add_line(typing, out, x, y, at):
        def build(context, builder, signature, args):
            kinds, at = signature.args, args[3]
            arrays = [context.make_array(t)(context, builder, a) for t, a in zip(kinds[:3], args[:3], strict=True)]
            number, nbytes = context.get_data_type(kinds[0].dtype), kinds[0].dtype.bitwidth // 8
            line = ir.VectorType(number, _LINE // nbytes)
            to, one, other = (builder.ptrtoint(builder.gep(a.data, [at]), at.type) for a in arrays)
            terms = [_loaded(builder, line, place, nbytes) for place in (one, other)]
            _stored_past(builder, builder.fadd(*terms), to)
            return context.get_dummy_value()

        return types.void(out, x, y, types.intp), build

    instruction: Any = add_line
    return lambda out, x, y, at: instruction(out, x, y, at)


def _build_fence(*_: Any) -> Callable[..., Any]:
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def fence(typing):
        def build(context, builder, signature, args):
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), build

    instruction: Any = fence
    return lambda: instruction()


@jit.lowered(_build_copy)
def _copy_past(to: int, at: int, n: int) -> None:
    """Copy n bytes from one address to another, whole lines past the caches."""
    raise NotImplementedError


@jit.lowered(_build_add)
def _add_line(out: Any, x: Any, y: Any, at: int) -> None:
    """out[at:] = x[at:] + y[at:] for a line of numbers, which lies at a multiple of its length, past the caches."""
    raise NotImplementedError


@jit.lowered(_build_fence)
def _fence() -> None:
    """What is stored after this is seen after what was stored before: not so by itself with what goes past the caches.
    Other threads and processes learn by such a store that a result is there."""
    raise NotImplementedError


@jit.loops()
def _copy_rows(to: int, at: int, rows: int, nbytes: int, pitch: int, step: int) -> None:
    for k in range(rows):
        _copy_past(to + k * pitch, at + k * step, nbytes)
    _fence()


@jit.loops("out", fastmath=())
def _add_rows(out: Any, x: Any, y: Any) -> None:
    per_line = _LINE // out.itemsize
    head = min(out.size, (-(out.ctypes.data // out.itemsize)) % per_line)
    end = head + (out.size - head) // per_line * per_line
    for i in range(head):
        out[i] = x[i] + y[i]
    for i in range(head, end, per_line):
        _add_line(out, x, y, i)
    for i in range(end, out.size):
        out[i] = x[i] + y[i]
    _fence()
