"""Operators on global arrays: sums, products and multiples of them, the identity and zero."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from spmd.autodiff import tree
from spmd.errors import LayoutError
from spmd.linear.space import admit_element, check_fit, dtype_of, flat, kind_of, show_spaces, size_of, unflat
from spmd.mesh import Mesh
from spmd.operators.algebra import Terms, added, formula
from spmd.operators.base import Linear, Term, collected
from spmd.tracebacks import api_boundary

__all__ = ["LinearOperator", "identity", "zero"]

_DENSE_MAX = 4096
"""The most rows or columns of a dense matrix without force=True."""


class LinearOperator(Linear):
    """A linear map from global arrays to global arrays; made by `spmd.linear_operator`.

    domain, range: the `Space` of its arguments and results, or trees of them. shape: (entries of the range, entries of
    the domain). dtype: of its matrix.

        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear_operator(lambda x: spmd.shift(x, "x", wrap=False), P("x"), P("x"), shape=4)
        ...     B = A.H @ A + 2 * spmd.linear.identity(A.domain)
        ...     B(np.ones(4))
        PartitionedArray([3., 3., 2., 2.], dtype=float64, spec=P('x'))
        >>> B.shape, B.dtype, B.H == B
        ((4, 4), dtype('float64'), True)
    """

    __slots__ = ()

    if TYPE_CHECKING:  # What the algebra of `Linear` makes of these operators.

        @property
        def H(self) -> LinearOperator: ...
        @property
        def T(self) -> LinearOperator: ...
        @overload
        def __matmul__(self, other: LinearOperator) -> LinearOperator: ...
        @overload
        def __matmul__(self, other: Any) -> Any: ...
        def __matmul__(self, other: Any) -> Any: ...
        def __add__(self, other: LinearOperator) -> LinearOperator: ...
        def __sub__(self, other: LinearOperator) -> LinearOperator: ...
        def __mul__(self, number: complex) -> LinearOperator: ...
        def __rmul__(self, number: complex) -> LinearOperator: ...
        def __truediv__(self, number: complex) -> LinearOperator: ...
        def __neg__(self) -> LinearOperator: ...

    @property
    def domain(self) -> Any:
        raise NotImplementedError

    @property
    def range(self) -> Any:
        raise NotImplementedError

    def _apply(self, x: Any) -> Any:
        """The image of an element of the domain."""
        raise NotImplementedError

    def _map_parameters(self, f: Callable[[Any], Any]) -> LinearOperator:
        """The same operator with f applied to each array among its parameters."""
        raise NotImplementedError

    @property
    def _parameters(self) -> list:
        """The arrays among the parameters."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        return size_of(self.range), size_of(self.domain)

    @property
    def dtype(self) -> np.dtype:
        return np.result_type(dtype_of(self.domain), dtype_of(self.range))

    @property
    def mesh(self) -> Mesh:
        return tree.leaves(self.domain)[0].mesh

    @property
    def _ends(self):
        return self.domain, self.range

    def _ends_with(self, other: Linear):
        return tuple(tree.map(lambda s, t: s.of(t.dtype), a, b) for a, b in zip(self._ends, other._ends, strict=True))

    def _make(self, terms: Iterable[Term], ends) -> LinearOperator:
        return _normal_form(terms, *ends)

    def _meet(self, other: Linear, sign: str) -> None:
        if not isinstance(other, LinearOperator):
            raise LayoutError.at(
                f"A {sign} B",
                argument="B",
                got=f"{other!r}, an operator of bodies",
                need="an operator on global arrays",
                mend="spmd.linear_operator(B, in_specs, out_specs, shape=...) makes B one",
            )
        if sign == "@":
            check_fit(sign, other.range, self.domain, "B that gives")
        else:
            check_fit(sign, other.domain, self.domain, "B that takes")
            check_fit(sign, other.range, self.range, "B that gives")

    @api_boundary
    def __call__(self, x: Any) -> Any:
        """The operator applied to an array, partitioned or bare, or to a tree of them.

        An operator on real arrays maps the real and the imaginary part of a complex one.
        """
        where = str(self)
        if dtype_of(self.domain).kind != "c" and any(kind_of(a) == "c" for a in tree.leaves(x)):
            parts = (tree.map(part, x) for part in (np.real, np.imag))
            real, imag = (self._apply(admit_element(where, "x", p, self.domain)) for p in parts)
            return tree.map(lambda a, b: a + 1j * b, real, imag)
        return self._apply(admit_element(where, "x", x, self.domain))

    def __str__(self) -> str:
        return formula(self.terms, str)

    def __repr__(self) -> str:
        return f"<LinearOperator {self}: {show_spaces(self.domain)} -> {show_spaces(self.range)}>"

    @api_boundary
    def dense(self, *, force: bool = False) -> np.ndarray:
        """The matrix, of shape (m, n), on every process, for small sizes: one application per column.

        Rows and columns are the entries of the arrays in C order; arrays of a tree follow each other. force: allow more
        than 4096 rows or columns. Collective under MPI.
        """
        m, n = self.shape
        if max(m, n) > _DENSE_MAX and not force:
            raise LayoutError.at(
                f"({self}).dense",
                got=f"an operator of {m} x {n}",
                need=f"at most {_DENSE_MAX} rows and columns",
                mend="dense(force=True), if the matrix is wanted",
            )
        matrix = np.zeros((m, n), self.dtype)
        for k in range(n):
            unit = np.zeros(n, dtype_of(self.domain))
            unit[k] = 1
            matrix[:, k] = flat(self(unflat(unit, self.domain)))
        return matrix

    @api_boundary
    def scipy(self) -> Any:
        """The operator as a `scipy.sparse.linalg.LinearOperator` on flat NumPy vectors, for SciPy's solvers.

        Every application gathers its result. Under MPI all processes run the same solver together.
        """
        linalg = importlib.import_module("scipy.sparse.linalg")
        adjoint = self.H

        def applied(op: LinearOperator):
            def apply(v: np.ndarray) -> np.ndarray:
                v = np.ravel(v)
                if v.dtype.kind == "c" and dtype_of(op.domain).kind != "c":
                    return apply(np.real(v)) + 1j * apply(np.imag(v))
                return flat(op(unflat(v.astype(dtype_of(op.domain), copy=False), op.domain)))

            return apply

        return linalg.LinearOperator(self.shape, applied(self), applied(adjoint), dtype=self.dtype)


