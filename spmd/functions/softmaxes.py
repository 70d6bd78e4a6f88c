"""Softmax, log-softmax, softmin and logsumexp, also along an axis that is split over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.autodiff.transforms import stop_gradient
from spmd.errors import SpecError, describe
from spmd.frontends import frontend
from spmd.functions.arguments import cast, layer, normalized_axes, normalized_axis, require_varying
from spmd.functions.global_operands import first_global, refuse_axis_names, run_over
from spmd.functions.layouts import dtype_of, floating_array, floating_operand
from spmd.functions.local import local, namespace
from spmd.functions.local.softmaxes import logsumexp_over, logsumexp_rows, row_max
from spmd.functions.losses import check_block
from spmd.functions.movement import fetched, varied
from spmd.functions.planned import Operand, run_layer
from spmd.global_ops.call import global_value, names_of
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Box, Layout, Spec
from spmd.mesh import here
from spmd.operators.reduce import AxisName, in_dtype, pmax, psum
from spmd.tracebacks import api_boundary

__all__ = ["log_softmax", "logsumexp", "softmax", "softmin"]


@api_boundary
@layer
def softmax(x: Tree, axis: int = -1, *, dtype: Any = None, spec: Spec | None = None) -> Tree:
    """exp(x) / sum(exp(x)) along an axis, without overflow. Arrays of NumPy, CuPy or PyTorch.

    x: floating, of any shape with dimensions. dtype: to which x is converted before; None: that of x.
    spec: in a body, how the whole x is split, of which x is this worker's block: a spec, a `Layout` or a `Grid`. The
    result lies as x does. None: x is whole. Outside of bodies global arrays have their layouts.

    Cost: nothing where the axis is not split. Else an all-reduce of the largest entry of each row and one of a sum,
    and backward one of a sum; on a grid an exchange of both between the workers that share rows, and backward another.
    Adjoint of the derivative: y * (g - sum(g * y)). A row whose largest entry is infinite is NaN, as in torch.
    Raises SpecError and LayoutError for arguments that do not fit, StateError where spec names an axis along which all
    workers have the same. Source: as torch.nn.functional.softmax; Milakov, Gimelshein, "Online normalizer calculation
    for softmax", 2018.

        >>> with spmd.Mesh(x=2):  # the classes are split
        ...     y = spmd.map(lambda x: spmd.functions.softmax(x, spec=P(None, "x")), P(None, "x"), P(None, "x"))
        ...     y(np.log([[1.0, 2.0, 5.0]])).numpy()
        array([[0.125, 0.25 , 0.625]])
    """
    return _run("spmd.functions.softmax", "softmax", x, axis, dtype, spec)


@api_boundary
@layer
def log_softmax(x: Tree, axis: int = -1, *, dtype: Any = None, spec: Spec | None = None) -> Tree:
    """x - log(sum(exp(x))) along an axis, without overflow: the logarithm of `softmax`.

    Arguments, cost and errors as `softmax`. Adjoint of the derivative: g - softmax(x) * sum(g).

        >>> np.exp(spmd.functions.log_softmax(np.log([1.0, 2.0, 5.0])))
        array([0.125, 0.25 , 0.625])
    """
    return _run("spmd.functions.log_softmax", "log_softmax", x, axis, dtype, spec)


@api_boundary
@layer
def softmin(x: Tree, axis: int = -1, *, dtype: Any = None, spec: Spec | None = None) -> Tree:
    """`softmax` of -x: arguments, cost and errors are the same.

    >>> spmd.functions.softmin(-np.log([1.0, 2.0, 5.0]))
    array([0.125, 0.25 , 0.625])
    """
    return _run("spmd.functions.softmin", "softmax", x, axis, dtype, spec, sign=-1)


def _run(where: str, kind: str, x: Any, axis: int, dtype: Any, spec: Spec | None, sign: int = 1) -> Any:
    x = floating_operand(where, "x", x if dtype is None else _converted(where, x, dtype))
    x = x if sign > 0 else -x
    if not x.ndim and frontend(x) is not None and axis in (0, -1):  # torch takes a number as a row
        return namespace(x).reshape(_run(where, kind, namespace(x).reshape(x, (1,)), 0, None, None), ())
    axis = normalized_axis(where, x, axis)
    if spec is not None:
        return _plan(where, kind, axis, check_block(where, x, spec), x.ndim)(x)
    if global_value(x) is None:
        return getattr(local(x, "softmaxes"), kind)(x, axis)
    return run_layer(where, lambda lies: _plan(where, kind, axis, lies, x.ndim), [Operand("spec", x)])


def _converted(where: str, x: Any, dtype: Any) -> Any:
    """x in a dtype; that of a tensor may be one of torch's."""
    try:
        return in_dtype(x if hasattr(x, "dtype") else np.asarray(x), dtype)
    except TypeError:
        mend = "dtype=np.float32"
        raise SpecError.at(where, argument="dtype", got=describe(dtype), need="a dtype", mend=mend) from None


