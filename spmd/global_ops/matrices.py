"""Functions of two dimensions of global arrays, of the matrices in the last two above all.

Where matrices must be whole, what splits them splits another dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff.primitive import name_of
from spmd.global_ops.along import moved_spec
from spmd.global_ops.call import as_spec, global_of, global_value, layout_by, names_of, on_blocks, spec_of
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import Layout
from spmd.layout_rules import Rule
from spmd.mesh import WORKER
from spmd.operators.splitting import normal_axis

__all__: list[str] = []

implements(np.linalg.matmul, rule=Rule.PRODUCT)(np.matmul)
implements(np.linalg.matrix_transpose, rule=Rule.PERMUTED)(np.matrix_transpose)


def _of_lines(fun: Any, x: Any, dims: tuple[int, ...], added: int, **options: Any) -> Any:
    """fun(x, **options), which reduces dimensions and appends `added` others. These are made whole."""
    value = global_of(x)
    spec = moved_spec(as_spec(x), value.shape, dims)
    if spec is None:
        return whole(fun, (x,), options)
    kept = [names for d, names in enumerate(names_of(spec, value.ndim)) if d not in dims]
    static = (fun, tuple(options.items()))
    return on_blocks(name_of(fun), _applied, static, [x], [spec], spec_of([*kept, *[()] * added]), value.mesh)


def _applied(fun: Any, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return lambda x: fun(x, **dict(options))


@implements(np.diagonal, rule=Rule.MATRICES)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    dims = tuple(normal_axis("np.diagonal", name, d, a.ndim) for name, d in (("axis1", axis1), ("axis2", axis2)))
    return _of_lines(np.diagonal, a, dims, 1, offset=offset, axis1=axis1, axis2=axis2)


@implements(np.trace, rule=Rule.MATRICES)
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Any:
    dims = tuple(normal_axis("np.trace", name, d, a.ndim) for name, d in (("axis1", axis1), ("axis2", axis2)))
    return _of_lines(np.trace, a, dims, 0, offset=offset, axis1=axis1, axis2=axis2, dtype=dtype)


@implements(np.linalg.diagonal, rule=Rule.MATRICES)
def diagonals(x: Any, /, *, offset: int = 0) -> Any:
    return np.diagonal(x, offset, -2, -1)


@implements(np.linalg.trace, rule=Rule.MATRICES)
def traces(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    return np.trace(x, offset, -2, -1, dtype)


@implements(np.linalg.matrix_norm, rule=Rule.MATRICES)
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    if ord in (None, "fro"):
        return np.linalg.norm(x, axis=(-2, -1), keepdims=keepdims)
    norms = _of_lines(np.linalg.matrix_norm, x, (x.ndim - 2, x.ndim - 1), 0, ord=ord)
    return np.expand_dims(norms, (-2, -1)) if keepdims else norms


@implements(np.linalg.solve, rule=Rule.MATRICES)
def solve(a: Any, b: Any) -> Any:
    """Systems in stacks: those of a worker are solved there."""
    value, n = global_value(a), len(np.shape(a))
    if value is None or n < 3 or np.shape(a)[:-2] != np.shape(b)[:-2]:
        return whole(np.linalg.solve, (a, b), {})
    spec = moved_spec(as_spec(a), value.shape, (n - 2, n - 1))
    assert spec is not None
    stack = spec_of(names_of(spec, n)[:-2])
    return on_blocks("np.linalg.solve", _solving, (), [a, b], [spec, _of_stack(spec, np.shape(b))], stack, value.mesh)


def _of_stack(spec: Any, shape: tuple[int, ...]) -> Any:
    """The layout of matrices of a shape whose stack lies as a spec says."""
    stack = spec_of(names_of(spec, len(shape))[:-2])
    return Layout(shape, stack, spec.axes, [*spec.cuts[:-2], None, None]) if isinstance(spec, Layout) else stack


def _solving() -> Callable[..., Any]:
    return np.linalg.solve


def _triangular(fun: Any, lower: bool) -> None:
    @implements(fun, rule=Rule.KEPT)
    def handler(m: Any, k: int = 0) -> Any:
        value = global_value(m)
        if value is None or value.ndim < 2:
            return whole(fun, (m, k), {})
        spec = as_spec(m)
        layout = layout_by(spec, value)
        return on_blocks(f"np.{fun.__name__}", _keeping, (layout, int(k), lower), [m], [spec], spec, value.mesh)


def _keeping(layout: Layout, k: int, lower: bool) -> Callable[..., Any]:
    def body(x: Any) -> Any:
        worker = WORKER.get()
        assert worker is not None
        rows, cols = (np.arange(*ends) for ends in layout.boxes[worker.index][-2:])
        beside = cols - rows[:, None]
        return np.where(beside <= k if lower else beside >= k, x, np.zeros_like(x))

    return body


_triangular(np.tril, lower=True)
_triangular(np.triu, lower=False)
