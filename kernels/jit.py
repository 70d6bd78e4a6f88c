"""Loops that numba compiles where it is installed; where it is not, the same kernels run on NumPy's functions.

    @loops("out")
    def _rows(out, x):
        for i in range(x.shape[0]):
            ...

    def kernel(x):
        if jit.fits(x):
            out = pool.empty_like(x)
            _rows(out, np.ascontiguousarray(x))
            return out
        return ... # NumPy

A loop is compiled when it is first called with arrays of some dtypes, and cached on disk for later processes. It runs
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

__all__ = ["available", "by_width", "emitted", "exact", "fits", "helper", "in_loops", "loops", "off"]

_DTYPE_CHARS = frozenset("fdFDbBhHiIlLqQ?")


@functools.cache
def _enabled() -> bool:
    return setting("SPMD_NUMBA") and importlib.util.find_spec("numba") is not None


_off_depth = 0


def available() -> bool:
    """Whether loops are compiled."""
    return not _off_depth and _enabled()


class off:
    """`with jit.off():` the kernels of this process run on NumPy alone. For tests and comparisons."""

    def __enter__(self) -> None:
        global _off_depth
        _off_depth += 1

    def __exit__(self, *error: object) -> None:
        global _off_depth
        _off_depth -= 1


def fits(*arrays: Any) -> bool:
    """Whether compiled loops take arrays of these dtypes: NumPy's own numbers in the machine's byte order."""
    return available() and all(a.dtype.char in _DTYPE_CHARS and a.dtype.isnative for a in arrays)


def loops(*written: str, fastmath: Iterable[str] = ("contract",)) -> Callable[[Callable[..., Any]], Loops]:
    """Declare a function of plain loops over C-contiguous arrays, to be compiled by numba.

    written: the names of the parameters that it writes to. All other arrays are passed read-only, so that read-only
    and writable blocks share their code. fastmath: LLVM's flags for floating-point numbers: "contract" fuses a product
    and a sum, "reassoc" lets the compiler vectorise sums.
    """
    return lambda fun: Loops(fun, written, frozenset(fastmath))


def helper(fun: Callable[..., Any] | None = None, *, fastmath: tuple[str, ...] = ("contract",)) -> Callable[..., Any]:
    """Declare a function that loops may call; it is inlined there, and itself unchanged. fastmath: the flags of its own
    operations, see `loops`."""
    if fun is None:
        return functools.partial(helper, fastmath=fastmath)
    _helpers.append((fun, lambda *types: fun, fastmath))
    return fun


def exact(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Declare a function that loops may call, each operation of which is rounded: it has NumPy's bits."""
    _helpers.append((fun, lambda *types: fun, ()))
    return fun


_helpers: list[tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = []
_declaring = RLock()


def by_width(
    plain: Callable[..., Any],
    *,
    single: Callable[..., Any],
    double: Callable[..., Any],
    fastmath: tuple[str, ...] = ("contract",),
) -> None:
    """Let loops that call `plain` with numbers of 4 or 8 bytes call `single` or `double` instead. fastmath: the flags
    of their operations, see `loops`."""

    def choose(x, *_):
        return single if x.bitwidth == 32 else double

    _helpers.append((plain, choose, fastmath))


def in_loops(plain: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Let loops that call `plain` call another function instead."""
    _helpers.append((plain, lambda *types: other, ()))


def emitted(emit: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let loops that call the decorated function run the instructions that emit(context, builder, signature, args)
    builds. Arrays keep their types; other arguments are indices, or tuples of indices. Nothing is returned."""

    def declare(plain: Callable[..., Any]) -> Callable[..., Any]:
        names = ", ".join(inspect.signature(plain).parameters)

        def make(*_: Any) -> Callable[..., Any]:
            from numba import types
            from numba.extending import intrinsic

            def typed(*kinds: Any) -> tuple[Any, Any]:
                indices = lambda k: types.UniTuple(types.intp, len(k)) if isinstance(k, types.BaseTuple) else types.intp
                return types.void(*(k if isinstance(k, types.Array) else indices(k) for k in kinds)), build

            def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                emit(context, builder, signature, args)
                return context.get_dummy_value()

            # numba takes functions with these parameters, and does not unpack `*args`.
            scope: dict[str, Any] = {"typed": typed}
            scope["instruction"] = intrinsic(eval(f"lambda typing, {names}: typed({names})", scope))
            return eval(f"lambda {names}: instruction({names})", scope)

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
        arguments = list(args)
        for i in self._read:
            a = args[i]
            if type(a) is np.ndarray and a.flags.writeable:
                arguments[i] = a = a.view()
                a.setflags(False)  # pyright: ignore[reportCallIssue]  (a keyword takes twice as long)
        return compiled(*arguments)

    def _compile(self) -> Callable[..., Any]:
        import numba
        from numba.extending import overload

        from spmd.kernels import jit_cache

        options: Any = {"nogil": True, "error_model": "numpy", "fastmath": set(self._fastmath)}
        with _declaring:  # where no helper is left, all are declared
            while _helpers:
                entry = plain, choose, flags = _helpers[-1]
                inlined = options | {"fastmath": set(flags), "forceinline": True}
                overload(plain, jit_options=inlined, strict=False)(choose)
                if _helpers and _helpers[-1] is entry:  # a signal handler may have compiled a loop meanwhile
                    _helpers.pop()
        compiled = numba.njit(**options)(_keyed_by_sources(self.fun))
        jit_cache.enable(compiled, _sources())
        return compiled


@functools.cache
def _sources() -> str:
    """A hash of the source files of all loops and helpers."""
    import hashlib  # a tenth of the time of all imports here

    files = sorted(Path(__file__).parent.glob("**/*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _keyed_by_sources(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that numba's cache keys by all source files.

    The key has the file of the function, not the files of what it calls, so a change there would give old results. It
    also has the values that the function encloses: the copy encloses the hash of all files.
    """
    code = fun.__code__.replace(co_freevars=(*fun.__code__.co_freevars, "_sources"))
    cells = (*(fun.__closure__ or ()), CellType(_sources()))
    clone = FunctionType(code, fun.__globals__, fun.__name__, fun.__defaults__, cells)
    clone.__qualname__, clone.__module__, clone.__doc__ = fun.__qualname__, fun.__module__, fun.__doc__
    return clone
