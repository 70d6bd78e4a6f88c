"""Dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import SpecError, describe
from spmd.frontends import frontend
from spmd.functions.arguments import normalized_axes
from spmd.functions.layouts import floating_operand, layout_of_operand
from spmd.functions.local import namespace
from spmd.functions.norm_plans import params_of
from spmd.global_ops.call import global_value
from spmd.grid import Grid
from spmd.layout import Layout, Spec
from spmd.mesh import here
from spmd.random import distributions, layouts
from spmd.tracebacks import api_boundary

__all__ = ["alpha_dropout", "dropout"]

_SATURATION = -1.7580993408473766
"""What SELU gives for large negative numbers: -scale alpha."""


@api_boundary
def dropout(x: Tree, rate: float, key: Any, spec: Spec | None = None, *, broadcast_dims: Sequence[int] = ()) -> Tree:
    """x with each entry set to 0 with probability rate, and the others divided by 1 - rate.

    x: floating, of any shape; a block or an array of NumPy, CuPy or PyTorch, or a global array. rate: a number from 0
    to 1; with 1 all entries are 0. key: of `spmd.random`; another one for each use.
    spec: in a body, how the array of which x is a block is split: a spec, or a `Layout` on some of the workers. Which
    entries are dropped depends on the key and on their indices in the whole array, so it is the same on every mesh.
    broadcast_dims: dimensions along which entries are dropped together, as the positions of a channel.
    Linear in x, and its own adjoint. Cost: no bytes; with a spec the workers exchange the shapes of their blocks.
    Raises SpecError in a body for an x that varies, without a spec: all workers would drop the same entries of their
    blocks. Source: Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, "Dropout", JMLR 15, 2014.

        >>> with spmd.Mesh(x=3):
        ...     spmd.functions.dropout(spmd.ones(8, spec=P("x")), 0.5, spmd.random.key(1))
        PartitionedArray([0., 0., 0., 0., 0., 0., 2., 0.], dtype=float64, spec=P('x'))
        >>> spmd.functions.dropout(np.ones(8), 0.5, spmd.random.key(1))
        array([0., 0., 0., 0., 0., 0., 2., 0.])
    """
    where = "spmd.functions.dropout"
    x = floating_operand(where, "x", x)
    check_rate(where, "rate", rate)
    return dropped(where, x, float(rate), key, spec, broadcast_dims)


@api_boundary
def alpha_dropout(
    x: Tree, rate: float, key: Any, spec: Spec | None = None, *, broadcast_dims: Sequence[int] = ()
) -> Tree:
    """Dropout that keeps mean 0 and variance 1, for SELU: entries become -1.758 with probability rate; then a x + b.

    Arguments, cost and errors as `dropout`. Affine in x. Adjoint: a g where the entry is kept.
    Source: Klambauer, Unterthiner, Mayr, Hochreiter, "Self-normalizing neural networks", 2017.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.zeros(6, spec=P("x"))
        ...     spmd.functions.alpha_dropout(x, 0.5, spmd.random.key(0)).numpy().round(2)
        array([ 0.78, -0.78, -0.78, -0.78, -0.78,  0.78])
    """
    where = "spmd.functions.alpha_dropout"
    x = floating_operand(where, "x", x)
    check_rate(where, "rate", rate)
    if rate == 1:
        return x * 0
    keep = _kept(where, x, float(rate), key, spec, broadcast_dims)
    scale = (1 - rate) ** -0.5 * (1 + rate * _SATURATION**2) ** -0.5
    return (_where(x, keep, _SATURATION) - rate * _SATURATION) * scale


def check_rate(where: str, argument: str, rate: Any) -> None:
    """Raise unless rate is a probability."""
    if not isinstance(rate, int | float | np.floating) or not 0 <= rate <= 1:
        need = "the probability to drop an entry, from 0 to 1"
        raise SpecError.at(where, argument=argument, got=describe(rate), need=need, mend=f"{argument}=0.1")


def dropped(where: str, x: Any, rate: float, key: Any, spec: Any, broadcast_dims: Sequence[int] = ()) -> Any:
    """x after dropout, for a key and a rate that are right."""
    if rate == 1:
        return x * 0
    return _where(x, _kept(where, x, rate, key, spec, broadcast_dims), 0) * (1 / (1 - rate))


def _kept(where: str, x: Any, rate: float, key: Any, spec: Any, broadcast_dims: Sequence[int]) -> Any:
    """Which entries are kept; of length 1 along broadcast_dims."""
    value = global_value(x)
    if value is not None or isinstance(spec, Layout | Grid):
        layout = layout_of_operand(where, "spec", x, cast(Any, spec))
    else:
        layout = layouts.layout_of_block(where, x, spec)
    shape, mesh = tuple(x.shape) if layout is None else layout.shape, None if value is None else value.mesh
    together = normalized_axes(where, x, tuple(broadcast_dims))
    own: tuple[slice, ...] | None = None
    if together:
        dims = [d for d in range(x.ndim) if d not in together]
        shape = tuple(shape[d] for d in dims)
        if layout is not None and layout.spec is None:  # several workers may hold one entry: each draws all
            slices = layout.slices(here(where).index)
            own, layout = tuple(slices[d] for d in dims), None
        layout = None if layout is None else params_of(layout, dims)
    keep: Any = distributions.bernoulli(key, 1 - rate, shape, spec=layout, mesh=mesh)
    keep = keep if own is None else keep[own]
    return keep[tuple(None if d in together else slice(None) for d in range(x.ndim))] if together else keep


def _where(x: Any, keep: Any, other: float) -> Any:
    """x where entries are kept, and a number elsewhere."""
    library = frontend(x)
    if library is None:
        return np.where(keep, x, x.dtype.type(other))
    keep = keep if frontend(keep) is not None else np.array(keep)
    return library.where(keep, x, namespace(x).zeros_like(x) + other)
