"""Clipping of gradients by their global norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.staging.recorder import checked, is_slot, one_line
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import SpecError, StateError, describe, message
from spmd.inner_product import inner
from spmd.kernels import on_device
from spmd.optim.arguments import MISSING, check_update, leaves_like
from spmd.optim.numbers import as_python_number, cast_like, is_recorded, varying_axes, widened
from spmd.optim.optimizers import Optimizer, check_optimizer
from spmd.tracebacks import api_boundary

__all__ = ["clip_by_global_norm", "clipped"]


@api_boundary
def clip_by_global_norm(grads: Any, max_norm: float | None = None) -> Any:
    """Gradients, scaled down together to a norm of at most max_norm.

    grads: a pytree. The norm is `spmd.norm` over all arrays and workers: in a body Invariant arrays count once and
    Varying ones are summed. Cost: one all-reduce for each set of axes; another one, in float64, if squares overflow or
    underflow in the dtype of the gradients. Raises ValueError unless max_norm is positive. Source: Pascanu, Mikolov,
    Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.

        >>> with spmd.Mesh(model=2):
        ...     grads = {"w": spmd.put(np.array([3.0, 0.0]), P("model")), "b": np.array([4.0])}
        ...     spmd.optim.clip_by_global_norm(grads, 1.0)
        {'w': PartitionedArray([0.6, 0. ], dtype=float64, spec=P('model')), 'b': array([0.8])}
    """
    if max_norm is None:
        raise SpecError.at(
            "spmd.optim.clip_by_global_norm",
            argument="max_norm",
            got="nothing",
            need="a positive number, behind the gradients: it clips at once; optax makes a transformation of it",
            mend="spmd.optim.clipped(optimizer, 1.0), or clip_by_global_norm(grads, 1.0) before an update",
        )
    checked(_check_max_norm, value if is_slot(value := value_of(max_norm)) else max_norm)
    scale, wide = _scale(grads, max_norm), tree.map(widened, grads)
    return tree.map(lambda g, w: cast_like(cast_like(w * scale, w), g), grads, wide)


@api_boundary
def clipped(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """An optimiser that clips the gradients to a global norm of at most max_norm, and then takes its step.

    It is `clip_by_global_norm` before the update; each parameter counts once, whatever splits it. Within `shard` the
    norm is that of the summed gradient, of which each worker has a part: `shard(clipped(adam(1e-3), 1.0), "data")`.
    Cost: as `clip_by_global_norm`. Raises StateError for gradients that vary over an axis along which the parameter
    does not: their sum is not known yet.

        >>> optimizer = spmd.optim.clipped(spmd.optim.sgd(0.5), 1.0)
        >>> params = np.array([1.0, 2.0])
        >>> optimizer.update(np.array([3.0, 4.0]), optimizer.init(params), params)[0]
        array([0.7, 1.6])
    """
    check_optimizer("spmd.optim.clipped", optimizer, "clipped(spmd.optim.adam(1e-3), 1.0)")
    checked(_check_max_norm, value if is_slot(value := value_of(max_norm)) else max_norm)

    def update(grads, state, params=MISSING, *, donate=False):
        check_update("spmd.optim.clipped", state, params)
        _check_summed(grads, params)
        return optimizer.update(clip_by_global_norm(grads, max_norm), state, params, donate=donate)

    return Optimizer(optimizer.init, api_boundary(update), optimizer.specs)


def _check_summed(grads: Any, params: Any) -> None:
    leaves, structure = tree.flatten(params)
    paths = tree.shown_paths(structure)
    given = leaves_like("spmd.optim.clipped", "grads", grads, structure)
    for path, p, g in zip(paths, leaves, given, strict=True):
        axes = sorted(varying_axes(g) - varying_axes(p))
        if axes:
            raise StateError.at(
                "spmd.optim.clipped",
                argument=f"grads{path}",
                got=f"{describe(g)}, for the parameter {describe(p)}",
                need=f"a gradient that is summed over {', '.join(map(repr, axes))}: its norm is that of the sum",
                mend="spmd.optim.shard(spmd.optim.clipped(optimizer, max_norm), axis_name), which sums first",
            )


def _check_max_norm(max_norm: Any) -> None:
    is_number = isinstance(max_norm, int | float | np.integer | np.floating) and not isinstance(max_norm, bool)
    if not (is_number or getattr(max_norm, "shape", None) == ()) or not max_norm > 0:
        raise ValueError(
            message(
                "spmd.optim.clip_by_global_norm",
                argument="max_norm",
                got=describe(max_norm),
                need="a positive number",
                mend="clip_by_global_norm(grads, 1.0)",
            )
        )


def _scale(grads: Any, max_norm: Any) -> Any:
    """The factor that reduces the norm to max_norm; 1 for smaller norms."""
    fits: Any = None
    fast: Any = None
    if not any(map(on_device, map(value_of, tree.leaves(grads)))):  # a device is not asked for values
        wide, limit = tree.map(widened, grads), as_python_number(max_norm)
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            total = np.real(inner(wide, wide))
            relative = total / limit / limit
            fits = (total > 1e-20) & (relative < np.inf)  # no relevant underflow, on any worker
            fast = _scale_to(relative)
        if not is_recorded(fits) and value_of(fits):
            return fast
    limit = np.float64(1) * max_norm  # a NumPy number, so the quotients are float64
    scale = _scale_to(_scaled_square(grads, limit, fits))
    # A recorded program computes both, and decides in every run. A product with float64 is exact for shorter dtypes.
    return np.where(fits, fast, scale) if is_recorded(fits) else scale


def _scaled_square(grads: Any, limit: Any, fits: Any) -> Any:
    """The square of the norm of grads / limit, in float64. Squares may overflow or underflow, so division comes first.

    fits: whether a recorded program does without, in which case a body leaves the squares out."""
    leaves = tree.leaves(grads)
    in_body = all(type(x) is Array and x.tape is None for x in (fits, *leaves)) and is_slot(value_of(fits))
    if in_body and getattr(limit, "tape", None) is None and not fits.state.varying:
        limit, skip = value_of(limit), value_of(fits)
        parts = [Array(one_line(_square_unless, (skip, g.value, limit)), g.state) for g in leaves]
        return inner(parts, [1.0] * len(parts))
    scaled = tree.map(lambda g: g / limit, grads)
    return np.real(inner(scaled, scaled))


def _square_unless(skip: Any, g: np.ndarray, limit: Any) -> Any:
    quotient = None if skip else g / limit
    return np.float64(0) if quotient is None else np.sum(quotient * quotient)


def _scale_to(relative_square: Any) -> Any:
    return 1 / np.sqrt(np.maximum(relative_square, 1.0))
