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
from spmd.autodiff import transform_arguments, transforms, tree
from spmd.autodiff.staging.together import RECORDING
from spmd.autodiff.tracer import value_of
from spmd.errors import DifferentiationError, JitError, LayoutError, describe
from spmd.inner_product import inner, norm
from spmd.lazy_imports import lazy_attributes
from spmd.linear.operator import LinearOperator
from spmd.linear.space import Space, admit_element, check_fit, conj_tree, size_of, space_of
from spmd.map_arguments import move_to_layout
from spmd.tracebacks import api_boundary

__all__ = ["LeastSquares", "Solution", "cg", "lsqr"]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})


@dataclass(frozen=True)
class Solution:
    """The result of a solver.

    x: the solution, laid out as x0, or else as b. iterations: their number. residual: |b - A x|, as the iteration
    computes it. converged: whether the tolerance was reached. reason: why the iteration ended, in words. residuals: the
    residual before the first iteration and after each.

        >>> with spmd.Mesh(x=2):
        ...     result = spmd.solvers.cg(lambda x: 4 * x, spmd.ones(3, spec=P("x")))
        >>> result.iterations, result.converged, result.reason
        (1, True, 'the residual is below 1.73e-06')
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

        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear_operator(lambda x: 2 * x, P("x"), P("x"), shape=3)
        ...     result = spmd.solvers.lsqr(A, np.arange(3.0), damp=1.0)
        >>> result.iterations, result.reason
        (1, 'the least-squares problem is solved')
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


def _in_layout_of(x: Any, templates: Any) -> Any:
    """A solution in the layouts of the user's vectors; unchanged where these are bare."""

    def moved(a, template):
        value, target = value_of(a), value_of(template)
        if not isinstance(target, PartitionedArray) or target.layout == value.layout:
            return a
        return move_to_layout(a, value.layout, target.layout, value.mesh)

    return tree.map(moved, x, templates)


def _check_call(where: str, maxiter: int | None, **tolerances: float) -> None:
    """Raise for wrong limits, and within spmd.jit."""
    if RECORDING.get() is not None:
        raise JitError.at(
            where,
            got="a call within spmd.jit",
            need="a call that runs each time: it iterates until numbers say that it may end",
            mend="spmd.jit of the body of A; or a fixed number of iterations by spmd.fori_loop",
        )
    if maxiter is not None and not (isinstance(maxiter, int | np.integer) and maxiter >= 0):
        raise LayoutError.at(
            where, argument="maxiter", got=describe(maxiter), need="a number of iterations", mend="maxiter=100"
        )
    for name, value in tolerances.items():
        if not isinstance(value, int | float | np.number) or not value >= 0:
            raise LayoutError.at(
                where, argument=name, got=describe(value), need="a number, not negative", mend=f"{name}=1e-6"
            )


class _Function:
    """A function that is applied as an operator. It must not close over differentiated arrays."""

    def __init__(self, where: str, f: Callable):
        self.where, self.f = where, f

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


def _space_for(space: Any, b: Any) -> Any:
    """A space with dtypes that can also represent those of b."""
    dtype = np.result_type(np.float16, *(getattr(value_of(v), "dtype", float) for v in tree.leaves(b)))
    return tree.map(lambda s: s.of(dtype), space)


# Conjugate gradients


@api_boundary
def cg(
    A: LinearOperator | Callable[..., Any],
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-6,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: LinearOperator | Callable[..., Any] | None = None,
    callback: Callable[[Any], Any] | None = None,
) -> Solution:
    """Solve A x = b for a Hermitian positive definite A, by conjugate gradients.

    A: a `LinearOperator`, or a function of an array (or tree of arrays) in the layout of b. b: `PartitionedArray`, bare
    array, or a tree of them. x0: the initial guess; zero by default. The iteration ends when |b - A x| <= max(rtol |b|,
    atol), or after maxiter iterations (by default 10 times the number of unknowns). M: an approximate inverse of A,
    Hermitian positive definite. callback: called with x after each iteration.

    x is laid out as x0, or else as b. x is differentiable with respect to b and to the params of A, to any order: the
    derivative solves another system with A, assuming that A is Hermitian: `spmd.check_adjoint` of A finds whether it
    is, with A as its own adjoint. Before `spmd.check_grads` and for second derivatives take rtol=1e-10. Not within
    spmd.jit, but the body of A may be jitted. Iterations and residuals are plain numbers.
    Cost: each iteration applies A once and sends two sums of one number, with M three. Raises LayoutError if A is not
    square or b does not fit; DifferentiationError if a plain function closes over a differentiated array. Source:
    Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", 1952.

        >>> def laplacian(u):
        ...     return spmd.stencil(u, P("x"), [(-1,), (0,), (1,)], [-1.0, 2.0, -1.0])
        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear_operator(laplacian, P("x"), P("x"), shape=4)
        ...     spmd.solvers.cg(A, np.array([1.0, 0.0, 0.0, 1.0])).x
        ...     spmd.grad(lambda b: np.sum(spmd.solvers.cg(A, b).x))(spmd.ones(4, spec=P("x"))).numpy().round(6)
        PartitionedArray([1., 1., 1., 1.], dtype=float64, spec=P('x'))
        array([2., 3., 3., 2.])
    """
    where = "spmd.solvers.cg"
    _check_call(where, maxiter, rtol=rtol, atol=atol)
    # The solution does not depend on x0 and M.
    x0 = None if x0 is None else tree.map(value_of, x0)
    M = M._map_parameters(value_of) if isinstance(M, LinearOperator) else M
    templates = b if x0 is None else x0
    A, b, x0 = _system(where, A, b, x0)
    options = {"rtol": rtol, "atol": atol, "maxiter": maxiter}
    tape = transform_arguments.innermost([*tree.leaves(b), *_parameters(A)])
    if tape is not None:
        return _traced_cg(where, tape, A, b, x0, templates, M, callback, options)
    solution = _cg(A, b, x0, M, callback, **options)
    return replace(solution, x=_in_layout_of(solution.x, templates))


