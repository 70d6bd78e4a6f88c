"""SciPy's linear operators as operators on global arrays."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from spmd.autodiff.custom import custom_vjp
from spmd.errors import LayoutError
from spmd.layout import Spec
from spmd.linear.operator import LinearOperator
from spmd.linear.space import Space, flat, unflat
from spmd.linear.views import Base, View
from spmd.placement import mesh_for
from spmd.tracebacks import api_boundary

__all__ = ["from_scipy"]


class _SciPy(Base):
    """A matrix or a SciPy operator. Every process applies it to the whole vector."""

    def __init__(self, op: Any, domain: Space, range: Space):
        linalg = importlib.import_module("scipy.sparse.linalg")
        self.op, self.linear = op, linalg.aslinearoperator(op)
        self.domain, self.range = domain, range
        self.name, self.parameters = type(op).__name__, []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SciPy) or self.op is not other.op:
            return False
        return (self.domain, self.range) == (other.domain, other.range)

    def __hash__(self) -> int:
        return hash(id(self.op))

    def forward(self, x):
        return self._with_vjp(lambda v: self.linear.matvec(v), self.range, lambda g: self.transposed(g))(x)

    def transposed(self, y):
        rmatvec = lambda v: np.conj(self.linear.rmatvec(np.conj(v)))
        return self._with_vjp(rmatvec, self.domain, lambda g: self.forward(g))(y)

    def _with_vjp(self, f, space: Space, back):
        with_rule = custom_vjp(lambda x: unflat(np.asarray(f(flat(x))), space))
        with_rule.defvjp(lambda x: (with_rule(x), None), lambda _, g: (back(g),))
        return with_rule


@api_boundary
def from_scipy(
    op: Any, in_spec: Spec, out_spec: Spec | None = None, *, shape: Any = None, out_shape: Any = None, mesh: Any = None
) -> LinearOperator:
    """A matrix or `scipy.sparse.linalg.LinearOperator` as an operator on global arrays.

    op: of shape (m, n); A.H needs its adjoint (rmatvec). in_spec, out_spec: the layouts of argument and result;
    out_spec defaults to in_spec. shape, out_shape: of the arrays; the defaults are (n,), and (m,) or, for a square op,
    shape. Every process assembles the argument and applies `op` to all of it: for small operators, and for comparison.

        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear.from_scipy(np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]), P("x"), P())
        ...     A(np.ones(3))
        ...     A.H(np.ones(2))
        PartitionedArray([6., 1.], dtype=float64, spec=P(None))
        PartitionedArray([1., 3., 3.], dtype=float64, spec=P('x'))
    """
    where = "spmd.linear.from_scipy"
    mesh = mesh_for(mesh, where)
    m, n = op.shape
    dtype = np.result_type(op.dtype, np.float32)
    out_shape = shape if out_shape is None and m == n else out_shape
    out_spec = in_spec if out_spec is None else out_spec
    spaces = []
    for argument, user_shape, spec, size in (("shape", shape, in_spec, n), ("out_shape", out_shape, out_spec, m)):
        array_shape = (size,) if user_shape is None else tuple(user_shape)
        if math.prod(array_shape) != size:
            raise LayoutError.at(
                where,
                argument=argument,
                got=str(array_shape),
                need=f"a shape of {size} entries, for an operator of {m} x {n}",
                mend=f"({size},), or leave it out",
            )
        spec.check(mesh.axes, where, argument, len(array_shape))
        spaces.append(Space(dtype, mesh.layout(array_shape, spec, where, argument), mesh))
    return View(_SciPy(op, *spaces))
