"""What the rules of scipy.special are declared with."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy import special as _public

from spmd.autodiff.dispatch import dispatch
from spmd.autodiff.primitive import composite, handlers
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.tracer import Array, find, value_of
from spmd.errors import DifferentiationError

__all__ = [
    "arrays",
    "composed",
    "cospi",
    "function",
    "functions",
    "is_complex",
    "is_pole",
    "refusal",
    "runner",
    "sinpi",
    "special",
    "ufunc",
    "where_finite",
]


def _under(f):
    """What NumPy dispatches on: with SCIPY_ARRAY_API=1 scipy.special wraps some of its ufuncs in functions."""
    under = getattr(f, "__wrapped__", f)
    return under if isinstance(under, np.ufunc) or under is np.sinc else f


special: Any = SimpleNamespace(**{name: _under(getattr(_public, name)) for name in _public.__all__})
"""The functions of scipy.special by name."""


def ufunc(name: str, *rules: Callable | None) -> None:
    """The rules of a ufunc, if this SciPy has it."""
    if hasattr(special, name):
        rule(getattr(special, name), *rules)


def runner(name: str) -> Callable:
    """A Python function of scipy.special, or that of cupyx.scipy.special where an array is CuPy's."""
    fun = getattr(special, name)

    @functools.wraps(fun)
    def run(*args, **kwargs):
        if all(type(value_of(a)).__module__.partition(".")[0] != "cupy" for a in args):
            return fun(*args, **kwargs)
        from cupyx.scipy import special as there  # type: ignore[import-not-found]

        return getattr(there, name)(*args, **kwargs)

    return run


def _reaching(name: str) -> Callable:
    """A Python function of scipy.special that takes traced arrays too."""
    fun, run = getattr(special, name), runner(name)

    @functools.wraps(fun)
    def call(*args, **kwargs):
        return dispatch(fun, args, kwargs) if find((args, kwargs), []) else run(*args, **kwargs)

    call.__doc__ = f"As scipy.special.{name}, for traced arrays too."
    return call


functions: dict[str, Any] = {
    name: f if isinstance(f, np.ufunc | type) or f is np.sinc else _reaching(name)
    for name, f in tuple(vars(special).items())
}
"""Every public name of scipy.special, and the function that takes traced arrays."""


def function(name: str, *rules: Callable | None) -> None:
    """The rules of a Python function, if this SciPy has it."""
    if hasattr(special, name):
        handlers[getattr(special, name)] = primitive(f"scipy.special.{name}", *rules)(runner(name))


def composed(name: str, *, by_scipy: bool = False) -> Callable:
    """A Python function as a composition of others, if this SciPy has it.

    by_scipy: the composition computes otherwise than SciPy does, so that SciPy's own function gives the values.
    """
    return composite(getattr(special, name), by_numpy=by_scipy) if hasattr(special, name) else lambda f: f


def refusal(name: str, argument: str, got: str, need: str, mend: str) -> Exception:
    return DifferentiationError.at(f"scipy.special.{name}", argument=argument, got=got, need=need, mend=mend)


def arrays(*xs) -> Any:
    """Bare numbers and lists as arrays, as scipy takes them."""
    return tuple(x if isinstance(x, Array) or hasattr(x, "dtype") else np.asarray(x) for x in xs)


def is_complex(x) -> bool:
    return np.result_type(value_of(x)).kind == "c"


def sinpi(x):
    """sin πx, exactly zero where x is an integer."""
    k = np.round(np.real(x))
    return (1 - 2 * (k % 2)) * np.sin(math.pi * (x - k))


def cospi(x):
    k = np.round(np.real(x))
    return (1 - 2 * (k % 2)) * np.cos(math.pi * (x - k))


def where_finite(result, f: Callable, x):
    """f(x), but zero where this one of several results is not finite: it would spoil the derivatives of the others."""
    finite = np.isfinite(result)
    return np.where(finite, f(np.where(finite, x, 1)), 0)


def is_pole(x):
    """Whether x is 0, -1, -2, ..."""
    return (x == np.round(x)) & (x <= 0)