def _parameters(A: Any) -> list:
    return A._parameters if isinstance(A, LinearOperator) else []


def _lowered(A: Any, tape: Any) -> Any:
    return A._map_parameters(lambda p: transform_arguments.lower(p, tape)) if isinstance(A, LinearOperator) else A


def _system(where: str, A: Any, b: Any, x0: Any) -> tuple[Any, Any, Any]:
    """A, b and x0 in the layout in which A works."""
    if isinstance(A, LinearOperator):
        check_fit("=", A.range, A.domain, "a matrix that is not square: A gives")
        space = _space_for(A.domain, b)
    elif callable(A) and not hasattr(A, "shape"):
        values = [value_of(v) for v in tree.leaves(b)]
        if not all(isinstance(v, PartitionedArray) for v in values):
            raise LayoutError.at(
                where,
                argument="b",
                got=", ".join(describe(v) for v in values),
                need="partitioned arrays, where A is a function",
                mend="spmd.put(b, spec, mesh), or A=spmd.linear_operator(f, in_specs, out_specs, shape=...)",
            )
        space = tree.map(lambda v: space_of(value_of(v)).of(np.float16), b)
        A = A if isinstance(A, _Function) else _Function(where, A)
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
    previous_rho = 0.0
    residual_square = _product(r, r).real
    residuals = [math.sqrt(residual_square)]
    reason = ""
    while not residuals[-1] <= bound:
        if len(residuals) > maxiter:
            reason = f"no convergence in {maxiter} iterations"
            break
        z = precondition(r)
        rho = residual_square if M is None else _product(r, z).real
        if not rho > 0:
            reason = "the preconditioner is not positive definite" if math.isfinite(rho) else "numbers are not finite"
            break
        p = z if p is None else _axpy(rho / previous_rho, p, z)
        q = A(p)
        curvature = _product(p, q).real
        if not curvature > 0:
            indefinite = math.isfinite(curvature)
            reason = "A is not positive definite" if indefinite else "numbers are not finite"
            break
        x = _axpy(rho / curvature, p, x)
        r = _axpy(-rho / curvature, q, r)
        previous_rho = rho
        residual_square = _product(r, r).real
        residuals.append(math.sqrt(residual_square))
        if callback is not None:
            callback(x)
    reached = f"the residual is below {bound:.3g}"
    return Solution(x, len(residuals) - 1, residuals[-1], not reason, reason or reached, tuple(residuals))


