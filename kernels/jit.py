"""Loops that numba compiles where it is installed; where it is not, the same kernels run on NumPy's functions.

    @loops("out")
    def _rows(out, x):
        for i in range(x.shape[0]):
            ...

    def kernel(x):
        if jit.fits(x):
            out = buffers.empty_like(x)
            _rows(out, np.ascontiguousarray(x))
            return out
        return ... # NumPy

A loop is compiled when it is first called with arrays of some dtypes, and kept on disk for later processes. It runs
without the GIL. SPMD_NUMBA=0 turns numba off; it is read once.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import RLock
from types import CellType, FunctionType
from typing import Any

import numpy as np

from spmd.settings import setting

__all__ = ["available", "by_bits", "exact", "fits", "helper", "in_loops", "loops", "lowered", "off"]

_KINDS = frozenset("fdFDbBhHiIlLqQ?")


@functools.cache
def _wanted() -> bool:
    return setting("SPMD_NUMBA") and importlib.util.find_spec("numba") is not None


_off = 0


def available() -> bool:
    """Whether loops are compiled."""
    return not _off and _wanted()


class off:
    """`with jit.off():` kernels run on NumPy alone, in this whole process. For tests and comparisons."""

    def __enter__(self) -> None:
        global _off
        _off += 1

    def __exit__(self, *error: object) -> None:
        global _off
        _off -= 1


def fits(*arrays: Any) -> bool:
    """Whether compiled loops take these arrays: of NumPy's own numbers in the machine's byte order."""
    return available() and all(a.dtype.char in _KINDS and a.dtype.isnative for a in arrays)


def loops(*written: str, fastmath: Iterable[str] = ("contract",)) -> Callable[[Callable[..., Any]], Loops]:
    """Declare a function of plain loops over C-contiguous arrays, to be compiled by numba.

    written: the names of the parameters that it writes to. All other arrays are passed read-only, so that a block that
    is read-only and one that is not take the same code. fastmath: the liberties that the compiler may take with
    floating-point numbers, as LLVM names them: "contract" fuses a product and a sum, "reassoc" lets it vectorise sums.
    """
    return lambda fun: Loops(fun, written, frozenset(fastmath))


def helper(fun: Callable[..., Any] | None = None, *, fastmath: tuple[str, ...] = ("contract",)) -> Callable[..., Any]:
    """Declare a function that loops may call; it is inlined there. By itself it stays what it is. fastmath: the
    liberties of its own operations, see `loops`."""
    if fun is None:
        return functools.partial(helper, fastmath=fastmath)
    _helpers.append((fun, lambda *types: fun, fastmath))
    return fun


def exact(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Declare a function that loops may call, of which each operation is rounded by itself: it has NumPy's bits."""
    _helpers.append((fun, lambda *types: fun, ()))
    return fun


_helpers: list[tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = []
_declaring = RLock()


def by_bits(plain: Callable[..., Any], *, single: Callable[..., Any], double: Callable[..., Any]) -> None:
    """Let loops that call `plain` of float32 or float64 numbers use these functions for it."""

    def choose(x, *others):
        return single if x.bitwidth == 32 else double

    _helpers.append((plain, choose, ("contract",)))


def in_loops(plain: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Let loops that call `plain` of numbers use another function for it."""
    _helpers.append((plain, lambda *types: other, ()))


def lowered(make: Callable[..., Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let loops that call the decorated function use what `make` gives, a function that numba compiles. `make` is
    called with numba's types of the arguments: it may build instructions of its own. By itself the function stays what
    it is."""

    def declare(plain: Callable[..., Any]) -> Callable[..., Any]:
        _helpers.append((plain, make, ()))
        return plain

    return declare


class Loops:
    """See `loops`."""

    __slots__ = ("_compiled", "_fastmath", "_read", "fun")

    def __init__(self, fun: Callable[..., Any], written: tuple[str, ...], fastmath: frozenset[str]):
        self.fun = fun
        names = list(inspect.signature(fun).parameters)
        self._read = tuple(i for i, name in enumerate(names) if name not in written)
        self._fastmath = fastmath
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = self._compile()
        given = list(args)
        for i in self._read:
            a = args[i]
            if type(a) is np.ndarray and a.flags.writeable:
                given[i] = a = a.view()
                a.setflags(False)  # pyright: ignore[reportCallIssue]  (by its name it takes twice as long)
        return compiled(*given)

    def _compile(self) -> Callable[..., Any]:
        import numba
        from numba.extending import overload

        from spmd.kernels import jit_cache

        options: Any = {"nogil": True, "error_model": "numpy", "fastmath": set(self._fastmath)}
        with _declaring:  # a worker that finds none left may count on all
            while _helpers:
                declared = plain, choose, liberties = _helpers[-1]
                inlined = options | {"fastmath": set(liberties), "forceinline": True}
                overload(plain, jit_options=inlined, strict=False)(choose)
                if _helpers and _helpers[-1] is declared:  # else the handler of a signal has compiled a loop meanwhile
                    _helpers.pop()
        compiled = numba.njit(**options)(_of_these_sources(self.fun))
        jit_cache.keep(compiled, _sources())
        return compiled


@functools.cache
def _sources() -> str:
    """What tells this state of the files that loops and what they call are written in."""
    import hashlib  # which takes a tenth of the time that everything here takes to import

    files = sorted(Path(__file__).parent.glob("**/*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _of_these_sources(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function as numba's cache on disk should know it.

    The cache looks at the file of the function alone, not at those of what it calls, and would give old results when
    one of these has changed. It does look at the values that a function encloses, so this one encloses what tells the
    files.
    """
    code = fun.__code__.replace(co_freevars=(*fun.__code__.co_freevars, "_sources"))
    cells = (*(fun.__closure__ or ()), CellType(_sources()))
    made = FunctionType(code, fun.__globals__, fun.__name__, fun.__defaults__, cells)
    made.__qualname__, made.__module__, made.__doc__ = fun.__qualname__, fun.__module__, fun.__doc__
    return made
