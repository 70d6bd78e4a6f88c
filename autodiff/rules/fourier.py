"""Rules of the discrete Fourier transforms of numpy.fft.

Every transform is linear, so its rule is its transpose, and that is a transform again. With w = exp(-2πi/n):

- fft, Σ_j x_j w^jk, has a symmetric matrix; so has ifft.
- rfft gives that sum for real x and k = 0 … n/2. Its transpose Re Σ_k g_k w^jk is hfft(g), but hfft counts the
  entries that stand for two, those between the ends, twice: they are halved before. The transpose of hfft is rfft,
  with the same entries doubled after. irfft and ihfft are such a pair too.
- The transpose of cropping is padding with zeros.

So a backward sweep costs one transform of the same size. The same holds along several dimensions, for every norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.autodiff.primitive import passive
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.rules.shape import along
from spmd.errors import DifferentiationError


@primitive("scaled", lambda g, _ans, _x, index, factor: scaled(g, index, factor))  # type: ignore
def scaled(x, index, factor: float):
    """x with the entries at a basic index multiplied by a number; its own transpose."""
    out = np.copy(x)
    out[index] *= factor
    return out


@primitive("resized", lambda g, _ans, _x, _shape: resized(g, _x.shape))  # type: ignore
def resized(x, shape: tuple[int, ...]):
    """x cropped, or padded with zeros, at the end of each dimension; its transpose does it backwards."""
    x = x[tuple(map(slice, shape))]
    if x.shape == shape:
        return x
    out = np.zeros_like(x, shape=shape)
    out[tuple(map(slice, x.shape))] = x
    return out


def fitted(x, shape: tuple[int, ...]):
    """`resized` where there is something to do."""
    return x if x.shape == shape else resized(x, shape)


def over(ndim: int, s, axes: Any) -> tuple[int, ...]:
    """The dimensions that a transform with these options goes over."""
    if axes is None:
        axes = range(ndim) if s is None else range(-np.size(s), 0)
    axes = [axis % ndim for axis in ([axes] if np.ndim(axes) == 0 else axes)]
    if len(set(axes)) < len(axes):
        raise DifferentiationError.at(
            "a Fourier transform, in a backward sweep",
            argument="axes",
            got=f"{axes}, which name a dimension twice",
            need="each dimension once",
            mend="transform one dimension after the other: np.fft.fft(x, n, axis)",
        )
    return tuple(axes)


def _double(x, n: int, axis: int, factor: float):
    """The entries that stand for two in a half of the spectrum of n numbers, multiplied by a number."""
    return scaled(x, along(axis, x.ndim, slice(1, (n + 1) // 2)), factor)


# The transposes. Each is told which transform is its partner, and takes the cotangent, the shape of the argument, and
# the options of the transform: the sizes (None: those of the argument), the dimensions, the norm.


def of_complex(same: Callable) -> Callable:
    """The transpose of fft by fft, or of ifft by ifft."""

    def pull(g, shape, _s, axes, norm, **more):
        return fitted(same(g, None, axes, norm, **more), shape)

    return pull


def of_real(hermitian: Callable) -> Callable:
    """The transpose of rfft by hfft, or of ihfft by irfft."""

    def pull(g, shape, s, axes, norm, **more):
        last = axes[-1]
        n = None if s is None else np.atleast_1d(s)[-1]
        n = shape[last] if n in (None, -1) else int(n)
        sizes = [*(g.shape[axis] for axis in axes[:-1]), n]
        return fitted(hermitian(_double(g, n, last, 0.5), sizes, axes, norm, **more), shape)

    return pull


def of_hermitian(real: Callable) -> Callable:
    """The transpose of hfft by rfft, or of irfft by ihfft."""

    def pull(g, shape, _s, axes, norm, **more):
        half = real(g, None, axes, norm, **more)
        return fitted(_double(half, g.shape[axes[-1]], axes[-1], 2), shape)

    return pull


_OTHER: dict[Any, Any] = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _hfftn(x, s, axes: Sequence[int], norm):
    return np.fft.irfftn(np.conj(x), s, axes, _OTHER[norm])


def _ihfftn(x, s, axes: Sequence[int], norm):
    return np.conj(np.fft.rfftn(x, s, axes, _OTHER[norm]))


def _rule_1d(fun, pull: Callable) -> None:
    rule(fun, lambda g, _ans, _a, n=None, axis=-1, norm=None: pull(g, _a.shape, n, over(g.ndim, n, axis), norm))


def _rule_nd(fun, pull: Callable, axes: Any = None) -> None:
    rule(fun, lambda g, _ans, _a, s=None, axes=axes, norm=None: pull(g, _a.shape, s, over(g.ndim, s, axes), norm))


_fft = np.fft
_rule_1d(_fft.fft, of_complex(_fft.fftn))
_rule_1d(_fft.ifft, of_complex(_fft.ifftn))
_rule_1d(_fft.rfft, of_real(_hfftn))
_rule_1d(_fft.irfft, of_hermitian(_ihfftn))
_rule_1d(_fft.hfft, of_hermitian(_fft.rfftn))
_rule_1d(_fft.ihfft, of_real(_fft.irfftn))

_rule_nd(_fft.fftn, of_complex(_fft.fftn))
_rule_nd(_fft.ifftn, of_complex(_fft.ifftn))
_rule_nd(_fft.rfftn, of_real(_hfftn))
_rule_nd(_fft.irfftn, of_hermitian(_ihfftn))

_rule_nd(_fft.fft2, of_complex(_fft.fftn), (-2, -1))
_rule_nd(_fft.ifft2, of_complex(_fft.ifftn), (-2, -1))
_rule_nd(_fft.rfft2, of_real(_hfftn), (-2, -1))
_rule_nd(_fft.irfft2, of_hermitian(_ihfftn), (-2, -1))

rule(_fft.fftshift, lambda g, _ans, _x, axes=None: np.fft.ifftshift(g, axes))
rule(_fft.ifftshift, lambda g, _ans, _x, axes=None: np.fft.fftshift(g, axes))

passive(_fft.fftfreq, _fft.rfftfreq)
