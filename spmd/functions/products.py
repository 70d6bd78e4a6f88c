"""Linear layers on arrays that lie anyhow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from spmd.autodiff.signatures import Tree
from spmd.errors import SpecError, describe
from spmd.functions.arguments import layer
from spmd.functions.layouts import (
    check_dtypes,
    check_split,
    checked_target,
    layout_of_operand,
    lie_on_grid,
    spec_of_names,
)
from spmd.functions.local import local, namespace
from spmd.functions.movement import gathered, relaid, summed, varied
from spmd.functions.planned import LayerPlan, Operand, is_split, layouts_are_recorded, run_layer
from spmd.global_ops.call import names_of
from spmd.layout import Layout, P, Spec
from spmd.mesh import WORKER, here
from spmd.operators.gather import all_gather, psum_scatter
from spmd.operators.reduce import psum
from spmd.operators.repartition import accumulate
from spmd.tracebacks import api_boundary

__all__ = ["linear"]

_WHERE = "spmd.functions.linear"

Shape = tuple[int, ...]


@api_boundary
@layer
def linear(
    x: Tree,
    w: Any,
    bias: Any = None,
    *,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Tree:
    """y = x wᵀ + bias, for features in the last dimension of x.

    x: (..., in_features). w: (out_features, in_features). bias: (out_features,), or None; it lies as the first
    dimension of w does. Gives (..., out_features). Arrays of NumPy, CuPy or PyTorch.
    spec, w_spec: in a body, how the whole x and w are split, of which x, w and bias are this worker's blocks: specs, or
    a `Layout` on some of the workers. None: the whole. Outside of bodies global arrays have their layouts.
    out_spec: how the result is to lie. None: as x in its first dimensions, and as the rows of w in the last; by a
    `Layout.grid` of w the result is on the first workers of each row of blocks.
    shape: of the whole x, if spec splits it evenly; without it the workers exchange the lengths of their blocks.

    With specs: w is P(r, c), of axes r and c, or None. x is brought to P(..., c), which moves nothing where it lies so;
    the products are summed over c, to out_spec: by an all-reduce, or by a reduce-scatter where out_spec splits a
    dimension of the result by c. Backward: one sum of the cotangent of x over r.
    Where a layout is on some of the workers: each block of x goes to the workers of the blocks of w that need it, and
    their products are added where the result lies; backward the same the other way.
    Linear in x and in w. Adjoint in x: g w; in w: gᵀ x, summed over the workers that split the other dimensions of x.
    Raises SpecError and LayoutError for shapes, specs and layouts that do not fit. Source: as
    torch.nn.functional.linear; Shoeybi et al., "Megatron-LM", 2019; Hewett, Grady, "A linear algebraic approach to
    model parallelism in deep learning", 2020.

        >>> x, w = np.ones((2, 4)), np.arange(8.0).reshape(2, 4)
        >>> with spmd.Mesh(model=2), spmd.ledger() as log:
        ...     y = spmd.functions.linear(spmd.put(x, P(None, "model")), spmd.put(w, P(None, "model")))
        >>> y, log.messages
        (PartitionedArray([[ 6., 22.],
                          [ 6., 22.]], dtype=float64, spec=P(None, None)), 1)
    """
    _check(x, w, bias)
    check_dtypes(_WHERE, x, w=w, bias=bias)
    worker = WORKER.get()
    if worker is not None and shape is None and not (isinstance(w_spec, Layout) and layouts_are_recorded()):
        plan = _plan_by_specs(spec, w_spec, out_spec, x.ndim, worker.mesh.sides)
        if plan is not None:
            check_split(_WHERE, "spec", x, spec, worker)
            if isinstance(w_spec, Layout):
                layout_of_operand(_WHERE, "w_spec", w, w_spec)
            check_split(_WHERE, "w_spec", w, w_spec, worker)
            _check_features(plan, x, w)
            return plan(x, w, bias)
    operands = [
        Operand("spec", x, spec, shape),
        Operand("w_spec", w, w_spec),
        Operand("bias", bias, derive=lambda before: rows_of(before[1])),
    ]
    if out_spec is None and not is_split(*operands):
        _check_lengths(x.shape, w.shape, None if bias is None else bias.shape)
        return _LOCAL(x, w, bias)
    return run_layer(_WHERE, lambda x, w, b: _plan(x, w, b, out_spec), operands)


def _check(x: Any, w: Any, bias: Any) -> None:
    """Raise unless the operands have the dimensions of a linear layer. Lengths are checked where layouts are known."""
    for name, array, ndim, need in (
        ("x", x, None, "shape (..., in_features)"),
        ("w", w, 2, "shape (out_features, in_features)"),
        ("bias", bias, 1, "shape (out_features,), or None"),
    ):
        if array is None and name == "bias":
            continue
        found = getattr(array, "ndim", None)
        if found is None or (found != ndim if ndim else found < 1):
            mend = f"np.asarray({name}) of these dimensions"
            raise SpecError.at(_WHERE, argument=name, got=describe(array), need=need, mend=mend)


def _check_features(plan: _SpecPlan, x: Any, w: Any) -> None:
    """Raise unless the blocks have the same features."""
    joined = plan.gather is not None and plan.gather[1] == x.ndim - 1
    if joined or x.shape[-1] == w.shape[1]:
        return
    raise SpecError.at(
        _WHERE,
        argument="x",
        got=f"a block of shape {list(x.shape)}, for a block of w of shape {list(w.shape)}",
        need=f"{w.shape[1]} features in the last dimension, split as the columns of w",
        mend="spmd.pslice(x, axis_name, axis=-1, tiled=True) takes this worker's features of a whole x, and "
        "spmd.all_gather(x, axis_name, axis=-1, tiled=True) joins those of all workers",
    )


def _check_lengths(x: Shape, w: Shape, bias: Shape | None) -> None:
    """Raise unless these shapes of the whole arrays fit."""
    argument = "w" if w[1] != x[-1] else "bias" if bias not in (None, w[:1]) else None
    if argument is not None:
        shapes = f"x of shape {list(x)}, w of {list(w)}" + ("" if bias is None else f", bias of {list(bias)}")
        raise SpecError.at(
            _WHERE,
            argument=argument,
            got=shapes,
            need="w of shape (out_features, in_features) for x of shape (..., in_features), a bias of (out_features,)",
            mend="w.T for weights of shape (in_features, out_features)",
        )


def rows_of(layout: Layout | None) -> Layout:
    """The layout of a bias: as the first dimension of the weights; on a grid on the first workers of each row."""
    assert layout is not None
    shape, cuts = layout.shape[:1], layout.cuts[:1]
    if layout.spec is not None:
        return Layout(shape, spec_of_names(layout.spec.dims[:1]), layout.axes, cuts)
    first = [layout.holders[row, *[0] * (len(layout.shape) - 1)][0] for row in range(len(cuts[0]))]
    return Layout.grid(shape, (len(first),), layout.axes, first, cuts)


@lru_cache(maxsize=1024)
def _plan(x: Layout, w: Layout, bias: Layout | None, out_spec: Spec | None) -> LayerPlan:
    _check_lengths(x.shape, w.shape, None if bias is None else bias.shape)
    return (_GridPlan if lie_on_grid(x, w, out_spec) else _LayoutPlan)(x, w, bias, out_spec)


class _SpecPlan(NamedTuple):
    """By specs alone, whatever the lengths: products with w = P(r, c) of blocks of P(..., c), and sums over c.

    rows: the axes of r, along which x is varied. columns: those of c, over which the products are summed. batch: the
    axes that split the other dimensions of x for the products. gather: axes and the dimension of x that they split,
    which is joined first. scatter: axes, and the dimension of the result that they split, to which sums are scattered.
    collect: axes and the dimension of the result that they split, which is joined last.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    gather: tuple[tuple[str, ...], int] | None = None
    scatter: tuple[tuple[str, ...], int] | None = None
    collect: tuple[tuple[str, ...], int] | None = None

    def __call__(self, x: Any, w: Any, bias: Any) -> Any:
        rows, columns, batch, gather, scatter, collect = self
        lib = local(x, "linear")
        if gather is not None:  # its adjoint sums over its axes
            x = all_gather(x, gather[0], axis=gather[1], tiled=True)
        x, w = varied(x, rows), varied(w, batch)
        bias = varied(bias, batch if scatter is None else (*batch, *scatter[0]))
        if scatter is None and not columns:
            y = lib.linear(x, w, bias)
        else:
            y = lib.linear(x, w)
            if scatter is not None:
                y = psum_scatter(y, scatter[0], scatter_dimension=scatter[1], tiled=True)
            y = lib.with_bias(psum(y, columns) if columns else y, bias)
        return y if collect is None else all_gather(y, collect[0], axis=collect[1], tiled=True, to="invariant")


