"""`spmd.fft.plan`: how a transform of an array would go, before there is one; and running transforms by plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.errors import MeshError, SpecError, describe
from spmd.fourier.blocks import transformed
from spmd.fourier.lines import Line, checked_norm, lines_of, result_shape
from spmd.fourier.plan import FourierPlan, fourier_plan
from spmd.frontends import frontend
from spmd.functions.layouts import checked_target, dtype_of
from spmd.functions.planned import Operand, is_split, run_layer
from spmd.global_ops.transforms import check_plan
from spmd.layout import Layout, P, Spec
from spmd.mesh import WORKER, Mesh, current_mesh
from spmd.tracebacks import api_boundary

__all__ = ["plan", "run"]


@api_boundary
def plan(
    shape: Sequence[int],
    spec: Spec,
    axes: Sequence[int] | None = None,
    *,
    real: bool = False,
    inverse: bool = False,
    s: Sequence[int] | None = None,
    norm: str | None = None,
    padding: Any = None,
    out_spec: Spec | None = None,
    dtype: Any = None,
    mesh: Mesh | None = None,
) -> FourierPlan:
    """The plan of a Fourier transform: local transforms and repartitions, the fewest that it can do with.

    shape, spec: of the array, and how it lies: a spec, or a `Layout`. axes: the dimensions to transform; None: all.
    real: plans `rfftn`, or with inverse `irfftn`; otherwise `fftn` or `ifftn`. s, norm, padding, out_spec: as for
    these. dtype: of the array, for counting bytes; None: float64 or complex128. mesh: None: that of the body, or of
    `with mesh:`; a Layout needs none.

    `plan(x)`, in a body, transforms this worker's block. `plan.out` is the layout of the result, `plan.inverse` the
    plan of the way back, through the same layouts. `print(plan)` shows the steps with messages and bytes.
    Of all ways those come first that leave no worker without entries, then those of fewest repartitions, of best
    balance, and of fewest entries that move. Slabs take one repartition, and pencils one or two.
    Raises SpecError and LayoutError for what does not fit, MeshError without a mesh.

        >>> with spmd.Mesh(x=2):
        ...     plan = spmd.fft.plan((8, 8), P("x"), real=True)
        ...     f = spmd.map(plan, P("x"), plan.out)
        ...     np.allclose(f(np.eye(8)).numpy(), np.fft.rfftn(np.eye(8))), plan.out.spec
        (True, P(None, 'x'))
    """
    where = "spmd.fft.plan"
    source = _layout(where, tuple(shape), spec, mesh)
    name = "i" * inverse + "r" * real + "fft"
    lines = lines_of(where, name, source.shape, s, axes, padding)
    kind = np.dtype(dtype if dtype is not None else float if real and not inverse else complex)
    return _planned(where, source, lines, norm, out_spec, kind)


def _layout(where: str, shape: tuple[int, ...], spec: Any, mesh: Mesh | None) -> Layout:
    if isinstance(spec, Layout):
        if spec.shape != shape:
            need = f"a layout of an array of shape {[*shape]}"
            raise SpecError.at(where, argument="spec", got=str(spec), need=need, mend="shape=layout.shape")
        return spec
    if not isinstance(spec, P):
        raise SpecError.at(where, argument="spec", got=describe(spec), need="a spec or a Layout", mend='P("x")')
    worker = WORKER.get()
    mesh = mesh or (worker.mesh if worker is not None else current_mesh())
    if mesh is None:
        need = "the mesh whose axes the spec names"
        raise MeshError.at(where, argument="mesh", got="None, outside of any", need=need, mend="mesh=spmd.Mesh(x=4)")
    spec.check(mesh.axes, where, "spec", len(shape))
    return mesh.layout(shape, spec)


def _planned(
    where: str, source: Layout, lines: tuple[Line, ...], norm: Any, out_spec: Spec | None, dtype: np.dtype
) -> FourierPlan:
    target = None
    if out_spec is not None:
        target = checked_target(where, "out_spec", out_spec, result_shape(source.shape, lines), source, source.axes)
    return fourier_plan(source, lines, checked_norm(where, norm), target, dtype)


def run(
    name: str,
    kind: str,
    x: Any,
    s: Any,
    axes: Any,
    norm: Any,
    padding: Any,
    specs: tuple[Spec | None, Spec | None, Any],
) -> Any:
    """A transform by its plan. specs: of the array, of the result, and the whole shape for the first."""
    where = f"spmd.fft.{name}"
    spec, out_spec, shape = specs
    if frontend(x) is None and not hasattr(x, "shape"):
        x = np.asarray(x)
    operand = Operand("spec", x, spec, shape)
    if out_spec is None and not is_split(operand):
        lines = lines_of(where, kind, x.shape, s, axes, padding)
        return transformed(x, lines, checked_norm(where, norm), result_shape(x.shape, lines))
    dtype = dtype_of(x)

    def planned(layout: Layout) -> FourierPlan:
        lines = lines_of(where, kind, layout.shape, s, axes, padding)
        made = _planned(where, layout, lines, norm, out_spec, dtype)
        if operand.value is not None and out_spec is None:
            check_plan(where, made, operand.value)
        return made

    return run_layer(where, planned, [operand])
