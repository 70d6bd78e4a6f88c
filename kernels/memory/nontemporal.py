"""Copies and sums that are written past the caches, by nontemporal stores; for results larger than the caches.

A plain store goes into the caches, so the machine first reads the line of memory that is overwritten. That is useless
where the first lines have left the caches before the last ones are written. There, stores of whole lines to memory take
two thirds of the time. Who reads the result then reads it from memory, as after plain stores.

The loops need numba. `copy` and `add` return False where they have done nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spmd.kernels import jit

__all__ = ["NONTEMPORAL_MIN", "add", "copy", "large", "pays", "possible", "threshold", "together"]

_LINE = 64
"""Bytes of a line of memory. All of them are written at once."""
_ROW_MIN = 512
"""Bytes below which rows are not copied here: parts of lines at both ends of a row are stored in the plain way."""
_COPY_MIN = 1 << 16
"""Bytes below which copies are left to NumPy at once."""
NONTEMPORAL_MIN = 16 << 20
"""Bytes below which no machine writes past the caches."""
_THRESHOLD_MAX = 64 << 20

_total: ContextVar[int] = ContextVar("bytes that are written together", default=0)


@lru_cache(maxsize=1)
def threshold() -> int:
    """The bytes from which it pays: those of the largest cache, as the system tells them, but 16 to 64 MB.

    Other processes have their share of a larger cache. On a machine with 480 MB, copies of 64 MB take 0.68 of the time,
    0.85 with two threads that then read them, 1.2 with two that write over them; copies of 128 MB take 0.68 to 0.83.
    """
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return min(max(NONTEMPORAL_MIN, *sizes), _THRESHOLD_MAX) if sizes else _THRESHOLD_MAX


def pays(nbytes: int, copies: int = 1) -> bool:
    """Whether to write so many bytes, in so many copies, past the caches; alone or with what is written meanwhile."""
    return large(nbytes) and max(nbytes, _total.get()) >= threshold() and possible(nbytes, copies)


def large(nbytes: int) -> bool:
    """Whether so many bytes, with what is written meanwhile, exceed the caches of some machine."""
    return max(nbytes, _total.get()) >= NONTEMPORAL_MIN


def possible(nbytes: int, copies: int = 1) -> bool:
    """Whether so many bytes, in so many copies, can be written past the caches, whether or not it pays."""
    return nbytes >= copies * _COPY_MIN and jit.available() and _has_numba()


@lru_cache(maxsize=1)
def _has_numba() -> bool:
    """Whether numba can be imported: one for another NumPy cannot, which is no error here."""
    try:
        import_module("numba.extending")
    except ImportError:
        return False
    return True


@contextmanager
def together(nbytes: int) -> Iterator[None]:
    """Within the block several arrays, of so many bytes in all, are written one by one."""
    token = _total.set(nbytes)
    try:
        yield
    finally:
        _total.reset(token)


def copy(target: np.ndarray, source: np.ndarray) -> bool:
    """Copy into an array without overlap. True if done: the arrays have one shape, one dtype and long rows."""
    if target.dtype != source.dtype or target.shape != source.shape or target.dtype.hasobject:
        return False
    if target.size < 2 or not target.flags.writeable:
        return False
    lengths, steps = _merged(target.shape, target.strides, source.strides)
    itemsize = target.itemsize
    if len(lengths) > 2 or steps[-1] != (itemsize, itemsize) or lengths[-1] * itemsize < _ROW_MIN:
        return False
    rows, (pitch, step) = (lengths[0], steps[0]) if len(lengths) == 2 else (1, (0, 0))
    _copy_rows(_address(target), _address(source), rows, lengths[-1] * itemsize, pitch, step)
    return True


def add(out: np.ndarray, x: np.ndarray, y: np.ndarray) -> bool:
    """Write x + y into an array without overlap, as np.add, but without reports of overflow. True if done: the arrays
    are C-contiguous, of one shape, and of one of the dtypes float32, float64, complex64 and complex128."""
    dtype = out.dtype
    if dtype.char not in "fdFD" or not dtype.isnative or not out.flags.writeable:
        return False
    for a in (out, x, y):
        if a.dtype != dtype or a.shape != out.shape or not (a.flags.c_contiguous and a.flags.aligned):
            return False
    real = dtype.char.lower()
    _add_rows(*[a.reshape(-1).view(real) for a in (out, x, y)])
    return True


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _merged(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[list[int], list[tuple[int, ...]]]:
    """The lengths and strides of arrays in as few dimensions as the strides of all of them allow."""
    lengths: list[int] = []
    steps: list[tuple[int, ...]] = []
    for n, step in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if steps and all(outer == n * inner for outer, inner in zip(steps[-1], step, strict=True)):
            lengths[-1] *= n
            steps[-1] = step
        else:
            lengths.append(n)
            steps.append(step)
    return lengths, steps


# Instructions


def _store_past(builder: Any, value: Any, address: Any) -> None:
    """Store a whole line at a multiple of its length, past the caches."""
    from llvmlite import ir

    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    store.align = _LINE
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _load(builder: Any, dtype: Any, address: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, dtype.as_pointer()))
    value.align = align
    return value


def _emit_copy(_context: Any, builder: Any, _signature: Any, args: Any) -> None:
    from llvmlite import ir
    from numba.core import cgutils

    target, source, n = args
    number = lambda k: ir.Constant(target.type, k)
    byte, line = ir.IntType(8).as_pointer(), ir.VectorType(ir.IntType(8), _LINE)

    def memcpy(begin, count):
        to, of = (builder.inttoptr(builder.add(p, begin), byte) for p in (target, source))
        cgutils.raw_memcpy(builder, to, of, count, 1)

    head = builder.and_(builder.neg(target), number(_LINE - 1))
    head = builder.select(builder.icmp_signed("<", head, n), head, n)
    end = builder.add(head, builder.and_(builder.sub(n, head), number(-_LINE)))
    memcpy(number(0), head)
    with cgutils.for_range_slice(builder, head, end, number(_LINE), inc=True) as (i, _):
        _store_past(builder, _load(builder, line, builder.add(source, i), 1), builder.add(target, i))
    memcpy(end, builder.sub(n, end))


def _emit_add(context: Any, builder: Any, signature: Any, args: Any) -> None:
    from llvmlite import ir

    kinds, at = signature.args, args[3]
    arrays = [context.make_array(t)(context, builder, a) for t, a in zip(kinds[:3], args[:3], strict=True)]
    number, nbytes = context.get_data_type(kinds[0].dtype), kinds[0].dtype.bitwidth // 8
    line = ir.VectorType(number, _LINE // nbytes)
    out, x, y = (builder.ptrtoint(builder.gep(a.data, [at]), at.type) for a in arrays)
    _store_past(builder, builder.fadd(*[_load(builder, line, place, nbytes) for place in (x, y)]), out)


@jit.emitted(_emit_copy)
def _copy_past(target: int, source: int, n: int) -> None:
    """Copy n bytes between addresses, whole lines past the caches."""
    raise NotImplementedError


@jit.emitted(_emit_add)
def _add_line(out: Any, x: Any, y: Any, at: int) -> None:
    """out[at:] = x[at:] + y[at:] for the line of numbers at that place, past the caches. It is aligned."""
    raise NotImplementedError


@jit.emitted(lambda _context, builder, _signature, _args: builder.fence("seq_cst"))
def _fence() -> None:
    """Order stores: other threads and processes see those after this one later. Stores past the caches are unordered
    otherwise, and another store may tell that the result is complete."""
    raise NotImplementedError


@jit.loops()
def _copy_rows(target: int, source: int, rows: int, nbytes: int, pitch: int, step: int) -> None:
    for k in range(rows):
        _copy_past(target + k * pitch, source + k * step, nbytes)
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
