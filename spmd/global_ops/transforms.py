"""Fourier transforms of global arrays over several dimensions: over one after the other, so that none is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.global_ops.registry import implements
from spmd.layout_rules import Rule
from spmd.operators.splitting import normal_axis

__all__: list[str] = []


def _lines(where: str, a: Any, s: Any, axes: Any) -> list[tuple[int, int | None]]:
    """The dimensions, in order, and the length of the transform over each; None: that of the array."""
    ndim = len(a.shape)
    axes = [*range(ndim - (ndim if s is None else len(s)), ndim)] if axes is None else [*axes]
    if s is not None and len(s) != len(axes):
        raise ValueError(f"{where}: s has {len(s)} lengths, for {len(axes)} axes")
    dims = [normal_axis(where, "axes", d, ndim) for d in axes]
    return [(d, None if s is None else a.shape[d] if s[k] == -1 else s[k]) for k, d in enumerate(dims)]


def _several(fun: Any, last: Callable[..., Any], others: Callable[..., Any], real_result: bool) -> None:
    """last: over the last of the axes; it comes first, except of a transform whose result is real."""

    default = (-2, -1) if fun.__name__.endswith("2") else None

    @implements(fun, rule=Rule.ALONG)
    def handler(a: Any, s: Any = None, axes: Any = default, norm: Any = None, out: Any = None) -> Any:
        *rest, (final, length) = _lines(f"np.fft.{fun.__name__}", a, s, axes)
        if not real_result:
            a = last(a, length, final, norm)
        for d, n in rest if real_result else reversed(rest):
            a = others(a, n, d, norm)
        return last(a, length, final, norm) if real_result else a


for _end in "n2":
    for _name, _last, _others in (
        ("fft", np.fft.fft, np.fft.fft),
        ("ifft", np.fft.ifft, np.fft.ifft),
        ("rfft", np.fft.rfft, np.fft.fft),
        ("irfft", np.fft.irfft, np.fft.ifft),
    ):
        _several(getattr(np.fft, _name + _end), _last, _others, _name == "irfft")


def _shifted(fun: Any, sign: int) -> None:
    @implements(fun, rule=Rule.KEPT)
    def handler(x: Any, axes: Any = None) -> Any:
        dims = range(len(x.shape)) if axes is None else (axes,) if np.ndim(axes) == 0 else axes
        dims = [normal_axis(f"np.fft.{fun.__name__}", "axes", int(d), len(x.shape)) for d in dims]
        return np.roll(x, [sign * (x.shape[d] // 2) for d in dims], dims)


_shifted(np.fft.fftshift, 1)
_shifted(np.fft.ifftshift, -1)