@lru_cache(maxsize=1024)
def _plan(where: str, kind: str, axis: int, lies: Spec, ndim: int) -> _Plan:
    layout = lies if isinstance(lies, Layout) else None
    spec = lies if layout is None else layout.spec
    names = () if spec is None else tuple(names_of(spec, ndim)[axis])
    return _Plan(where, kind, axis, names, layout)


@dataclass(frozen=True)
class _Plan:
    """Softmax of blocks along an axis. names: what splits it. x: the layout, where one is given."""

    where: str
    kind: str
    axis: int
    names: tuple[str, ...]
    x: Layout | None

    @property
    def out(self) -> Any:
        return self.x

    def __call__(self, x: Any) -> Any:
        on_grid = self.x is not None and self.x.spec is None and len(self.x.cuts[self.axis]) > 1
        if not (self.names or on_grid):
            return getattr(local(x, "softmaxes"), self.kind)(x, self.axis)
        lib, xp, dtype = local(x, "softmaxes"), namespace(x), dtype_of(x)
        rows = in_dtype(xp.moveaxis(x, self.axis, -1), accurate(dtype))
        with np.errstate(invalid="ignore", divide="ignore"):  # of rows without a finite entry
            top, shares, total = self._on_grid(lib, xp, rows) if on_grid else self._by_spec(lib, xp, rows)
            total = xp.expand_dims(total, axis=-1)
            y = shares / total if self.kind == "softmax" else rows - xp.expand_dims(top, axis=-1) - xp.log(total)
        return xp.moveaxis(in_dtype(y, dtype), -1, self.axis)

    def _by_spec(self, lib: Any, xp: Any, x: Any) -> tuple[Any, Any, Any]:
        """The largest entry of each row, exp(x - largest), and the sum of it over the row."""
        names = require_varying(self.where, x, self.names, "spec")
        top = pmax(lib.top(x), names)
        shares = lib.exp_from(x, top)
        return top, shares, varied(psum(xp.sum(shares, axis=-1), names), names)

    def _on_grid(self, lib: Any, xp: Any, x: Any) -> tuple[Any, Any, Any]:
        """The same where blocks lie on some of the workers, by one exchange of what each block has."""
        own = lib.top(x)
        base = xp.where(xp.isinf(own), xp.zeros_like(own), own)
        packed = xp.stack([own, base, xp.sum(lib.exp_from(x, base), axis=-1)], axis=-1)
        packed = xp.expand_dims(packed, axis=self.axis)
        table, boxes = self._table
        if table.positions(here(self.where).index) is None:
            return own, x, own + xp.sum(fetched(packed[(slice(0, 0),) * packed.ndim], table, boxes))
        packed = fetched(packed, table, boxes)
        packed = xp.moveaxis(packed, self.axis, -2)
        detached = local(x, "normalisation").detached
        tops, bases = detached(packed[..., 0]), detached(packed[..., 1])
        top = lib.top(tops)
        total = xp.sum(packed[..., 2] * lib.exp_from(bases, top), axis=-1)
        return top, lib.exp_from(x, top), total

    @cached_property
    def _table(self) -> tuple[Layout, list[Box]]:
        """The layout of three numbers for each row of each block, and the box of it that each worker needs."""
        x, axis = self.x, self.axis
        assert x is not None
        cuts = [(1,) * len(cut) if d == axis else cut for d, cut in enumerate(x.cuts)]
        shape = (*map(sum, cuts), 3)
        table = Layout.grid(shape, [*map(len, cuts), 1], x.axes, x.workers, [*cuts, (3,)])
        whole = 0, len(x.cuts[axis])
        holds = [table.positions(w) is not None for w in range(table.size)]
        boxes = [(*b[:axis], whole, *b[axis + 1 :]) if h else b for b, h in zip(table.boxes, holds, strict=True)]
        return table, boxes