_LOCAL = _SpecPlan()


@lru_cache(maxsize=1024)
def _plan_by_specs(
    spec: Spec | None, w_spec: Spec | None, out_spec: Spec | None, ndim: int, axes: tuple[tuple[str, int], ...]
) -> _SpecPlan | None:
    """The plan of a layer on blocks that needs no lengths; None where some would have to be laid out anew."""
    if isinstance(w_spec, Layout) and w_spec.spec is not None:
        w_spec.check(dict(axes), _WHERE, "w_spec", 2)
        balanced = Layout(w_spec.shape, w_spec.spec, w_spec.axes)
        if isinstance(out_spec, P) and names_of(out_spec, ndim)[-1] and balanced.cuts[0] != w_spec.cuts[0]:
            return None  # features of the result in balanced blocks, of rows that are in others
        w_spec = w_spec.spec
    for argument, each, n in (("spec", spec, ndim), ("w_spec", w_spec, 2), ("out_spec", out_spec, ndim)):
        if isinstance(each, P):
            each.check(dict(axes), _WHERE, argument, n)
        elif each is not None:
            return None
    spec, w_spec = spec or P(), w_spec or P()
    rows, columns = names_of(w_spec, 2)
    given = names_of(spec, ndim)
    inputs = [*(tuple(n for n in each if n not in rows) for each in given[:-1]), columns]
    differ = [d for d in range(ndim) if given[d] != inputs[d]]
    taken = {*rows, *columns}
    joined = len(differ) == 1 and not inputs[differ[0]] and {*given[differ[0]]} <= {*rows}
    gather = (given[differ[0]], differ[0]) if joined else None
    if (differ and not joined) or any(taken.intersection(each) for each in inputs[:-1]):
        return None
    batch = tuple(n for each in inputs[:-1] for n in each)
    varied_over = rows if gather is None else tuple(n for n in rows if n not in gather[0])
    plan = _SpecPlan(varied_over, columns, batch, gather)
    natural = [*inputs[:-1], rows]
    target = natural if out_spec is None else names_of(out_spec, ndim)
    differ = [d for d in range(ndim) if natural[d] != target[d]]
    joined = [d for d in differ if not target[d]]
    split = [d for d in differ if target[d]]
    if len(joined) > 1 or len(split) > 1:
        return None
    if joined:
        plan = plan._replace(collect=(natural[joined[0]], joined[0]))
    if split:
        (d,) = split
        if natural[d] or d == ndim - 1 or not {*target[d]} <= {*columns}:
            return None
        summed_over = tuple(n for n in columns if n not in target[d])
        plan = plan._replace(columns=summed_over, scatter=(target[d], d))
    return plan


