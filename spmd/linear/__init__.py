"""Linear operators on global arrays, with the algebra of `spmd.operators.algebra`.

    A = spmd.linear_operator(blur, P("x"), P("x"), shape=(1000,))
    y = A @ x;  z = A.H @ y;  B = 2 * A.H @ A + identity(A.domain)

The adjoint belongs to the inner product <x, y> = sum(conj(x) * y) over the entries of the global arrays (`spmd.inner`).
An operator maps one array, or a pytree of arrays, to another. `A.domain` and `A.range` are the same trees with a
`Space` for each array. `A(x)` is differentiable, and gathers nothing.
"""

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes
from spmd.linear.blocks import BlockDiagonal, HStack, VStack
from spmd.linear.mapped import linear_operator
from spmd.linear.operator import LinearOperator, identity, zero
from spmd.linear.scipy_operators import from_scipy
from spmd.linear.space import Space

__all__ = [
    "BlockDiagonal",
    "HStack",
    "LinearOperator",
    "Space",
    "VStack",
    "from_scipy",
    "identity",
    "linear_operator",
    "zero",
]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
