"""Iterative solvers of linear systems on global arrays. They gather nothing.

Vectors are `PartitionedArray`s, or pytrees of them. Besides the communication of the operator, every iteration sends a
few sums of one number (`spmd.inner`, which counts copies once). The rest works on each worker's own blocks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import transforms, tree
from spmd.autodiff.tracer import value_of
from spmd.errors import DifferentiationError, LayoutError, describe
from spmd.inner_product import inner, norm
from spmd.lazy_imports import absent
from spmd.linear.operator import LinearOperator
from spmd.linear.space import Space, admit_element, check_fit, conj_tree, size_of, space_of
from spmd.map_arguments import move_to_layout
from spmd.tracebacks import api_boundary

__all__ = ["LeastSquares", "Solution", "cg", "lsqr"]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.

    @api_boundary
    def __getattr__(name: str) -> Any:
        raise absent(__name__, name)


from spmd.autodiff import transform_arguments


@dataclass(frozen=True)
class Solution:
    """The result of a solver.

    x: the solution, laid out as x0, or else as b. iterations: their number. residual: |b - A x|, as the iteration
    computes it. converged: whether the tolerance was reached. reason: why the iteration ended, in words. residuals: the
    residual before the first iteration and after each.
    """

    x: Any
    iterations: int
    residual: float
    converged: bool
    reason: str
    residuals: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class LeastSquares(Solution):
    """The result of `lsqr`.

    normal_residual: |A* r - damp² x|, zero at the solution. norm, condition: estimates of the Frobenius norm and of the
    condition number of A; with damp, of A with the rows damp I below it.
    """

    normal_residual: float
    norm: float
    condition: float


def _axpy(a: Any, x: Any, y: Any) -> Any:
    """a x + y. `a` is a Python number, which keeps the dtypes."""
    return tree.map(lambda u, v: a * u + v, x, y)


def _product(x: Any, y: Any) -> Any:
    """<x, y> as a Python number."""
    return np.asarray(inner(x, y)).item()


def _norm(x: Any) -> float:
    return float(norm(x))


def _in_layout_of(x: Any, like: Any) -> Any:
    """A solution in the layout of the vector that was given; as it is where that was bare."""

    def one(a, given):
        have, want = value_of(a), value_of(given)
        if not isinstance(want, PartitionedArray) or want.layout == have.layout:
            return a
        return move_to_layout(a, have.layout, want.layout, have.mesh)

    return tree.map(one, x, like)


def _limits(where: str, maxiter: int | None, **given: float) -> None:
    if maxiter is not None and not (isinstance(maxiter, int | np.integer) and maxiter >= 0):
        raise LayoutError.at(
            where, argument="maxiter", got=describe(maxiter), need="a number of iterations", mend="maxiter=100"
        )
    for name, value in given.items():
        if not isinstance(value, int | float | np.number) or not value >= 0:
            raise LayoutError.at(
                where, argument=name, got=describe(value), need="a number, not negative", mend=f"{name}=1e-6"
            )


class _Function:
    """A function that is applied as an operator. It must not bring derivatives of its own."""

    def __init__(self, where: str, f: Callable):
        self.where, self.f = where, f

    @classmethod
    def of(cls, where: str, f: Callable) -> _Function:
        return f if isinstance(f, cls) else cls(where, f)

    def __call__(self, x: Any) -> Any:
        y = self.f(x)
        if (
            transform_arguments.innermost(tree.leaves(x)) is None
            and transform_arguments.innermost(tree.leaves(y)) is not None
        ):
            raise DifferentiationError.at(
                self.where,
                argument="A",
                got="a function that closes over a differentiated array",
                need="an operator that knows what it is differentiated with respect to",
                mend="spmd.linear_operator(f, in_specs, out_specs, params=theta, shape=...)",
            )
        return y


def _widened(space: Any, b: Any) -> Any:
    """A space with dtypes that can also represent those of b."""
    kind = np.result_type(np.float16, *(getattr(value_of(v), "dtype", float) for v in tree.leaves(b)))
    return tree.map(lambda s: s.of(kind), space)


# Conjugate gradients


@api_boundary
def cg(
    A: LinearOperator | Callable,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-6,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: LinearOperator | Callable | None = None,
    callback: Callable[[Any], Any] | None = None,
) -> Solution:
    """Solve A x = b for a Hermitian positive definite A, by conjugate gradients.

    A: a `LinearOperator`, or a function of an array (or tree of arrays) in the layout of b. b: `PartitionedArray`, bare
    array, or a tree of them. x0: the initial guess; zero by default. The iteration ends when |b - A x| <= max(rtol |b|,
    atol), or after maxiter iterations (by default 10 times the number of unknowns). M: an approximate inverse of A,
    Hermitian positive definite. callback: called with x after each iteration.

    Each iteration applies A once and sends two sums of one number, with M three. x is laid out as x0, or else as b.
    x is differentiable with respect to b and to the params of A, to any order: the derivative solves another system
    with A, assuming that A is Hermitian. Iterations and residuals are plain numbers. Hestenes, Stiefel, "Methods of
    conjugate gradients for solving linear systems", 1952. Raises LayoutError if A is not square or b does not fit;
    DifferentiationError if a plain function closes over a differentiated array.
    """
    where = "spmd.solvers.cg"
    _limits(where, maxiter, rtol=rtol, atol=atol)
    # The solution does not depend on x0 and M.
    x0 = None if x0 is None else tree.map(value_of, x0)
    M = M._with(value_of) if isinstance(M, LinearOperator) else M
    given = b if x0 is None else x0
    A, b, x0 = _system(where, A, b, x0)
    options = {"rtol": rtol, "atol": atol, "maxiter": maxiter}
    tape = transform_arguments.innermost([*tree.leaves(b), *_parameters(A)])
    if tape is not None:
        return _differentiated(where, tape, A, b, x0, given, M, callback, options)
    found = _cg(A, b, x0, M, callback, **options)
    return replace(found, x=_in_layout_of(found.x, given))


def _parameters(A: Any) -> list:
    return A._parameters if isinstance(A, LinearOperator) else []


def _lowered(A: Any, tape: Any) -> Any:
    return A._with(lambda p: transform_arguments.lower(p, tape)) if isinstance(A, LinearOperator) else A


def _system(where: str, A: Any, b: Any, x0: Any) -> tuple[Any, Any, Any]:
    """A, b and x0 in the layout in which A works."""
    if isinstance(A, LinearOperator):
        check_fit("=", A.range, A.domain, "a matrix that is not square: A gives")
        space = _widened(A.domain, b)
    elif callable(A) and not hasattr(A, "shape"):
        arrays = [value_of(v) for v in tree.leaves(b)]
        if not all(isinstance(v, PartitionedArray) for v in arrays):
            raise LayoutError.at(
                where,
                argument="b",
                got=", ".join(describe(v) for v in arrays),
                need="partitioned arrays, where A is a function",
                mend="spmd.put(b, spec, mesh), or A=spmd.linear_operator(f, in_specs, out_specs, shape=...)",
            )
        space, A = tree.map(lambda v: space_of(value_of(v)).of(np.float16), b), _Function.of(where, A)
    else:
        raise LayoutError.at(
            where,
            argument="A",
            got=describe(A),
            need="a linear operator on global arrays, or a function",
            mend="spmd.linear.from_scipy(A, spec, mesh=mesh) makes one of a matrix",
        )
    b = admit_element(where, "b", b, space)
    return A, b, None if x0 is None else admit_element(where, "x0", x0, space)


def _cg(A, b, x0, M, callback, *, rtol, atol, maxiter) -> Solution:
    """The iteration on bare vectors in the layout of A."""
    maxiter = 10 * sum(v.size for v in tree.leaves(b)) if maxiter is None else maxiter
    precondition = M if M is not None else lambda r: r
    bound = max(rtol * _norm(b), atol)
    x = tree.map(np.zeros_like, b) if x0 is None else x0
    r = b if x0 is None else _axpy(-1, A(x), b)
    p: Any = None
    before = 0.0
    square = _product(r, r).real
    residuals = [math.sqrt(square)]
    reason = ""
    while not residuals[-1] <= bound:
        if len(residuals) > maxiter:
            reason = f"no convergence in {maxiter} iterations"
            break
        z = precondition(r)
        rho = square if M is None else _product(r, z).real
        if not rho > 0:
            reason = "the preconditioner is not positive definite" if math.isfinite(rho) else "numbers are not finite"
            break
        p = z if p is None else _axpy(rho / before, p, z)
        q = A(p)
        curvature = _product(p, q).real
        if not curvature > 0:
            indefinite = math.isfinite(curvature)
            reason = "A is not positive definite" if indefinite else "numbers are not finite"
            break
        x = _axpy(rho / curvature, p, x)
        r = _axpy(-rho / curvature, q, r)
        before = rho
        square = _product(r, r).real
        residuals.append(math.sqrt(square))
        if callback is not None:
            callback(x)
    reached = f"the residual is below {bound:.3g}"
    return Solution(x, len(residuals) - 1, residuals[-1], not reason, reason or reached, tuple(residuals))


def _differentiated(where, tape, A, b, x0, given, M, callback, options) -> Solution:
    """The solution as a node of the tape.

    With x = solution and r = b - A x, whose value is small, the derivative of x is A^-1 dr at fixed x: A x is recorded
    on the tape for the parameters of A, and another solve gives the rest.
    """
    below = _lowered(A, tape)
    found = cg(below, tree.map(lambda v: transform_arguments.lower(v, tape), b), x0, M=M, callback=callback, **options)
    below, x, _ = _system(where, below, found.x, None)
    xs, treedef = tree.flatten(x)
    residual = tree.leaves(_axpy(-1, A(x), b))

    def pull(gs):
        cotangent = tree.unflatten(
            treedef, [np.zeros_like(value_of(x)) if g is None else g for g, x in zip(gs, xs, strict=True)]
        )
        solved = cg(below, conj_tree(cotangent), M=M, **options)
        if not solved.converged:
            warnings.warn(f"{where}: the derivative is not exact: {solved.reason}", RuntimeWarning, stacklevel=2)
        return tree.leaves(conj_tree(solved.x))

    traced = transforms.joint(where, tape, residual, xs, pull)
    return replace(found, x=_in_layout_of(tree.unflatten(treedef, traced), given))


# Least squares


@api_boundary
def lsqr(
    A: LinearOperator,
    b: Any,
    x0: Any = None,
    *,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    maxiter: int | None = None,
    callback: Callable[[Any], Any] | None = None,
) -> LeastSquares:
    """The x that minimises |A x - b|² + damp² |x - x0|², by Golub-Kahan bidiagonalisation.

    A: a `LinearOperator` of any shape. b: an array of its range, partitioned or bare, or a tree of them. x0: the
    initial guess. With zero, the default, and damp=0 the result is the solution of least norm, even if A is
    rank-deficient. The iteration ends when A x = b is solved: |r| <= btol |b| + atol |A| |x|; when the least-squares
    problem is solved: |A* r| <= atol |A| |r|; when the estimate of the condition number exceeds conlim (0: no limit);
    or after maxiter iterations (by default twice the number of unknowns). callback: called with x after each iteration.

    Each iteration applies A and A.H once and sends four sums of one number. x is laid out as x0, or else as the domain
    of A. Paige, Saunders, "LSQR: an algorithm for sparse linear equations and sparse least squares", ACM TOMS 8, 1982.
    Raises LayoutError if b does not fit, DifferentiationError if A or b is differentiated.
    """
    where = "spmd.solvers.lsqr"
    _limits(where, maxiter, damp=damp, atol=atol, btol=btol, conlim=conlim)
    if not isinstance(A, LinearOperator):
        raise LayoutError.at(
            where,
            argument="A",
            got=describe(A),
            need="a linear operator on global arrays: its adjoint is needed",
            mend="spmd.linear_operator(f, in_specs, out_specs, shape=...)",
        )
    if transform_arguments.innermost([*tree.leaves(b), *_parameters(A), *tree.leaves(x0)]) is not None:
        raise DifferentiationError.at(
            where,
            got="a differentiated system",
            need="numbers: LSQR has no derivative rule",
            mend="spmd.solvers.cg(A.H @ A, A.H(b)), which has one; or spmd.stop_gradient(b)",
        )
    b = admit_element(where, "b", b, _widened(tree.map(lambda s: s.of(A.dtype), A.range), b))
    domain = _widened(tree.map(lambda s: s.of(A.dtype), A.domain), b)
    start = None if x0 is None else admit_element(where, "x0", x0, domain)
    maxiter = 2 * size_of(domain) if maxiter is None else maxiter
    least = float(np.finfo(np.result_type(*(v.dtype for v in tree.leaves(b)))).eps)
    found = _lsqr(A, b, start, domain, float(damp), max(atol, least), max(btol, least), conlim, maxiter, callback)
    return found if x0 is None else replace(found, x=_in_layout_of(found.x, x0))


def _unit(x: Any) -> tuple[float, Any]:
    """The norm of x, and x divided by it; zero stays zero."""
    size = _norm(x)
    return size, tree.map(lambda u: u / size, x) if size > 0 else x


def _lsqr(A, b, start, domain, damp, atol, btol, conlim, maxiter, callback) -> LeastSquares:
    """The iteration, as in the paper: A V = U B, B lower bidiagonal with diagonal alpha and beta below it."""
    adjoint = A.H
    size_b = _norm(b)
    beta, u = _unit(b if start is None else _axpy(-1, A(start), b))
    change = tree.map(Space.zeros, domain)  # what is added to x0
    alpha, v = _unit(adjoint(u)) if beta > 0 else (0.0, change)
    # rho_bar and phi_bar are the last diagonal entry and the last right-hand side of the rotated system.
    w, rho_bar, phi_bar = v, alpha, beta
    squares, inverse_squares, damped, size_a = alpha**2, 0.0, 0.0, alpha
    residuals, normal, reason, converged = [beta], alpha * beta, "", True
    if beta <= btol * size_b:
        reason = "the system is solved"
    elif normal == 0:
        reason = "the least-squares problem is solved"
    elif not math.isfinite(normal):
        reason, converged = "numbers are not finite", False
    while not reason:
        if len(residuals) > maxiter:
            reason, converged = f"no convergence in {maxiter} iterations", False
            break
        beta, u = _unit(_axpy(-alpha, u, A(v)))
        squares += beta**2 + damp**2
        alpha, v = _unit(_axpy(-beta, v, adjoint(u))) if beta > 0 else (0.0, v)
        # One rotation takes the damping out of the last row, another the entry below the diagonal.
        rho_damped = math.hypot(rho_bar, damp)
        psi, phi_bar = damp / rho_damped * phi_bar, rho_bar / rho_damped * phi_bar
        rho = math.hypot(rho_damped, beta)
        cos, sin = rho_damped / rho, beta / rho
        theta, rho_bar = sin * alpha, -cos * alpha
        phi, phi_bar = cos * phi_bar, sin * phi_bar
        inverse_squares += (_norm(w) / rho) ** 2
        change = _axpy(phi / rho, w, change)
        w = _axpy(-theta / rho, w, v)
        damped += psi**2
        total = math.hypot(phi_bar, math.sqrt(damped))
        size, size_a = _norm(change), math.sqrt(squares)
        normal = alpha * abs(sin * phi)
        residuals.append(math.sqrt(max(total**2 - (damp * size) ** 2, 0.0)) if damp else total)
        squares += alpha**2
        if callback is not None:
            callback(change if start is None else _axpy(1, start, change))
        if not math.isfinite(total):
            reason, converged = "numbers are not finite", False
        elif total <= btol * size_b + atol * size_a * size:
            reason = "the system is solved"
        elif normal <= atol * size_a * total:
            reason = "the least-squares problem is solved"
        elif conlim and size_a * math.sqrt(inverse_squares) >= conlim:
            reason, converged = f"the condition is beyond {conlim:.3g}", False
    x = change if start is None else _axpy(1, start, change)
    condition = size_a * math.sqrt(inverse_squares)
    done = len(residuals) - 1
    return LeastSquares(x, done, residuals[-1], converged, reason, tuple(residuals), normal, size_a, condition)