@dataclass(frozen=True)
class _LayoutPlan:
    """By specs, where blocks are laid out anew: x to P(..., c), products with w = P(r, c), sums over c."""

    x: Layout
    w: Layout
    bias: Layout | None
    out_spec: Spec | None

    @cached_property
    def _axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that split the rows and the columns of w."""
        rows, columns = self.w.spec.dims
        return rows, columns

    @cached_property
    def inputs(self) -> Layout:
        """The layout of x for the products: features as the columns of w, the rest as it lies, without w's axes."""
        rows, columns = self._axes
        taken = {*rows, *columns}
        names = [tuple(n for n in each if n not in taken) for each in self.x.spec.dims[:-1]]
        kept = [
            cut if own == each else None for cut, own, each in zip(self.x.cuts, self.x.spec.dims, names, strict=False)
        ]
        return Layout(self.x.shape, spec_of_names([*names, columns]), self.x.axes, [*kept, self.w.cuts[1]])

    @cached_property
    def products(self) -> Layout:
        """The layout of the sums of the products."""
        batch = self.inputs.spec.dims[:-1]
        shape = (*self.x.shape[:-1], self.w.shape[0])
        cuts = [*self.inputs.cuts[:-1], self.w.cuts[0]]
        return Layout(shape, spec_of_names([*batch, self._axes[0]]), self.x.axes, cuts)

    @cached_property
    def out(self) -> Layout:
        return checked_target(_WHERE, "out_spec", self.out_spec, self.products.shape, self.products, self.x.axes)

    def __call__(self, x: Any, w: Any, bias: Any) -> Any:
        rows, columns = self._axes
        batch = tuple(n for names in self.inputs.spec.dims[:-1] for n in names)
        lib = local(x, "linear")
        y = lib.linear(gathered(x, self.x, self.inputs, rows), varied(w, batch))
        y = summed(y, columns, self.products, self.out)
        if bias is None:
            return y
        assert self.bias is not None
        last = self.out.spec.dims[-1]
        bias = relaid(bias, self.bias, Layout(self.bias.shape, spec_of_names([last]), self.x.axes, self.out.cuts[-1:]))
        return lib.with_bias(y, varied(bias, [n for names in self.out.spec.dims[:-1] for n in names]))


