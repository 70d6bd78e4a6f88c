"""Frequencies of modes, and spectra shifted so that frequency zero is in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index
from typing import Any

import numpy as np

from spmd.errors import SpecError
from spmd.fourier.frequencies import frequencies
from spmd.functions.layouts import checked_target
from spmd.functions.local import namespace
from spmd.functions.movement import fetched, relaid
from spmd.functions.planned import Operand, is_split, run_layer
from spmd.global_ops.call import global_value
from spmd.layout import Box, Layout, P, Spec
from spmd.mesh import WORKER
from spmd.operators.halo import halo_exchange
from spmd.operators.splitting import normal_axis
from spmd.placement import from_callback
from spmd.state import state_of
from spmd.tracebacks import api_boundary

__all__ = ["fftfreq", "fftshift", "ifftshift", "rfftfreq"]


@api_boundary
def fftfreq(n: int, d: float = 1.0, *, spec: Spec | None = None) -> Any:
    """The frequencies of the modes of n points of spacing d, in the order of `fft`: `np.fft.fftfreq(n, d)`.

    spec: in a body, how the frequencies are split, of which this worker's block is returned: the spec of one dimension,
    `P("x")`, or a `Layout`. Outside of bodies a global array. None: all of them. Nothing moves. Constant.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda: spmd.fft.fftfreq(5, 0.2, spec=P("x")), (), P("x"))()
        PartitionedArray([ 0.,  1.,  2., -2., -1.], dtype=float64, spec=P('x'))
    """
    return _frequencies("fftfreq", n, d, spec, False)


@api_boundary
def rfftfreq(n: int, d: float = 1.0, *, spec: Spec | None = None) -> Any:
    """The frequencies of the modes of n real points, in the order of `rfft`: `np.fft.rfftfreq(n, d)`.

    Arguments as for `fftfreq`; the array that spec splits has n // 2 + 1 entries.

        >>> with spmd.Mesh(x=2):
        ...     spmd.fft.rfftfreq(6, 1 / 6, spec=P("x"))
        PartitionedArray([0., 1., 2., 3.], dtype=float64, spec=P('x'))
    """
    return _frequencies("rfftfreq", n, d, spec, True)


def _frequencies(name: str, n: Any, d: float, spec: Spec | None, half: bool) -> Any:
    where, n = f"spmd.fft.{name}", index(n)
    if n < 1:
        raise SpecError.at(
            where, argument="n", got=str(n), need="at least one point", mend="the length of the transform"
        )
    length = n // 2 + 1 if half else n
    if spec is None:
        return frequencies(n, d, 0, length, half)
    worker = WORKER.get()
    if worker is None:
        return from_callback((length,), spec, lambda i: frequencies(n, d, i[0].start, i[0].stop, half))
    axes = worker.mesh.axes
    layout = checked_target(where, "spec", spec, (length,), worker.mesh.layout((length,), P()), axes)
    ((start, stop),) = layout.boxes[worker.index]
    return worker.carrying(frequencies(n, d, start, stop, half), state_of(layout.varying))


@api_boundary
def fftshift(
    x: Any,
    axes: int | Sequence[int] | None = None,
    *,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """A spectrum with frequency zero in the middle: entry j is x[(j - n // 2) mod n] along each of axes.

    axes: None: all. As `np.fft.fftshift`. spec, out_spec, shape: as for `fftn`; the result lies as x does.
    Cost: one halo exchange, or on some of the workers two exchanges for each split dimension; half of the entries move.
    Linear. Adjoint: `ifftshift`. Raises SpecError and LayoutError for what does not fit.

        >>> with spmd.Mesh(x=2):
        ...     spmd.fft.fftshift(spmd.fft.fftfreq(5, 0.2, spec=P("x")))
        PartitionedArray([-2., -1.,  0.,  1.,  2.], dtype=float64, spec=P('x'))
    """
    return _shift("fftshift", x, axes, 1, spec, out_spec, shape)


@api_boundary
def ifftshift(
    x: Any,
    axes: int | Sequence[int] | None = None,
    *,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """The inverse of `fftshift`: entry j is x[(j + n // 2) mod n] along each of axes. Adjoint: `fftshift`.

    >>> with spmd.Mesh(x=2):
    ...     spmd.fft.ifftshift(spmd.fft.fftshift(spmd.arange(5, spec=P("x"))))
    PartitionedArray([0, 1, 2, 3, 4], dtype=int64, spec=P('x'))
    """
    return _shift("ifftshift", x, axes, -1, spec, out_spec, shape)


def _shift(name: str, x: Any, axes: Any, sign: int, spec: Any, out_spec: Any, shape: Any) -> Any:
    where = f"spmd.fft.{name}"
    given = range(x.ndim) if axes is None else (axes,) if np.ndim(axes) == 0 else axes
    dims = tuple(normal_axis(where, "axes", index(d), x.ndim) for d in given)
    operand = Operand("spec", x, spec, shape)
    if out_spec is None and not is_split(operand):
        return namespace(x).roll(x, tuple(sign * (x.shape[d] // 2) for d in dims), axis=dims)
    if out_spec is None and global_value(x) is not None and spec is None:
        return getattr(np.fft, name)(x, dims)
    return run_layer(where, lambda layout: _shift_plan(where, layout, dims, sign, out_spec), [operand])


@lru_cache(maxsize=1024)
def _shift_plan(where: str, layout: Layout, dims: tuple[int, ...], sign: int, out_spec: Spec | None) -> _Shift:
    return _Shift(layout, dims, sign, checked_target(where, "out_spec", out_spec, layout.shape, layout, layout.axes))


@dataclass(frozen=True)
class _Shift:
    """Dimensions are rolled: whole ones by each worker; split ones by a halo exchange, or on a grid by fetching what
    comes before the turn, and what after it."""

    layout: Layout
    dims: tuple[int, ...]
    sign: int
    out: Layout

    @cached_property
    def _shifts(self) -> tuple[tuple[int, int], ...]:
        """Dimensions of some length, and by how much they are shifted."""
        shape = self.layout.shape
        return tuple((d, self.sign * (shape[d] // 2)) for d in self.dims if shape[d])

    def __call__(self, x: Any) -> Any:
        layout, xp = self.layout, namespace(x)
        split = [(d, shift) for d, shift in self._shifts if len(layout.cuts[d]) > 1]
        for d, shift in self._shifts:
            x = x if (d, shift) in split else xp.roll(x, shift, axis=d)
        if split and layout.spec is not None:
            widths = [(dict(split).get(d, 0), -dict(split).get(d, 0)) for d in range(len(layout.shape))]
            x = halo_exchange(x, layout.spec, widths, "periodic", sizes=layout.cuts)
        for d, shift in split if layout.spec is None else ():
            # Parts without entries are joined too: all workers take part in their adjoints.
            x = xp.concat([fetched(x, layout, boxes) for boxes in _turned(layout, d, shift)], axis=d)
        return relaid(x, layout, self.out)


@lru_cache(maxsize=256)
def _turned(layout: Layout, d: int, shift: int) -> tuple[list[Box], list[Box]]:
    """For each worker the box that comes to the places of its block before place `shift` of dimension d, and the one
    that comes to those after."""
    n = layout.shape[d]
    shift %= n
    first, second = [], []
    for box in layout.boxes:
        start, stop = box[d]
        turn = min(max(shift, start), stop)
        first.append((*box[:d], (start - shift + n, turn - shift + n) if start < turn else (0, 0), *box[d + 1 :]))
        second.append((*box[:d], (turn - shift, stop - shift) if turn < stop else (0, 0), *box[d + 1 :]))
    return first, second
