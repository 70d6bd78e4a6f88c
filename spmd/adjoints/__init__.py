"""The dot test: whether two linear maps are adjoint to each other, and in which entries they are not.

The adjoint F* of a linear map F is the one with <F x, y> = <x, F* y> for all x and y, in the inner product that counts
an Invariant value once, sums a Varying one over the workers, and counts a Rooted one at its root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.adjoints.dot_test import DotTest, default_specs
from spmd.adjoints.matrices import ENTRIES_SHOWN, Matrices, enter
from spmd.adjoints.report import AdjointError, AdjointReport, Entry, Fault, Place, table
from spmd.adjoints.trial import Trial, raise_fault
from spmd.autodiff import tree
from spmd.autodiff.tape import suspended
from spmd.errors import SpecError
from spmd.layout import Layout, P
from spmd.mesh import Mesh, Worker
from spmd.operators.base import Linear, Operator
from spmd.placement import mesh_for
from spmd.tracebacks import api_boundary

__all__ = ["AdjointError", "AdjointReport", "Entry", "Fault", "Place", "check_adjoint", "table"]

Shape = tuple[int, ...]


@api_boundary
def check_adjoint(
    f: Operator | Callable[..., Any],
    *shapes: Shape,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    adjoint: Callable[..., Any] | None = None,
    exact: bool | None = None,
    real: bool = False,
    dtype: Any = np.float64,
    trials: int = 3,
    seed: int = 0,
    raises: bool = True,
    shrink: bool = True,
) -> AdjointReport:
    """Test that F and F* are adjoint: <F x, y> = <x, F* y>. One line: `check_adjoint(AllGather(("x",)), (3,), mesh=m)`.

    f: an operator, or the body of a linear map, a function of blocks. shapes: one per argument. in_specs: a spec for
    each argument, which splits its shape over the mesh, or a Layout. Without it every worker has a block of the shape
    itself: different ones for an operator on Varying arrays, equal ones for one on Invariant arrays. out_specs: the
    states that the results must have, and how a report counts their entries; a spec, or a tree of specs.
    adjoint: a body for F*, from cotangents to a tuple of cotangents of the arguments. The default is the adjoint of the
    operator, or of the tape.
    exact: draw small integers and demand equality; the default for operators, which copy and add. Otherwise draw normal
    numbers and demand an error below that of perturbing the inputs in the last bit.
    real: F is linear over the reals only, as conj is; the inner product is the real part. Maps between real and complex
    arrays are always tested so.
    dtype: of the blocks, floating or complex. trials, seed: the number of draws, and their seed.
    shrink: after a failure, look for a smaller mesh, smaller shapes and simpler parameters that fail too.

    The first test is linearity. Then F* returns shape, dtype and state of the arguments, copies of a value are equal,
    F** = F, and no input is written to. Collective under MPI; all workers reach one verdict. An operator on global
    arrays (`spmd.linear_operator`) brings its shapes, specs, dtypes and mesh: `check_adjoint(A)` tests A.H.
    Returns a report, with the entries in which F* differs from F^H. Raises AdjointError, which holds the report, unless
    raises=False. An error in f is not caught.

        >>> def body(x):
        ...     return spmd.shift(x, "x")
        >>> with spmd.Mesh(x=3):
        ...     spmd.check_adjoint(body, (6,), in_specs=P("x")).passed
        ...     spmd.check_adjoint(body, (6,), in_specs=P("x"), adjoint=lambda y: (body(y),), raises=False).passed
        True
        False
    """
    _check_draws(trials, seed)
    if isinstance(f, Linear) and hasattr(f, "domain"):
        from spmd.adjoints.global_operators import check_across

        _check_no_arguments(f, shapes, mesh, in_specs, out_specs, adjoint, real, dtype)
        report = check_across(f, bool(exact), trials, seed)  # type: ignore[arg-type]
    else:
        exact = isinstance(f, Operator) if exact is None else exact
        rest = out_specs, adjoint, exact, real, np.dtype(dtype), trials, seed
        report = _explained_report(_dot_test(f, shapes, mesh_for(mesh, _WHERE), in_specs, *rest), shrink)
    if raises and not report.passed:
        raise AdjointError(report)
    return report


_WHERE = "spmd.check_adjoint"


def _dot_test(f: Callable, shapes: Sequence[Any], mesh: Mesh, in_specs: Any, out_specs: Any, *rest: Any) -> DotTest:
    """The test of an operator or a body, with checked arguments."""
    if not shapes:
        mend = "check_adjoint(f, (8, 3), ...)"
        raise SpecError.at(_WHERE, argument="shapes", got="none", need="one per argument", mend=mend)
    checked = tuple(_shape(k, shape) for k, shape in enumerate(shapes))
    operator = f if isinstance(f, Operator) else None
    if operator is not None:
        mesh.names(operator.axes, _WHERE)
    specs = _specs(operator, len(shapes), in_specs)
    for k, (shape, spec) in enumerate(zip(checked, specs, strict=True)):
        if spec is not None:
            _check_spec(mesh, k, shape, spec)
    for spec in tree.leaves(out_specs):
        if isinstance(spec, P):
            spec.check(mesh.axes, _WHERE, "out_specs")
    test = DotTest(mesh, f, checked, specs, out_specs, *rest)
    if test.dtype.kind not in "fc":
        raise SpecError.at(
            _WHERE,
            argument="dtype",
            got=repr(test.dtype.name),
            need="a floating or complex dtype: only those have adjoints",
            mend="leave it out; integers are drawn in any dtype where the test is exact",
        )
    return test


def _explained_report(test: DotTest, shrink: bool) -> AdjointReport:
    """The report of a test. A failure's report has the wrong entries of F*, and the smallest case that fails."""
    report = run(test)
    if report.passed:
        return report
    locate(test, report)
    report.smallest = report
    if shrink:
        from spmd.adjoints.shrinking import smallest_failure  # not needed by tests that pass

        smallest = smallest_failure(test, lambda smaller: run(smaller).kind == report.kind)
        if smallest is not test:
            report.smallest = run(smallest)
            locate(smallest, report.smallest)
            report.hint = report.hint or report.smallest.hint  # from the larger case if it has one
    return report


