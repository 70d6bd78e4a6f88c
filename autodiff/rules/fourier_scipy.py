"""The transforms of scipy.fft for traced arrays too, with their rules; `spmd.scipy.fft` gives them their names.

NumPy's protocols do not reach scipy.fft, so each function here stands in for the one of its name: it takes the same
options and gives the same result. CuPy arrays go to cupyx.scipy.fft.

The Fourier transforms have the transposes that `spmd.autodiff.rules.fourier` tells about. A cosine or sine transform
of type 1 or 4 is symmetric, and types 2 and 3 are transposes of each other, but for entries at the ends, which scipy
counts half or twice unless `orthogonalize` says otherwise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import fft

from spmd.autodiff.primitive import composite, composites, passive
from spmd.autodiff.registry import primitive
from spmd.autodiff.rules.fourier import fitted, of_complex, of_hermitian, of_real, over, scaled
from spmd.autodiff.rules.shape import along
from spmd.autodiff.tracer import Array
from spmd.errors import DifferentiationError

functions: dict[str, Callable[..., Any]] = {}
"""The functions by name."""


def _runner(name: str) -> Callable:
    """The function of scipy.fft, or that of cupyx.scipy.fft where the array is CuPy's."""
    fun = getattr(fft, name)

    def run(x, *args, **kwargs):
        if type(x).__module__.partition(".")[0] != "cupy":
            return fun(x, *args, **kwargs)
        from cupyx.scipy import fft as there  # type: ignore[import-not-found]

        more = {k: v for k, v in kwargs.items() if v is not None and k != "workers"}
        return getattr(there, name)(x, *args, **more)

    return run


def _declare(name: str, pull: Callable) -> Callable:
    return primitive(f"scipy.fft.{name}", pull)(_runner(name))


def _add(name: str, fun: Callable) -> None:
    fun.__name__ = fun.__qualname__ = name
    fun.__doc__ = f"As scipy.fft.{name}, for traced arrays too."
    functions[name] = fun


def _may_overwrite(x, overwrite_x: bool) -> bool:
    """Arrays of a body, and traced ones, are immutable."""
    return overwrite_x and type(x) is not Array


def _partner(name: str) -> Callable:
    return lambda *args, **kwargs: functions[name](*args, **kwargs)


# Fourier transforms. `plan` is the engine's own business: it would not fit the transpose.


def _fourier_1d(name: str, pull: Callable) -> None:
    @functools.partial(_declare, name)
    def prim(g, _ans, _x, n, axis, norm, overwrite_x, *, workers, plan):
        return pull(g, _x.shape, n, over(g.ndim, n, axis), norm, workers=workers)

    def fun(x, n=None, axis=-1, norm=None, overwrite_x=False, workers=None, *, plan=None):
        return prim(x, n, axis, norm, _may_overwrite(x, overwrite_x), workers=workers, plan=plan)

    _add(name, fun)


def _fourier_nd(name: str, pull: Callable, dimensions: Any) -> None:
    @functools.partial(_declare, name)
    def prim(g, _ans, _x, s, axes, norm, overwrite_x, *, workers, plan):
        return pull(g, _x.shape, s, over(g.ndim, s, axes), norm, workers=workers)

    def fun(x, s=None, axes=dimensions, norm=None, overwrite_x=False, workers=None, *, plan=None):
        return prim(x, s, axes, norm, _may_overwrite(x, overwrite_x), workers=workers, plan=plan)

    _add(name, fun)


for _name, _pull in {
    "fft": of_complex(_partner("fftn")),
    "ifft": of_complex(_partner("ifftn")),
    "rfft": of_real(_partner("hfftn")),
    "irfft": of_hermitian(_partner("ihfftn")),
    "hfft": of_hermitian(_partner("rfftn")),
    "ihfft": of_real(_partner("irfftn")),
}.items():
    _fourier_1d(_name, _pull)
    _fourier_nd(_name + "2", _pull, (-2, -1))
    _fourier_nd(_name + "n", _pull, None)


# Cosine and sine transforms. By type: which entries scipy counts otherwise, and by what they are to be multiplied
# before and after the partner to make it the transpose. The inverse of type 2 is type 3, and the other way round.

