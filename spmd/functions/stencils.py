"""Stencils on one array: weighted sums of entries at fixed offsets."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.signatures import Tree
from spmd.autodiff.tracer import Array
from spmd.errors import SpecError, describe
from spmd.functions.arguments import as_array, cast
from spmd.functions.window_arguments import paddings
from spmd.kernels.windows import reach, stencil_adjoint_padding
from spmd.operators.stencil import checked_offsets
from spmd.tracebacks import api_boundary

__all__ = ["stencil"]


def _stencil_transpose(g, weights, *, shape, offsets, padding) -> Any:
    """The adjoint in x: the stencil of the negated offsets."""
    if g.size == 0:
        return np.zeros_like(g, shape=shape)
    negated = tuple(tuple(-i for i in o) for o in offsets)
    return _stencil(g, weights, offsets=negated, padding=stencil_adjoint_padding(offsets, padding))


def _to_x(g, _ans, _x, w, *, offsets, padding) -> Any:
    return _stencil_transpose(g, w, shape=_x.shape, offsets=offsets, padding=padding)


def _to_weights(g, _ans, x, _w, *, offsets, padding) -> Any:
    return _stencil_weights(g, x, offsets=offsets, padding=padding)


@primitive("stencil", _to_x, _to_weights, early=True)
def _stencil(x, w, *, offsets, padding) -> Any:
    return kernels.of(x).stencil(x, offsets, w, padding)


@primitive(
    "stencil_weights",
    lambda h, _ans, _g, x, *, offsets, padding: _stencil(x, h, offsets=offsets, padding=padding),
    lambda h, _ans, g, _x, *, offsets, padding: _stencil_transpose(
        g, h, shape=_x.shape, offsets=offsets, padding=padding
    ),
)
def _stencil_weights(g, x, *, offsets, padding) -> Any:
    return kernels.of(g).stencil_weights(g, x, offsets, padding)


@api_boundary
def stencil(x: Tree, offsets: Any, weights: Any, padding: Any = 0) -> Tree:
    """y[i] = sum over k of weights[k] * x[i + offsets[k]], for each i for which all offsets lie inside x.

    x: floating or complex; the offsets are along its last dimensions. offsets: tuples of an int per dimension. weights:
    as many numbers, or an array of them, which may be differentiated; y has the dtype of a product of both.
    padding: zeros around x, an int, an int or a pair (low, high) for each of the offsets' dimensions, or "SAME": y then
    has the shape of x. With 0, y is shorter by the reach of the offsets.

    Linear in x and in the weights. Adjoint in x: the stencil of the negated offsets.
    For blocks of an array: `spmd.stencil`, or `spmd.halo_exchange` before. Raises SpecError and LayoutError where the
    arguments do not fit.

        >>> spmd.functions.stencil(np.array([0.0, 1.0, 4.0, 9.0, 16.0]), [(-1,), (0,), (1,)], [1.0, -2.0, 1.0])
        array([2., 2., 2.])
    """
    where = "spmd.functions.stencil"
    x = as_array(where, "x", x, "fc", "floating or complex numbers", "x.astype(float)")
    offset_table = checked_offsets(where, offsets)
    dims = len(offset_table[0])
    if not 1 <= dims <= 3 or dims > x.ndim:
        raise SpecError.at(
            where,
            argument="offsets",
            got=f"offsets of {dims} ints for {describe(x)}",
            need="one to three ints each, not more than x has dimensions",
            mend="an offset has an int for each of the last dimensions of x",
        )
    if isinstance(weights, Array) or hasattr(weights, "dtype"):
        weight_array = weights
    else:  # Python numbers, which do not widen x
        weight_array = np.asarray(weights, np.result_type(x.dtype, 1j) if np.iscomplexobj(weights) else x.dtype)
    if weight_array.shape != (len(offset_table),):
        raise SpecError.at(
            where,
            argument="weights",
            got=describe(weights),
            need=f"{len(offset_table)} numbers, one for each offset",
            mend="for weights that vary from place to place add up products: "
            "sum(w * spmd.functions.stencil(x, [o], [1]) for w, o in zip(weights, offsets))",
        )
    if isinstance(padding, str) and padding.upper() == "SAME":
        padding_pairs = reach(offset_table)
    else:
        padding_pairs = paddings(where, padding, x.shape[x.ndim - dims :], (1,) * dims, (1,) * dims, (1,) * dims)
    dtype = np.result_type(x.dtype, weight_array.dtype)
    x = cast(x, dtype)
    return _stencil(x, weight_array, offsets=offset_table, padding=padding_pairs)