def _check_draws(trials: int, seed: int) -> None:
    """Raise for no trials, which would always pass, and for a seed that NumPy does not take."""
    for argument, value, minimum in (("trials", trials, 1), ("seed", seed, 0)):
        if not isinstance(value, int | np.integer) or value < minimum:
            raise SpecError.at(
                _WHERE,
                argument=argument,
                got=repr(value),
                need=f"an int of at least {minimum}",
                mend=f"{argument}={minimum}, or leave it out",
            )


def _check_no_arguments(
    op: Linear, shapes: Any, mesh: Mesh | None, in_specs: Any, out_specs: Any, adjoint: Any, real: bool, dtype: Any
) -> None:
    """Raise if an argument is given that an operator on global arrays determines."""
    redundant = {"shapes": shapes or None, "mesh": None if mesh == op.mesh else mesh, "in_specs": in_specs}  # type: ignore[attr-defined]
    redundant |= {"out_specs": out_specs, "adjoint": adjoint, "real": real or None}
    redundant |= {"dtype": None if np.dtype(dtype) == np.float64 else dtype}
    for argument, value in redundant.items():
        if value is not None:
            raise SpecError.at(
                _WHERE,
                argument=argument,
                got=f"{value!r} for {op!r}",
                need="nothing: an operator on global arrays brings its shapes, specs, dtypes, adjoint and mesh",
                mend="check_adjoint(A); spmd.linear_operator(f, ..., adjoint=g) makes one with another adjoint",
            )


def _shape(k: int, shape: Any) -> Shape:
    """The shape of argument k, checked."""
    if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) and n >= 0 for n in shape):
        raise SpecError.at(
            _WHERE,
            argument=f"shapes[{k}]",
            got=repr(shape),
            need="a tuple of lengths, one tuple per argument of f",
            mend="check_adjoint(f, (8, 3), ...)",
        )
    return tuple(int(n) for n in shape)