@api_boundary
def logsumexp(
    x, axis: int | Sequence[int] | None = None, b=None, keepdims: bool = False, *, axis_name: AxisName | None = None
):
    """log(sum(b * exp(x))) over some axes (None: all), without overflow. As `jax.nn.logsumexp`.

    x: floating. b: weights, which broadcast to the shape of x; the sum must not be negative. axis_name: the axes of the
    mesh that split these axes of x; then the sum is over the workers too, by two small all-reduces, and the result is
    Invariant there. Outside of bodies global arrays have their layouts, and no axis_name. Where every entry
    is -inf the result is -inf, and the gradient 0.
    Adjoint of the derivative: g * b * exp(x - y). Raises StateError for an x that does not vary over axis_name.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: spmd.functions.logsumexp(x, axis_name="x"), P("x"), P())
        ...     np.exp(f(np.log([1.0, 2.0, 3.0])).numpy()).round(6)
        np.float64(6.0)
    """
    where = "spmd.functions.logsumexp"
    x = floating_array(where, "x", x)
    axes = normalized_axes(where, x, axis)
    if b is not None:
        b = floating_array(where, "b", b)
        if len(b.shape) > x.ndim or any(n not in (1, m) for n, m in zip(b.shape[::-1], x.shape[::-1], strict=False)):
            need = f"a shape that broadcasts to {list(x.shape)}"
            raise SpecError.at(where, argument="b", got=describe(b), need=need, mend="reshape it")
    refuse_axis_names(where, (x, b), axis_name=axis_name)
    if first_global(x, b) is not None:
        return run_over(where, _LogSumExp(axes, bool(keepdims)), (x, b), axes, bool(keepdims))
    rest_shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    last_axes = tuple(range(x.ndim - len(axes), x.ndim))
    count = prod(x.shape[a] for a in axes)

    def as_rows(a):
        return np.reshape(np.moveaxis(a, axes, last_axes), (*rest_shape, count))

    if b is not None:
        b = as_rows(np.broadcast_to(b, x.shape))
    x = as_rows(x)
    if b is not None:
        y = _weighted_logsumexp(x, b, axis_name, where)
    else:
        y = logsumexp_rows(x) if axis_name is None else cast(logsumexp_over(x, axis_name, where)[1], x.dtype)
    return np.expand_dims(y, axes) if keepdims else y


@dataclass(frozen=True)
class _LogSumExp:
    """`logsumexp` of blocks."""

    axes: tuple[int, ...]
    keepdims: bool

    def __call__(self, names: tuple[str, ...] | None, x: Any, b: Any) -> Any:
        return logsumexp(x, self.axes, b, self.keepdims, axis_name=names)


def _weighted_logsumexp(x, b, axis_name: AxisName | None, where: str):
    """log(sum(b * exp(x))) along the last axis. Entries of weight 0 do not count, even if they are NaN."""
    x = np.where(b == 0, np.zeros_like(x) - np.inf, x)
    top = row_max(stop_gradient(x))
    if axis_name is not None:
        require_varying(where, x, axis_name)
        top = pmax(top, axis_name)
    top = np.where(np.isinf(top), np.zeros_like(top), top)
    total = np.sum(b * np.exp(x - np.expand_dims(top, -1)), axis=-1)
    return top + np.log(total if axis_name is None else psum(total, axis_name))