_SWAPPED = {1: 1, 2: 3, 3: 2, 4: 4}
_INSIDE, _FIRST, _LAST = slice(1, -1), slice(0, 1), slice(-1, None)
_ENDS = {
    "dct": {1: (_INSIDE, 0.5, 2), 2: (_FIRST, 2, 1), 3: (_FIRST, 1, 0.5)},
    "dst": {2: (_LAST, 2, 1), 3: (_LAST, 1, 0.5)},
}
_NOTHING = (_FIRST, 1, 1)


def _scaled_along(x, axes, entries: slice, factor: float):
    for axis in axes if factor != 1 else ():
        x = scaled(x, along(axis, x.ndim, entries), factor)
    return x


def _of_trigonometric(inverse: str, kind: str) -> Callable:
    """The transpose of dct or dst, or with inverse "i" of idct or idst, along some dimensions."""

    def pull(g, shape, type, axes, norm, workers, orthogonalize):
        ortho = norm == "ortho"
        if orthogonalize not in (None, ortho):
            if g.dtype.kind == "c":
                raise _ignored(inverse + kind, orthogonalize)
            ortho = orthogonalize
        partner, swapped = functions[inverse + kind + "n"], _SWAPPED[type]
        matrix = swapped if inverse else type
        entries, before, after = _NOTHING if ortho else _ENDS[kind].get(matrix, _NOTHING)
        g = _scaled_along(g, axes, entries, before)
        g = partner(g, swapped, None, axes, norm, workers=workers, orthogonalize=orthogonalize)
        return fitted(_scaled_along(g, axes, entries, after), shape)

    return pull


def _ignored(name: str, orthogonalize: bool) -> Exception:
    return DifferentiationError.at(
        f"scipy.fft.{name}, in a backward sweep",
        argument="orthogonalize",
        got=f"{orthogonalize} with a complex array, for which scipy does not look at it",
        need="orthogonalize=None",
        mend=f"transform the parts: {name}(x.real, ...) + 1j * {name}(x.imag, ...)",
    )


def _trigonometric_1d(name: str, pull: Callable) -> None:
    @functools.partial(_declare, name)
    def prim(g, _ans, _x, type, n, axis, norm, overwrite_x, *, workers, orthogonalize):
        return pull(g, _x.shape, type, over(g.ndim, n, axis), norm, workers, orthogonalize)

    def fun(x, type=2, n=None, axis=-1, norm=None, overwrite_x=False, workers=None, orthogonalize=None):
        overwrite_x = _may_overwrite(x, overwrite_x)
        return prim(x, type, n, axis, norm, overwrite_x, workers=workers, orthogonalize=orthogonalize)

    _add(name, fun)


def _trigonometric_nd(name: str, pull: Callable) -> None:
    @functools.partial(_declare, name)
    def prim(g, _ans, _x, type, s, axes, norm, overwrite_x, *, workers, orthogonalize):
        return pull(g, _x.shape, type, over(g.ndim, s, axes), norm, workers, orthogonalize)

    def fun(x, type=2, s=None, axes=None, norm=None, overwrite_x=False, workers=None, orthogonalize=None):
        overwrite_x = _may_overwrite(x, overwrite_x)
        return prim(x, type, s, axes, norm, overwrite_x, workers=workers, orthogonalize=orthogonalize)

    _add(name, fun)


for _inverse, _kind in itertools.product(("", "i"), ("dct", "dst")):
    _pull = _of_trigonometric(_inverse, _kind)
    _trigonometric_1d(_inverse + _kind, _pull)
    _trigonometric_nd(_inverse + _kind + "n", _pull)

# The fast Hankel transforms are symmetric: a convolution, reversed, between two equal scalings.

_fht = _declare("fht", lambda g, _ans, _a, dln, mu, offset, bias: _fht(g, dln, mu, offset, bias))
_ifht = _declare("ifht", lambda g, _ans, _A, dln, mu, offset, bias: _ifht(g, dln, mu, offset, bias))
_add("fht", lambda a, dln, mu, offset=0.0, bias=0.0: _fht(a, dln, mu, offset, bias))
_add("ifht", lambda A, dln, mu, offset=0.0, bias=0.0: _ifht(A, dln, mu, offset, bias))

# The others, which are as NumPy's or take no arrays.

composite(fft.fftshift)(np.fft.fftshift)
composite(fft.ifftshift)(np.fft.ifftshift)
for _name in fft.__all__:
    if _name not in functions and getattr(fft, _name) not in composites:
        passive(getattr(fft, _name))