def _check_spec(mesh: Mesh, k: int, shape: Shape, spec: P | Layout) -> None:
    """Raise if a spec or a layout does not fit the mesh or the shape of argument k."""
    if isinstance(spec, P):
        spec.check(mesh.axes, _WHERE, f"in_specs[{k}]", len(shape))
    elif spec.shape != shape or any(mesh.axes.get(n) != size for n, size in spec.axes.items()):
        raise SpecError.at(
            _WHERE,
            argument=f"in_specs[{k}]",
            got=repr(spec),
            need=f"a layout of shape {shape} on {mesh}",
            mend=f"Layout({shape}, spec, mesh.axes, cuts)",
        )


def _specs(operator: Operator | None, count: int, in_specs: Any) -> tuple[P | Layout | None, ...]:
    """One spec per argument; None: every worker has a block of the whole shape."""
    if in_specs is None:
        if operator is None:
            raise SpecError.at(
                _WHERE,
                argument="in_specs",
                got="none, for a function",
                need="a spec for each argument",
                mend='in_specs=P("x") splits the argument over axis x; P() replicates it',
            )
        return default_specs(operator, count)
    specs = (in_specs,) * count if isinstance(in_specs, P | Layout) else tuple(in_specs)
    if len(specs) != count:
        raise SpecError.at(
            _WHERE,
            argument="in_specs",
            got=f"{len(specs)} specs for {count} shapes",
            need="one per argument",
            mend="give as many specs as shapes",
        )
    return specs


def run(test: DotTest) -> AdjointReport:
    """The verdict on a test."""
    name = repr(test.f) if test.operator is not None else getattr(test.f, "__name__", repr(test.f))
    mode = "exact" if test.exact else "float"
    report = AdjointReport(name, test.shapes, repr(test.mesh), mode, test.trials, reproduce=test.reproduction())
    for t in range(test.trials):
        try:
            trial_result = _run_on_workers(test, lambda worker, t=t: Trial(test, worker, t).result())
        except Exception as error:
            # If all workers are in this process, all learn that an adjoint raises on some of them.
            if not getattr(error, "spmd_in_adjoint", False) or len(test.mesh.local_workers) < test.mesh.size:
                raise
            report.faults.append(raise_fault(error))
            break
        trial_result.enter(report)
        if report.faults:
            break
    return report


def _run_on_workers(test: DotTest, body: Callable[[Worker], Any]):
    """The result of the first worker of this process; all workers have the same."""
    with suspended():
        return next(iter(test.mesh.run(body).results.values()))


def locate(test: DotTest, report: AdjointReport) -> None:
    """Add the entries in which F* differs from F^H to the report of a failure; of large matrices some, by bisection."""
    if report.kind not in ("value", "twice"):
        return
    try:
        comparison = _compared_matrices(test, report, test.real)
        if comparison is not None and not _matrices_differ(comparison) and test.dtype.kind == "c":
            comparison = _compared_matrices(test, report, True)  # real unit vectors do not show a wrong conjugate
        if comparison is not None:
            enter(report, *comparison)
        else:
            _enter_bisected(test, report)
    except Exception:  # the verdict stands without the explanation
        return


def _enter_bisected(test: DotTest, report: AdjointReport) -> None:
    bound = _relative_bound(test, report)
    for reals in (test.real, True) if test.dtype.kind == "c" else (test.real,):
        body = lambda worker, reals=reals: Matrices(test, worker, reals).some_entries(bound, ENTRIES_SHOWN)
        report.entries, report.entries_of = _run_on_workers(test, body)
        report.bisected = True
        if report.entries:
            return


def _compared_matrices(test: DotTest, report: AdjointReport, reals: bool):
    """F^H and F* as matrices, the places of their rows and columns, and the tolerance; None if they are too large."""
    matrices = _run_on_workers(test, lambda worker: Matrices(test, worker, reals).compute())
    if matrices is None:
        return None
    expected, actual, xs, ys = matrices
    largest = np.abs(np.concatenate([expected.reshape(-1), actual.reshape(-1)])).max(initial=0.0)
    return expected, actual, xs, ys, _relative_bound(test, report) * largest


def _relative_bound(test: DotTest, report: AdjointReport) -> float:
    return 0.0 if test.exact else max(4 * report.bound, 64 * float(np.finfo(test.dtype).eps))


def _matrices_differ(comparison) -> bool:
    expected, actual, *_, tolerance = comparison
    return bool((np.abs(expected - actual) > tolerance).any())
