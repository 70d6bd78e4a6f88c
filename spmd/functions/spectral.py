"""Convolutions by Fourier transforms, of which the lowest modes have weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index
from typing import Any

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import SpecError, describe
from spmd.fourier.blocks import transformed
from spmd.fourier.lines import Line, lowest_modes, result_shape
from spmd.fourier.plan import FourierPlan, fourier_plan
from spmd.functions.arguments import layer
from spmd.functions.layouts import checked_target, dtype_of, lie_on_grid, spec_of_names
from spmd.functions.local import namespace
from spmd.functions.movement import gathered, relaid, summed, varied
from spmd.functions.planned import LayerPlan, Operand, is_split, run_layer
from spmd.layout import Layout, Spec
from spmd.operators.repartition import accumulate
from spmd.tracebacks import api_boundary
from spmd.window_nd import same_grid

__all__ = ["spectral_conv"]

_WHERE = "spmd.functions.spectral_conv"

Shape = tuple[int, ...]


@api_boundary
@layer
def spectral_conv(
    x: Tree,
    w: Any,
    modes: Sequence[int] | None = None,
    *,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Tree:
    """The Fourier layer: y = irfftn(f), where f[n, o, k] = sum over c of w[c, o, k] rfftn(x)[n, c, k] for the lowest k.

    x: (N, in_channels, *space), real. w: (in_channels, out_channels, *modes), complex: in the last dimension of space
    modes has the frequencies 0 to m - 1, in the others m frequencies in the order of `fft`: (m + 1) // 2 from zero on,
    and m // 2 negative ones. Gives (N, out_channels, *space). Arrays of NumPy, CuPy or PyTorch.
    modes: the lengths that w has; None: any. All other modes of the result are zero.
    spec, w_spec: in a body, how the whole x and w are split: specs, or a `Layout` on some of the workers; None: the
    whole. Outside of bodies global arrays have their layouts. out_spec: how the result is to lie; None: as x in batch
    and space, and as w's second dimension in channels. shape: of the whole x, if spec splits it evenly; without it the
    workers exchange the lengths of their blocks.

    Only the lowest modes move, after they are cropped along each dimension: by the repartitions of `spmd.fft` forward
    and back. w does not move where w_spec splits it: each worker multiplies the modes and channels it holds of w; w
    that is whole on the workers is cut to the modes that they hold of x. The products are summed over the axes that
    split w's first dimension: by an all-reduce, or a reduce-scatter where out_spec splits the channels by them too.
    Linear in x and in w. Adjoint in x: the transposes of the transforms, and w transposed; in w: the modes of x times
    those of g, summed over the workers that split the batch.
    Raises SpecError and LayoutError for shapes, modes and layouts that do not fit. Source: Li et al., "Fourier neural
    operator for parametric partial differential equations", 2021; split as in Grady et al., "Model-parallel Fourier
    neural operators as learned surrogates for large-scale parametric PDEs", 2023.

        >>> x = np.cos(np.pi * np.arange(4.0) / 2).reshape(1, 1, 4)
        >>> with spmd.Mesh(x=2):
        ...     y = spmd.functions.spectral_conv(spmd.put(x, P(None, None, "x")), np.array([[[3.0 + 0j, 2.0]]]))
        >>> y.spec, np.allclose(y.numpy(), 2 * x)
        (P(None, None, 'x'), True)
    """
    _check(x, w)
    wanted = None if modes is None else tuple(index(m) for m in modes)
    operands = [Operand("spec", x, spec, shape), Operand("w_spec", w, w_spec)]
    if out_spec is None and not is_split(*operands):
        lines = _lines(tuple(x.shape), tuple(w.shape), wanted)
        f = transformed(x, lines, "backward", result_shape(x.shape, lines))
        space = (x.shape[0], w.shape[1], *x.shape[2:])
        return transformed(_product(f, w), _back(space, w.shape[2:]), "backward", space)
    return run_layer(_WHERE, lambda x, w: _plan(x, w, wanted, out_spec), operands)


def _check(x: Any, w: Any) -> None:
    """Raise unless the operands have the dimensions and kinds of a Fourier layer."""
    ndim = getattr(x, "ndim", 0)
    for argument, array, fits, need in (
        ("x", x, lambda: ndim > 2 and dtype_of(x).kind in "fiu", "real numbers of shape (N, in_channels, *space)"),
        ("w", w, lambda: w.ndim == ndim and dtype_of(w).kind == "c", f"complex numbers of {ndim} dimensions"),
    ):
        if not hasattr(array, "shape") or not fits():
            mend = "w of shape (in_channels, out_channels, *modes), as real + 1j * imag"
            raise SpecError.at(_WHERE, argument=argument, got=describe(array), need=need, mend=mend)


def _lines(x: Shape, w: Shape, modes: Shape | None) -> tuple[Line, ...]:
    """The transforms to the lowest modes of the whole arrays, whose shapes are checked."""
    highest = (*x[2:-1], x[-1] // 2 + 1)
    if w[0] != x[1] or (modes is not None and modes != w[2:]):
        argument, got = ("w", f"w of shape {[*w]} for x of shape {[*x]}")
        if w[0] == x[1]:
            argument, got = "modes", f"{modes} for w of shape {[*w]}"
        need = "w of shape (in_channels, out_channels, *modes) for x of shape (N, in_channels, *space)"
        raise SpecError.at(_WHERE, argument=argument, got=got, need=need, mend="modes=None: those that w has")
    if not all(1 <= m <= n for m, n in zip(w[2:], highest, strict=True)):
        need = f"from 1 to {[*highest]} modes, for space of {[*x[2:]]} points"
        raise SpecError.at(
            _WHERE, argument="w", got=f"{[*w[2:]]} modes", need=need, mend="fewer modes, or a finer grid"
        )
    return lowest_modes(x, range(2, len(x)), w[2:])


def _back(shape: Shape, modes: Shape) -> tuple[Line, ...]:
    """The transforms from these modes to space."""
    return tuple(line.inverse for line in reversed(lowest_modes(shape, range(2, len(shape)), modes)))


def _product(f: Any, w: Any) -> Any:
    """The sum over c of w[c, o, k] f[n, c, k]: a product of matrices for each mode."""
    xp, dims = namespace(f), range(2, f.ndim)
    y = xp.matmul(xp.permute_dims(f, (*dims, 0, 1)), xp.permute_dims(w, (*dims, 0, 1)))
    return xp.permute_dims(y, (f.ndim - 2, f.ndim - 1, *range(f.ndim - 2)))


@lru_cache(maxsize=1024)
def _plan(x: Layout, w: Layout, modes: Shape | None, out_spec: Spec | None) -> LayerPlan:
    forward = fourier_plan(x, _lines(x.shape, w.shape, modes), fixed=frozenset({1}))
    return (_GridPlan if lie_on_grid(x, w, out_spec) else _SpecPlan)(x, w, forward, out_spec)


def _without(names: Sequence[str], taken: set[str]) -> tuple[str, ...]:
    return tuple(n for n in names if n not in taken)


@dataclass(frozen=True)
class _Layer:
    """x: the layouts of x and w. forward: the plan of the transform to the lowest modes."""

    x: Layout
    w: Layout
    forward: FourierPlan
    out_spec: Spec | None

    @property
    def _shapes(self) -> tuple[Shape, Shape]:
        """Of the result, and of its modes."""
        batch, channels = self.x.shape[0], self.w.shape[1]
        return (batch, channels, *self.x.shape[2:]), (batch, channels, *self.w.shape[2:])

    def _inverse(self, source: Layout, natural: Layout | None) -> FourierPlan:
        """The way from the modes of the result to space; to `natural` where no layout is asked for."""
        shape, lines = self._shapes[0], _back(self._shapes[0], self.w.shape[2:])
        target = natural
        if self.out_spec is not None:
            target = checked_target(_WHERE, "out_spec", self.out_spec, shape, source, self.x.axes)
        return fourier_plan(source, lines, "backward", target, fixed=frozenset({1}))


@dataclass(frozen=True)
class _SpecPlan(_Layer):
    """By specs: modes of x to P(batch, i, modes), products with w = P(i, o, modes), sums over i."""

    @cached_property
    def _axes(self) -> tuple[tuple[str, ...], ...]:
        return tuple(map(tuple, self.w.spec.dims))

    @cached_property
    def modes(self) -> Layout:
        """The layout of the modes of x for the products: by w's axes, and otherwise as they come. What splits channels
        of x only splits modes instead, if w is not cut there."""
        rows, _, *split = self._axes
        lies, taken = self.forward.out, {n for names in self._axes for n in names}
        batch, channels, *space = lies.spec.dims
        names = [_without(batch, taken), rows, *split]
        cuts = [lies.cuts[0] if names[0] == tuple(batch) else None, self.w.cuts[0], *self.w.cuts[2:]]
        if not any(split):
            names[2:] = [_without(each, taken) for each in space]
            longest = max(range(2, len(names)), key=lambda d: lies.shape[d] / len(lies.cuts[d]))
            names[longest] = (*names[longest], *_without(channels, taken))
            kept = zip(lies.cuts[2:], space, names[2:], strict=True)
            cuts[2:] = [cut if tuple(old) == new else None for cut, old, new in kept]
        return Layout(lies.shape, spec_of_names(names), lies.axes, cuts)

    @cached_property
    def weights(self) -> Layout:
        rows, columns, *_ = self._axes
        names = [rows, columns, *self.modes.spec.dims[2:]]
        return Layout(self.w.shape, spec_of_names(names), self.w.axes, [*self.w.cuts[:2], *self.modes.cuts[2:]])

    @cached_property
    def _products(self) -> tuple[Layout, Layout]:
        """The layouts of the products, and of their sums: scattered if the result is split so."""
        rows, columns, *_ = self._axes
        batch, _, *split = self.modes.spec.dims
        cuts = [self.modes.cuts[0], self.w.cuts[1], *self.modes.cuts[2:]]
        lies = Layout(self._shapes[1], spec_of_names([batch, columns, *split]), self.x.axes, cuts)
        if self.out_spec is None or not rows:
            return lies, lies
        target = checked_target(_WHERE, "out_spec", self.out_spec, self._shapes[0], lies, self.x.axes)
        if tuple(target.spec.dims[1]) != (*columns, *rows):
            return lies, lies
        cuts[1] = target.cuts[1]
        spec = spec_of_names([batch, (*columns, *rows), *split])
        return lies, Layout(self._shapes[1], spec, self.x.axes, cuts)

    @cached_property
    def back(self) -> FourierPlan:
        source = self._products[1]
        columns = self._axes[1]
        batch, _, *space = (_without(names, {*columns}) for names in self.x.spec.dims)
        names = [batch, columns, *space]
        cuts = [c if tuple(old) == n else None for c, old, n in zip(self.x.cuts, self.x.spec.dims, names, strict=True)]
        cuts[1] = self.w.cuts[1]
        return self._inverse(source, Layout(self._shapes[0], spec_of_names(names), self.x.axes, cuts))

    @cached_property
    def out(self) -> Layout:
        return self.back.out

    def __call__(self, x: Any, w: Any) -> Any:
        rows, columns, *_ = self._axes
        f = gathered(self.forward(x), self.forward.out, self.modes, columns)
        w = relaid(w, self.w, self.weights)
        y = _product(varied(f, columns), varied(w, tuple(self.modes.spec.dims[0])))
        return self.back(summed(y, rows, *self._products))


@dataclass(frozen=True)
class _GridPlan(_Layer):
    """On some of the workers: the modes of x to the workers of the blocks of w, products there, added where they lie.
    w in a single block goes to the workers of the modes instead."""

    @cached_property
    def _table(self) -> np.ndarray:
        """The workers of the products: by block of in_channels, out_channels, modes, and batch."""
        lies, w = self.forward.out, self.w
        if len(w.holders) > 1:
            owners = {(*place, 0): workers[0] for place, workers in w.holders.items()}
            counts = (*map(len, w.cuts), 1)
        else:
            counts = (1, 1, *map(len, lies.cuts[2:]), len(lies.cuts[0]))
            places = itertools.product(*map(range, counts))
            owners = {place: lies.holders[place[-1], 0, *place[2:-1]][0] for place in places}
        table = np.empty(counts, int)
        for place, worker in owners.items():
            table[place] = worker
        return table

    def _grid(self, shape: Shape, dims: Sequence[int], cuts: Sequence[Any]) -> Layout:
        """A layout by these dimensions of the table; others are copies."""
        rest = [d for d in range(self._table.ndim) if d not in dims]
        workers = np.transpose(self._table, (*dims, *rest))
        counts = [*workers.shape[: len(dims)], int(np.prod(workers.shape[len(dims) :], dtype=int))]
        return Layout.grid(shape, counts, self.x.axes, workers.ravel().tolist(), cuts)

    @cached_property
    def _layouts(self) -> tuple[Layout, Layout, Layout]:
        """Of w, of the modes of x, and of the products."""
        ndim, lies = len(self.x.shape), self.forward.out
        by_w = len(self.w.holders) > 1
        space, cuts = range(2, ndim), self.w.cuts[2:] if by_w else lies.cuts[2:]
        batch = [(self.x.shape[0],)] if by_w else [lies.cuts[0]]
        weights = self._grid(self.w.shape, range(ndim), [*self.w.cuts[:2], *cuts])
        modes = self._grid(lies.shape, (ndim, 0, *space), [*batch, self.w.cuts[0], *cuts])
        return weights, modes, self._grid(self._shapes[1], (ndim, 1, *space), [*batch, self.w.cuts[1], *cuts])

    @cached_property
    def sums(self) -> Layout:
        """The products, added on the first worker of each block."""
        products = self._layouts[2]
        counts = [len(c) for c in products.cuts]
        copies = len(products.workers or ()) // int(np.prod(counts))
        return Layout.grid(products.shape, counts, products.axes, (products.workers or ())[::copies], products.cuts)

    @cached_property
    def back(self) -> FourierPlan:
        shape, x = self._shapes[0], self.x
        if len(x.cuts[1]) > 1 or len(self.w.cuts[1]) > 1:
            return self._inverse(self.sums, None)
        return self._inverse(self.sums, same_grid(x, shape, [x.cuts[0], None, *x.cuts[2:]]))

    @cached_property
    def out(self) -> Layout:
        return self.back.out

    def __call__(self, x: Any, w: Any) -> Any:
        weights, modes, products = self._layouts
        f = relaid(self.forward(x), self.forward.out, modes)
        y = _product(f, relaid(w, self.w, weights))
        return self.back(accumulate(y, products, self.sums))