def _traced_cg(where, tape, A, b, x0, templates, M, callback, options) -> Solution:
    """The solution as a node of the tape.

    The derivative of the solution x is A^-1 dr, where r = b - A x at fixed x. The tape records r, for b and the
    parameters of A, and another solve applies A^-1.
    """
    lowered = _lowered(A, tape)
    lowered_b = tree.map(lambda v: transform_arguments.lower(v, tape), b)
    solution = cg(lowered, lowered_b, x0, M=M, callback=callback, **options)
    lowered, x, _ = _system(where, lowered, solution.x, None)
    xs, treedef = tree.flatten(x)
    residual = tree.leaves(_axpy(-1, A(x), b))

    def pull(cotangents):
        cotangent = tree.unflatten(
            treedef, [np.zeros_like(value_of(x)) if g is None else g for g, x in zip(cotangents, xs, strict=True)]
        )
        adjoint = cg(lowered, conj_tree(cotangent), M=M, **options)
        if not adjoint.converged:
            warnings.warn(f"{where}: the derivative is not exact: {adjoint.reason}", RuntimeWarning, stacklevel=2)
        return tree.leaves(conj_tree(adjoint.x))

    traced = transforms.joint(where, tape, residual, xs, pull)
    return replace(solution, x=_in_layout_of(tree.unflatten(treedef, traced), templates))


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

    x is laid out as x0, or else as the domain of A. Cost: each iteration applies A and A.H once and sends four sums of
    one number. Raises LayoutError if b does not fit, DifferentiationError if A or b is differentiated. Source: Paige,
    Saunders, "LSQR: an algorithm for sparse linear equations and sparse least squares", ACM TOMS 8, 1982.

        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear.from_scipy(np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), P(), P("x"))
        ...     spmd.solvers.lsqr(A, np.array([1.0, 3.0, 5.0])).x.numpy().round(6)
        array([1., 2.])
    """
    where = "spmd.solvers.lsqr"
    _check_call(where, maxiter, damp=damp, atol=atol, btol=btol, conlim=conlim)
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
    b = admit_element(where, "b", b, _space_for(tree.map(lambda s: s.of(A.dtype), A.range), b))
    domain = _space_for(tree.map(lambda s: s.of(A.dtype), A.domain), b)
    start = None if x0 is None else admit_element(where, "x0", x0, domain)
    maxiter = 2 * size_of(domain) if maxiter is None else maxiter
    eps = float(np.finfo(np.result_type(*(v.dtype for v in tree.leaves(b)))).eps)
    solution = _lsqr(A, b, start, domain, float(damp), max(atol, eps), max(btol, eps), conlim, maxiter, callback)
    return solution if x0 is None else replace(solution, x=_in_layout_of(solution.x, x0))


def _normalized(x: Any) -> tuple[float, Any]:
    """The norm of x, and x divided by it; zero stays zero."""
    length = _norm(x)
    return length, tree.map(lambda u: u / length, x) if length > 0 else x


def _lsqr(A, b, start, domain, damp, atol, btol, conlim, maxiter, callback) -> LeastSquares:
    """The iteration, as in the paper: A V = U B, B lower bidiagonal with diagonal alpha and beta below it."""
    adjoint = A.H
    norm_b = _norm(b)
    beta, u = _normalized(b if start is None else _axpy(-1, A(start), b))
    change = tree.map(Space.zeros, domain)  # x - x0
    alpha, v = _normalized(adjoint(u)) if beta > 0 else (0.0, change)
    # rho_bar and phi_bar are the last diagonal entry and the last right-hand side of the rotated system.
    direction, rho_bar, phi_bar = v, alpha, beta
    squares, inverse_squares, damped_squares, norm_a = alpha**2, 0.0, 0.0, alpha
    residuals, normal_residual, reason, converged = [beta], alpha * beta, "", True
    if beta <= btol * norm_b:
        reason = "the system is solved"
    elif normal_residual == 0:
        reason = "the least-squares problem is solved"
    elif not math.isfinite(normal_residual):
        reason, converged = "numbers are not finite", False
    while not reason:
        if len(residuals) > maxiter:
            reason, converged = f"no convergence in {maxiter} iterations", False
            break
        beta, u = _normalized(_axpy(-alpha, u, A(v)))
        squares += beta**2 + damp**2
        alpha, v = _normalized(_axpy(-beta, v, adjoint(u))) if beta > 0 else (0.0, v)
        # One rotation takes the damping out of the last row, another the entry below the diagonal.
        rho_damped = math.hypot(rho_bar, damp)
        psi, phi_bar = damp / rho_damped * phi_bar, rho_bar / rho_damped * phi_bar
        rho = math.hypot(rho_damped, beta)
        cos, sin = rho_damped / rho, beta / rho
        theta, rho_bar = sin * alpha, -cos * alpha
        phi, phi_bar = cos * phi_bar, sin * phi_bar
        inverse_squares += (_norm(direction) / rho) ** 2
        change = _axpy(phi / rho, direction, change)
        direction = _axpy(-theta / rho, direction, v)
        damped_squares += psi**2
        residual = math.hypot(phi_bar, math.sqrt(damped_squares))
        change_norm, norm_a = _norm(change), math.sqrt(squares)
        normal_residual = alpha * abs(sin * phi)
        residuals.append(math.sqrt(max(residual**2 - (damp * change_norm) ** 2, 0.0)) if damp else residual)
        squares += alpha**2
        if callback is not None:
            callback(change if start is None else _axpy(1, start, change))
        if not math.isfinite(residual):
            reason, converged = "numbers are not finite", False
        elif residual <= btol * norm_b + atol * norm_a * change_norm:
            reason = "the system is solved"
        elif normal_residual <= atol * norm_a * residual:
            reason = "the least-squares problem is solved"
        elif conlim and norm_a * math.sqrt(inverse_squares) >= conlim:
            reason, converged = f"the condition is beyond {conlim:.3g}", False
    x = change if start is None else _axpy(1, start, change)
    condition = norm_a * math.sqrt(inverse_squares)
    history = tuple(residuals)
    return LeastSquares(
        x, len(history) - 1, history[-1], converged, reason, history, normal_residual, norm_a, condition
    )