# Sums, products and multiples


class _Expression(LinearOperator, Terms):
    """A sum of multiples of products. A sum without terms is zero, a product without factors the identity."""

    __slots__ = ("_domain", "_range")

    def __init__(self, terms: tuple[Term, ...], domain: Any, range: Any):
        self._terms, self._domain, self._range = terms, domain, range

    __repr__ = LinearOperator.__repr__

    @property
    def domain(self) -> Any:
        return self._domain

    @property
    def range(self) -> Any:
        return self._range

    def _apply(self, x: Any) -> Any:
        if not self._terms:
            return tree.map(lambda s: s.zeros(), self._range)
        total: Any = None
        for c, factors in self._terms:
            y = x
            for factor in reversed(factors):
                y = factor(y)
            y = tree.map(lambda a, s, c=c: s.convert(a if c == 1 else c * a), y, self._range)
            total = y if total is None else tree.map(added, total, y)
        return total

    def _map_parameters(self, f):
        terms = tuple((c, tuple(factor._map_parameters(f) for factor in factors)) for c, factors in self._terms)  # type: ignore[attr-defined]
        return _Expression(terms, self._domain, self._range)

    @property
    def _parameters(self):
        return [p for _, factors in self._terms for factor in factors for p in factor._parameters]  # type: ignore[attr-defined]


def _normal_form(terms: Iterable[Term], domain: Any, range: Any) -> LinearOperator:
    """The operator on global arrays with this normal form."""
    nonzero = tuple((c, factors) for c, factors in collected(terms) if c != 0)
    match nonzero:
        case ((1, (LinearOperator() as one,)),):
            return one
    factors = [f for _, fs in nonzero for f in fs]
    starts = [dtype_of(fs[-1].domain if fs else domain).kind for _, fs in nonzero]  # type: ignore[attr-defined]
    is_complex = any(isinstance(c, complex) for c, _ in nonzero)
    kinds = {dtype_of(space).kind for f in factors for space in f._ends}
    if not any(dtype_of(f.domain).kind != dtype_of(f.range).kind for f in factors):  # type: ignore[attr-defined]
        # All real or all complex: otherwise the adjoint of a product would not be the product of the adjoints.
        if is_complex or "c" in kinds:
            domain, range = (tree.map(lambda s: s.of(np.complex64), space) for space in (domain, range))
    elif is_complex or set(starts) != {dtype_of(domain).kind}:
        raise LayoutError.at(
            "the algebra of operators",
            got=formula(nonzero, str),
            need="real multiples and sums of one kind where a factor maps between real and complex arrays: it is "
            "linear over the real numbers only",
            mend="make its body one on complex arrays, with dtype=complex",
        )
    return _Expression(nonzero, domain, range)


@api_boundary
def identity(domain: Any) -> LinearOperator:
    """The identity of a space: `identity(A.domain)`.

    >>> with spmd.Mesh(x=2):
    ...     A = spmd.linear_operator(lambda x: spmd.shift(x, "x"), P("x"), P("x"), shape=4)
    ...     spmd.linear.identity(A.domain) @ A == A
    True
    """
    return _normal_form([(1, ())], domain, domain)


@api_boundary
def zero(domain: Any, range: Any) -> LinearOperator:
    """The zero operator from one space to another: `zero(A.domain, A.range) + A == A`.

    >>> with spmd.Mesh(x=2):
    ...     A = spmd.linear_operator(lambda x: spmd.psum(x, "x"), P("x"), P(), shape=4)
    ...     spmd.linear.zero(A.domain, A.range)(np.ones(4))
    ...     spmd.linear.zero(A.domain, A.range) + A == A
    PartitionedArray([0., 0.], dtype=float64, spec=P(None))
    True
    """
    return _normal_form([], domain, range)
