"""The dot test: whether two maps are adjoint to each other, and where they are not.

The adjoint F* of a linear map F is the one with <F x, y> = <x, F* y> for all x and y, in the inner product that counts
an Invariant value once, sums a Varying one over the workers, and counts a Rooted one at its root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.adjoints.dot import DotTest, usual_specs
from spmd.adjoints.matrices import SHOWN, Matrices, enter, enter_some
from spmd.adjoints.report import AdjointError, AdjointReport, Entry, Fault, Place, table
from spmd.adjoints.trial import Trial, raised
from spmd.autodiff import tree
from spmd.autodiff.tape import suspended
from spmd.errors import SpecError
from spmd.layout import Layout, P
from spmd.mesh import Mesh, Worker
from spmd.operators.algebra import Linear
from spmd.operators.base import Operator
from spmd.placement import mesh_for
from spmd.tracebacks import api_boundary

__all__ = ["AdjointError", "AdjointReport", "Entry", "Fault", "Place", "check_adjoint", "table"]

Shape = tuple[int, ...]


@api_boundary
def check_adjoint(
    f: Operator | Callable,
    *shapes: Shape,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    adjoint: Callable | None = None,
    exact: bool | None = None,
    real: bool = False,
    dtype: Any = np.float64,
    trials: int = 3,
    seed: int = 0,
    raises: bool = True,
    shrink: bool = True,
) -> AdjointReport:
    """Test that F and F* are adjoint: <F x, y> = <x, F* y>. One line: `check_adjoint(AllGather(("x",)), (3,), mesh=m)`.

    f: an operator, or the body of a linear map: a function of blocks. shapes: one per argument. in_specs: a spec for
    each argument, which splits its shape over the mesh, or a Layout, for uneven blocks of given sizes; without it every
    worker has a block of the shape itself, all different for an operator on Varying arrays, one value for an Invariant
    one. out_specs: what the states of the results must be, and how a report counts their entries; a spec, or a tree.
    adjoint: a body for F* (cotangents -> tuple of cotangents of the arguments); by default that of the operator, or of
    the tape.
    exact: draw small integers and demand equality: right for what copies and adds, and the default for operators.
    Otherwise draw normal numbers and demand an error below what perturbing the inputs in the last bit explains.
    real: F is linear over the reals only, as conj is, and the inner product is the real part. Maps between real and
    complex arrays are tested so in any case.
    dtype: of the blocks, floating or complex. trials, seed: how many draws, and from which.
    shrink: where the test fails, look for a smaller mesh, smaller shapes and simpler parameters that fail as well.

    Linearity comes first; what is not linear has no adjoint. Then: F* gives back shape, dtype and state of the
    arguments, workers that hold copies of a value hold the same, F** = F, and nothing writes into its input.
    Collective under MPI; all workers reach one verdict. Of an operator on global arrays (`spmd.linear_operator`) the
    adjoint A.H is tested: `check_adjoint(A)`; it brings its shapes, specs, dtypes and mesh.
    Returns a report, which also says where F* is not F^H; raises AdjointError, which holds one, unless raises=False.
    An error in f is raised as it is.
    """
    where = "spmd.check_adjoint"
    _check_draws(where, trials, seed)
    if isinstance(f, Linear) and hasattr(f, "domain"):
        from spmd.adjoints.across import check_across

        own = {"shapes": shapes or None, "mesh": None if mesh == f.mesh else mesh, "in_specs": in_specs}  # type: ignore[attr-defined]
        own |= {"out_specs": out_specs, "adjoint": adjoint, "real": real or None}
        own |= {"dtype": None if np.dtype(dtype) == np.float64 else dtype}
        _check_own(where, f, own)
        report = check_across(f, bool(exact), trials, seed)  # type: ignore[arg-type]
        if raises and not report.passed:
            raise AdjointError(report)
        return report
    mesh = mesh_for(mesh, where)
    if not shapes:
        raise SpecError.at(
            where, argument="shapes", got="none", need="one per argument", mend="check_adjoint(f, (8, 3), ...)"
        )
    given = tuple(_shape(where, k, shape) for k, shape in enumerate(shapes))
    operator = f if isinstance(f, Operator) else None
    if operator is not None:
        mesh.names(operator.axes, where)
    exact = operator is not None if exact is None else exact
    specs = _specs(where, operator, len(shapes), in_specs)
    for k, (shape, spec) in enumerate(zip(given, specs, strict=True)):
        if spec is not None:
            _check_spec(where, mesh, k, shape, spec)
    for spec in tree.leaves(out_specs):
        if isinstance(spec, P):
            spec.check(mesh.axes, where, "out_specs")
    if np.dtype(dtype).kind not in "fc":
        raise SpecError.at(
            where,
            argument="dtype",
            got=repr(np.dtype(dtype).name),
            need="a floating or complex dtype: only those have adjoints",
            mend="leave it out; integers are drawn in any dtype where the test is exact",
        )
    test = DotTest(mesh, f, given, specs, out_specs, adjoint, exact, real, np.dtype(dtype), trials, seed)
    report = run(test)
    if not report.passed:
        locate(test, report)
        report.smallest = report
    if shrink and not report.passed:
        from spmd.adjoints.smaller import smallest_like  # Most tests pass.

        smallest = smallest_like(test, lambda smaller: run(smaller).kind == report.kind)
        if smallest is not test:
            report.smallest = run(smallest)
            locate(smallest, report.smallest)
            report.hint = report.hint or report.smallest.hint  # the larger case says more
    if raises and not report.passed:
        raise AdjointError(report)
    return report


def _check_draws(where: str, trials: int, seed: int) -> None:
    """Raise where nothing would be drawn: no trial fails in none."""
    for argument, value, least in (("trials", trials, 1), ("seed", seed, 0)):
        if not isinstance(value, int | np.integer) or value < least:
            raise SpecError.at(
                where,
                argument=argument,
                got=repr(value),
                need=f"an int of at least {least}",
                mend=f"{argument}={least}, or leave it out",
            )


def _check_own(where: str, op: Linear, given: dict[str, Any]) -> None:
    """Raise where something is given that an operator on global arrays brings with it."""
    for argument, value in given.items():
        if value is not None:
            raise SpecError.at(
                where,
                argument=argument,
                got=f"{value!r} for {op!r}",
                need="nothing: an operator on global arrays brings its shapes, specs, dtypes, adjoint and mesh",
                mend="check_adjoint(A); spmd.linear_operator(f, ..., adjoint=g) makes one with another adjoint",
            )


def _shape(where: str, k: int, shape: Any) -> Shape:
    """The shape of argument k, checked."""
    if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) and n >= 0 for n in shape):
        raise SpecError.at(
            where,
            argument=f"shapes[{k}]",
            got=repr(shape),
            need="a tuple of lengths, one tuple per argument of f",
            mend="check_adjoint(f, (8, 3), ...)",
        )
    return tuple(int(n) for n in shape)


def _check_spec(where: str, mesh: Mesh, k: int, shape: Shape, spec: P | Layout) -> None:
    """Raise where a spec or a layout does not fit the mesh or the shape of argument k."""
    if isinstance(spec, P):
        spec.check(mesh.axes, where, f"in_specs[{k}]", len(shape))
    elif spec.shape != shape or any(mesh.axes.get(n) != size for n, size in spec.axes.items()):
        raise SpecError.at(
            where,
            argument=f"in_specs[{k}]",
            got=repr(spec),
            need=f"a layout of shape {shape} on {mesh}",
            mend=f"Layout({shape}, spec, mesh.axes, cuts)",
        )


def _specs(where: str, operator: Operator | None, count: int, in_specs: Any) -> tuple[P | Layout | None, ...]:
    """One spec per argument; None where every worker has a block of the whole shape."""
    if in_specs is None:
        if operator is None:
            raise SpecError.at(
                where,
                argument="in_specs",
                got="none, for a function",
                need="a spec for each argument",
                mend='in_specs=P("x") splits the argument over axis x; P() replicates it',
            )
        return usual_specs(operator, count)
    specs = (in_specs,) * count if isinstance(in_specs, P | Layout) else tuple(in_specs)
    if len(specs) != count:
        raise SpecError.at(
            where,
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
            found = _on_workers(test, lambda worker, t=t: Trial(test, worker, t).found())
        except Exception as error:
            # Of an adjoint that fails on some workers all must learn, which they do where all are in this process.
            if not getattr(error, "spmd_in_adjoint", False) or len(test.mesh.local_workers) < test.mesh.size:
                raise
            report.faults.append(raised(error))
            break
        found.enter(report)
        if report.faults:
            break
    return report


def _on_workers(test: DotTest, body: Callable[[Worker], Any]):
    """What the first worker here gives: all give the same."""
    with suspended():
        return next(iter(test.mesh.run(body).results.values()))


def locate(test: DotTest, report: AdjointReport) -> None:
    """Enter into the report of a failure where F* is not F^H: of large matrices some entries, found by bisection."""
    if report.kind not in ("value", "twice"):
        return
    try:
        found = _compared(test, report, test.real)
        if found is not None and not _differ(found) and test.dtype.kind == "c":
            found = _compared(test, report, True)  # A conjugate too many does not show on real unit vectors.
        if found is not None:
            enter(report, *found)
        else:
            _bisect(test, report)
    except Exception:  # The verdict is there; only what would explain it is missing.
        return


def _bisect(test: DotTest, report: AdjointReport) -> None:
    bound = 0.0 if test.exact else max(4 * report.bound, 64 * float(np.finfo(test.dtype).eps))
    for reals in (test.real, True) if test.dtype.kind == "c" else (test.real,):
        entries, count = _on_workers(test, lambda worker, reals=reals: Matrices(test, worker, reals).some(bound, SHOWN))
        enter_some(report, entries, count)
        if entries:
            return


def _compared(test: DotTest, report: AdjointReport, reals: bool):
    """F^H and F* as matrices, what their rows and columns stand for, and how far they may differ."""
    found = _on_workers(test, lambda worker: Matrices(test, worker, reals).found())
    if found is None:
        return None
    needed, given, xs, ys = found
    most = np.abs(np.concatenate([needed.reshape(-1), given.reshape(-1)])).max(initial=0.0)
    room = 0.0 if test.exact else max(4 * report.bound, 64 * float(np.finfo(test.dtype).eps)) * most
    return needed, given, xs, ys, room


def _differ(found) -> bool:
    needed, given, *_, room = found
    return bool((np.abs(needed - given) > room).any())