@dataclass(frozen=True)
class _GridPlan:
    """On some of the workers: x to the workers of the blocks of w, products there, added where the result lies."""

    x: Layout
    w: Layout
    bias: Layout | None
    out_spec: Spec | None

    @cached_property
    def weights(self) -> Layout:
        """w on the first workers that hold its blocks."""
        rows, columns = map(len, self.w.cuts)
        owners = [self.w.holders[r, c][0] for r in range(rows) for c in range(columns)]
        return Layout.grid(self.w.shape, (rows, columns), self.w.axes, owners, self.w.cuts)

    @cached_property
    def _layouts(self) -> tuple[Layout, Layout]:
        """The layouts of x and of the products on the workers of w; both are whole in their first dimensions."""
        rows, columns = map(len, self.w.cuts)
        by_row = self.weights.workers or ()
        by_column = [worker for column in range(columns) for worker in by_row[column::columns]]
        *batch, _ = self.x.shape
        whole, cuts, axes = (1,) * len(batch), [(n,) for n in batch], self.x.axes
        inputs = Layout.grid(self.x.shape, (*whole, columns, rows), axes, by_column, [*cuts, self.w.cuts[1]])
        shape = (*batch, self.w.shape[0])
        return inputs, Layout.grid(shape, (*whole, rows, columns), axes, by_row, [*cuts, self.w.cuts[0]])

    @cached_property
    def out(self) -> Layout:
        products = self._layouts[1]
        first = products.workers[:: len(self.w.cuts[1])] if products.workers else ()
        grid = [len(c) for c in products.cuts]
        natural = Layout.grid(products.shape, grid, self.x.axes, first, products.cuts)
        return checked_target(_WHERE, "out_spec", self.out_spec, products.shape, natural, self.x.axes)

    def __call__(self, x: Any, w: Any, bias: Any) -> Any:
        inputs, products = self._layouts
        x, w = relaid(x, self.x, inputs), relaid(w, self.w, self.weights)
        lib = local(x, "linear")
        y = lib.linear(x, w)
        if bias is not None:
            assert self.bias is not None
            lies = rows_of(self.weights)
            bias = relaid(bias, self.bias, lies)
            # A sum of no entries: every worker's result depends on the bias, so that all take part in its adjoint.
            y = lib.with_bias(y, bias if lies.positions(here(_WHERE).index) is not None else namespace(bias).sum(bias))
        return accumulate(y, products, self.out)
