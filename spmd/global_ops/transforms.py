"""Fourier transforms of global arrays, by plans of local transforms and repartitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.fourier.lines import checked_norm, lines_of
from spmd.fourier.plan import FourierPlan, fourier_plan
from spmd.global_ops.call import check_gathered, global_of, on_blocks
from spmd.global_ops.registry import implements
from spmd.layout_rules import Rule
from spmd.operators.splitting import normal_axis

__all__ = ["check_plan"]


def check_plan(where: str, plan: FourierPlan, x: PartitionedArray) -> None:
    """Raise if a transform gathers an array that is too large for that: its only dimension is split."""
    if plan.gathers:
        check_gathered(where, [x], "np.reshape(x, (m, n)) and two transforms, with factors between them")


def _planned(fun: Any, kind: str, a: Any, s: Any, axes: Any, norm: Any) -> Any:
    where, value = f"np.fft.{fun.__name__}", global_of(a)
    layout = value.layout.reduced
    plan = fourier_plan(layout, lines_of(where, kind, layout.shape, s, axes), checked_norm(where, norm))
    check_plan(where, plan, value)
    return on_blocks(where, _body, (plan,), [a], [layout], plan.out, value.mesh)


def _body(plan: FourierPlan) -> Callable[..., Any]:
    return lambda x: plan(x)


def _single(fun: Any) -> None:
    @implements(fun, rule=Rule.ALONG)
    def handler(a: Any, n: Any = None, axis: Any = -1, norm: Any = None, out: Any = None) -> Any:
        return _planned(fun, fun.__name__, a, None if n is None else (n,), (axis,), norm)


def _several(fun: Any) -> None:
    default = (-2, -1) if fun.__name__.endswith("2") else None

    @implements(fun, rule=Rule.ALONG)
    def handler(a: Any, s: Any = None, axes: Any = default, norm: Any = None, out: Any = None) -> Any:
        return _planned(fun, fun.__name__[:-1], a, s, axes, norm)


for _name in "fft ifft rfft irfft hfft ihfft".split():
    _single(getattr(np.fft, _name))
    for _end in "n2" if _name[0] != "h" and _name != "ihfft" else "":
        _several(getattr(np.fft, _name + _end))


def _shifted(fun: Any, sign: int) -> None:
    @implements(fun, rule=Rule.KEPT)
    def handler(x: Any, axes: Any = None) -> Any:
        dims = range(len(x.shape)) if axes is None else (axes,) if np.ndim(axes) == 0 else axes
        dims = [normal_axis(f"np.fft.{fun.__name__}", "axes", int(d), len(x.shape)) for d in dims]
        return np.roll(x, [sign * (x.shape[d] // 2) for d in dims], dims)


_shifted(np.fft.fftshift, 1)
_shifted(np.fft.ifftshift, -1)
