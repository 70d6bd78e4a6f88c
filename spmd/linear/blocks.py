"""Block operators: operators stacked vertically, horizontally, and on a diagonal."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from spmd.autodiff import tree
from spmd.errors import LayoutError, describe
from spmd.linear.operator import LinearOperator
from spmd.linear.space import check_fit, dtype_of
from spmd.operators.algebra import added

__all__ = ["BlockDiagonal", "HStack", "VStack"]


class _Blocks(LinearOperator):
    """Several operators as one. Both `H` and `T` are the `_transposed` class of those of the operators."""

    __slots__ = ("operators",)
    operators: tuple[LinearOperator, ...]
    _transposed: ClassVar[type[_Blocks]]

    def __init__(self, *operators: LinearOperator):
        if not operators or not all(isinstance(op, LinearOperator) for op in operators):
            raise LayoutError.at(
                f"spmd.linear.{type(self).__name__}",
                argument="operators",
                got=", ".join(describe(op) for op in operators) or "none",
                need="operators on global arrays, at least one",
                mend="spmd.linear_operator(f, in_specs, out_specs, shape=...) makes one",
            )
        self.operators = operators

    @property
    def H(self) -> LinearOperator:
        return self._transposed(*(op.H for op in self.operators))

    @property
    def T(self) -> LinearOperator:
        return self._transposed(*(op.T for op in self.operators))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Blocks) and (type(self), self.operators) == (type(other), other.operators)

    def __hash__(self) -> int:
        return hash((type(self), self.operators))

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.operators))})"

    def _map_parameters(self, f):
        return type(self)(*(op._map_parameters(f) for op in self.operators))

    @property
    def _parameters(self):
        return [p for op in self.operators for p in op._parameters]


class VStack(_Blocks):
    """Operators stacked vertically: x -> (A x, B x, ...). The adjoint is `HStack` of the adjoints.

    Raises LayoutError where the domains differ.

        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear_operator(lambda x: 2 * x, P("x"), P("x"), shape=3)
        ...     y = spmd.linear.VStack(A, 5 * A)(np.ones(3))
        >>> [part.tolist() for part in y]
        [[2.0, 2.0, 2.0], [10.0, 10.0, 10.0]]
    """

    __slots__ = ()

    def __init__(self, *operators: LinearOperator):
        super().__init__(*operators)
        for op in operators[1:]:
            check_fit("below", op.domain, operators[0].domain, "B that takes")

    @property
    def domain(self) -> Any:
        return self.operators[0].domain

    @property
    def range(self) -> Any:
        return tuple(op.range for op in self.operators)

    def _apply(self, x):
        return tuple(op(x) for op in self.operators)


class HStack(_Blocks):
    """Operators stacked horizontally: (x, y, ...) -> A x + B y + .... The adjoint is `VStack` of the adjoints.

    Raises LayoutError where the ranges differ.

        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear_operator(lambda x: 2 * x, P("x"), P("x"), shape=3)
        ...     spmd.linear.HStack(A, 5 * A)((np.ones(3), np.ones(3)))
        PartitionedArray([12., 12., 12.], dtype=float64, spec=P('x'))
    """

    __slots__ = ()

    def __init__(self, *operators: LinearOperator):
        super().__init__(*operators)
        for op in operators[1:]:
            check_fit("beside", op.range, operators[0].range, "B that gives")

    @property
    def domain(self) -> Any:
        return tuple(op.domain for op in self.operators)

    @property
    def range(self) -> Any:
        first = self.operators[0].range
        dtype = np.result_type(*(dtype_of(op.range) for op in self.operators))
        return tree.map(lambda s: s.of(dtype), first)

    def _apply(self, x):
        range, total = self.range, None
        for op, part in zip(self.operators, x, strict=True):
            y = tree.map(lambda a, s: s.convert(a), op(part), range)
            total = y if total is None else tree.map(added, total, y)
        return total


class BlockDiagonal(_Blocks):
    """Operators on a diagonal: (x, y, ...) -> (A x, B y, ...). The adjoint is that of the adjoints.

    >>> with spmd.Mesh(x=2):
    ...     A = spmd.linear_operator(lambda x: 2 * x, P("x"), P("x"), shape=3)
    ...     y = spmd.linear.BlockDiagonal(A, 5 * A)((np.ones(3), np.ones(3)))
    >>> [part.tolist() for part in y]
    [[2.0, 2.0, 2.0], [10.0, 10.0, 10.0]]
    """

    __slots__ = ()

    @property
    def domain(self) -> Any:
        return tuple(op.domain for op in self.operators)

    @property
    def range(self) -> Any:
        return tuple(op.range for op in self.operators)

    def _apply(self, x):
        return tuple(op(part) for op, part in zip(self.operators, x, strict=True))


VStack._transposed, HStack._transposed, BlockDiagonal._transposed = HStack, VStack, BlockDiagonal
