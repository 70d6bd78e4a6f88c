"""Windows over arrays of several dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spmd.errors import LayoutError
from spmd.layout import Box, Layout
from spmd.representations.tables import Printed, Report
from spmd.tracebacks import api_boundary
from spmd.window import Padding, Pairs, Taps, Window, checked_taps, plan_blocks

__all__ = ["Windows", "plan_windows", "same_grid"]


@dataclass(frozen=True)
class Windows(Printed):
    """What the blocks of an output need in all dimensions: a `Window` for each, and both layouts."""

    source: Layout
    target: Layout
    dims: tuple[Window, ...]

    @property
    def widths(self) -> tuple[Pairs, ...]:
        """For each dimension and each of its blocks (low, high), padding included, as halo exchanges take them."""
        return tuple(w.widths for w in self.dims)

    @property
    def halos(self) -> tuple[Pairs, ...]:
        """The widths without padding."""
        return tuple(w.halos for w in self.dims)

    @property
    def pads(self) -> tuple[Pairs, ...]:
        return tuple(w.pads for w in self.dims)

    def needs(self, worker: int) -> Box | None:
        """The box of the input, padding included, that a worker needs; None if it holds no block."""
        place = self.source.positions(worker)
        return None if place is None else tuple(w.needs[k] for w, k in zip(self.dims, place, strict=True))

    def _report(self) -> Report:
        tables = [w.table(f"dimension {d}: {w.heading}") for d, w in enumerate(self.dims)]
        return Report(f"{self.source.shape} -> {self.target.shape}", tables, gap="\n")


@api_boundary
def plan_windows(
    source: Layout,
    kernel: int | Sequence[int | None],
    *,
    stride: int | Sequence[int | None] = 1,
    padding: int | str | Sequence[Padding | None] = 0,
    dilation: int | Sequence[int | None] = 1,
    ceil: bool = False,
    target: Layout | Sequence[Sequence[int] | None] | None = None,
) -> Windows:
    """The window over an array of several dimensions with the layout `source`.

    kernel, stride, padding, dilation: one for all dimensions, or a sequence with one for each. A dimension whose kernel
    is None has no window, and its blocks stay as they are. Otherwise as for `plan_window`; write ((low, high),) for the
    padding of a single dimension.
    target: the layout of the output, each block on the workers of the same block of the input; or the sizes of its
    blocks in each dimension. None: balanced.

        >>> windows = spmd.plan_windows(spmd.Layout((6, 5), P("x"), {"x": 2}), (3, None), padding=1)
        >>> windows.widths
        (((1, 1), (1, 1)), ((0, 0),))
    """
    if not isinstance(source, Layout):
        raise LayoutError.at(
            "spmd.plan_windows",
            argument="source",
            got=repr(source),
            need="the layout of the input",
            mend="mesh.layout(shape, spec); spmd.plan_window plans one dimension from its length",
        )
    layout_out = target if isinstance(target, Layout) else _plain(target)
    return _plan_windows(source, *map(_plain, (kernel, stride, padding, dilation)), bool(ceil), layout_out)


def _plain(x: Any) -> Any:
    """x with tuples for all its sequences, so that it is hashable."""
    return tuple(map(_plain, x)) if isinstance(x, Iterable) and not isinstance(x, str) else x


# Cached, because a body calls it at every step.
@lru_cache(maxsize=256, typed=True)
def _plan_windows(source: Layout, kernel, stride, padding, dilation, ceil: bool, target) -> Windows:
    where = "spmd.plan_windows"
    options = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    each = {name: per_dimension(where, name, value, len(source.shape)) for name, value in options.items()}
    whole = [k is None for k in each["kernel"]]
    taps = []
    for d, n in enumerate(source.shape):
        if whole[d]:
            taps.append((Taps(1), n))
            continue
        k, s, p, r = (each[name][d] for name in options)
        t = checked_taps(
            f"{where}, dimension {d}", n, k, 1 if s is None else s, 0 if p is None else p, 1 if r is None else r
        )
        taps.append(t.fit(n, ceil))
    shape = tuple(m for _, m in taps)
    if isinstance(target, Layout):
        _check_target(where, source, target, shape)
        layout_out = target
    else:
        cuts: Sequence = per_dimension(where, "target", target, len(shape))
        layout_cuts = [source.cuts[d] if whole[d] and cut is None else cut for d, cut in enumerate(cuts)]
        layout_out = same_grid(source, shape, layout_cuts)
    dims = [
        plan_blocks(f"{where}, dimension {d}", source.cuts[d], layout_out.cuts[d], t) for d, (t, _) in enumerate(taps)
    ]
    return Windows(source, layout_out, tuple(dims))


def same_grid(layout: Layout, shape: Sequence[int], cuts: Sequence[Sequence[int] | None] | None = None) -> Layout:
    """The layout of another array of as many dimensions, whose block k lies where block k of this one does.

    cuts: the lengths of the blocks in each dimension; None: balanced.
    """
    if layout.spec is not None:
        return Layout(shape, layout.spec, layout.axes, cuts, copies=layout.copies)
    assert layout.workers is not None
    blocks = [len(c) for c in layout.cuts]
    grid = (*blocks, len(layout.workers) // math.prod(blocks))
    return Layout.grid(shape, grid, layout.axes, layout.workers, cuts, copies=layout.copies)


def _check_target(where: str, source: Layout, target: Layout, shape: tuple[int, ...]) -> None:
    if target.shape != shape:
        raise LayoutError.at(
            where,
            argument="target",
            got=f"a layout of shape {target.shape}",
            need=f"the shape of the output, {shape}",
            mend="leave it out, and read the shape off the result: plan.target.shape",
        )
    # The order of the axes numbers the workers.
    if [*source.axes.items()] != [*target.axes.items()] or any(
        source.positions(w) != target.positions(w) for w in range(source.size)
    ):
        raise LayoutError.at(
            where,
            argument="target",
            got=f"{target} for an input that lies as {source}",
            need="the same grid of the same workers: block k of the output where block k of the input is",
            mend="leave it out, and repartition the output; or repartition the input first",
        )


def per_dimension(where: str, argument: str, value: Any, ndim: int) -> tuple:
    if not isinstance(value, tuple):
        return (value,) * ndim
    if len(value) != ndim:
        raise LayoutError.at(
            where,
            argument=argument,
            got=f"{len(value)} entries: {value}",
            need=f"one for each of {ndim} dimension{'s' * (ndim != 1)}",
            mend="kernel None for a dimension without a window" if argument == "kernel" else "or one for all",
        )
    return value
