"""Functions that work along some dimensions, each line by itself: these dimensions are made whole first.

What splits them then splits the longest other dimension. Without one the array is gathered, if it is small.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.primitive import name_of
from spmd.global_ops.call import Arguments, Template, as_spec, dims_of, global_value, names_of, on_blocks
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import P, Spec

__all__ = ["Along", "along", "moved_spec"]


def moved_spec(spec: Spec, shape: Sequence[int], dims: Sequence[int]) -> Spec | None:
    """A spec by which these dimensions are whole, and the axes that split them split another one. None: there is no
    other."""
    split = [list(names) for names in names_of(spec)] + [[] for _ in range(len(shape) - len(names_of(spec)))]
    moved = [n for d in dims for n in split[d]]
    if not moved:
        return spec
    free = [d for d in range(len(shape)) if d not in dims]
    if not free:
        return None
    target = max(free, key=lambda d: (not split[d], shape[d]))
    for d in dims:
        split[d] = []
    split[target] += moved
    return P(*(tuple(names) or None for names in split))


class Along(NamedTuple):
    """A function along dimensions. default: of its argument `axis`; None: all. reduces: whether these dimensions are
    missing in the result. leading: the name of an argument whose dimensions come first in the result."""

    default: int | None
    reduces: bool = False
    leading: str = ""


_FFT = "fft ifft rfft irfft hfft ihfft"
_FFT_ND = "fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn"

_TABLE: dict[Any, Along] = {
    **{f: Along(-1) for f in (np.sort, np.argsort, np.partition, np.argpartition, np.diff, np.unwrap)},
    **{f: Along(None) for f in (np.cumsum, np.cumprod, np.nancumsum, np.nancumprod, np.flip, np.roll)},
    **{f: Along(None, True) for f in (np.median, np.nanmedian, np.nanargmax, np.nanargmin, np.nanmax, np.nanmin)},
    **{f: Along(None, True) for f in (np.nanmean, np.nanvar, np.nanstd, np.nansum, np.nanprod)},
    **{f: Along(None, True, "q") for f in (np.quantile, np.percentile, np.nanquantile, np.nanpercentile)},
    **{getattr(np, name): Along(-1, True) for name in ("trapezoid", "trapz") if hasattr(np, name)},
    **{getattr(np, name): Along(None) for name in ("cumulative_sum", "cumulative_prod") if hasattr(np, name)},
    **{getattr(np.fft, name): Along(-1) for name in _FFT.split()},
    **{f: Along(None) for f in (np.repeat, np.delete, np.insert, np.append, np.compress, np.take)},
    **{f: Along(None) for f in (np.fft.fftshift, np.fft.ifftshift)},
}


@lru_cache(maxsize=256)
def _signature(fun: Any) -> inspect.Signature:
    return inspect.signature(fun)


def _make(fun: Callable, template: Template) -> Callable:
    def body(*arrays: Any) -> Any:
        args, kwargs = template.filled(arrays)
        return fun(*args, **kwargs)

    return body


def _first_global(bound: dict[str, Any]) -> tuple[str, Any]:
    return next((name, x) for name, x in bound.items() if global_value(x) is not None)


def along(fun: Any, rule: Along, args: tuple, kwargs: dict) -> Any:
    where = name_of(fun)
    bound = _signature(fun).bind(*args, **kwargs).arguments
    name, x = _first_global(bound)
    value = global_value(x)
    assert value is not None
    axis = bound.get("axis", bound.get("axes", rule.default))
    others = [v for k, v in bound.items() if k != name]
    if axis is None and not (rule.reduces or fun in (np.flip, np.roll)):
        return whole(fun, args, kwargs)  # of the flattened array
    if any(global_value(v) is not None for v in others) or any(np.ndim(v) for v in others if v is not axis):
        return whole(fun, args, kwargs)
    dims = dims_of(where, axis, value.ndim)
    spec = moved_spec(as_spec(x), value.shape, dims)
    if spec is None:
        return whole(fun, args, kwargs)
    split = names_of(spec)
    split = [*split, *[()] * (value.ndim - len(split))]
    kept = [split[d] or None for d in range(value.ndim) if not (rule.reduces and d in dims)]
    if rule.reduces and bound.get("keepdims") not in (None, False, np._NoValue):  # type: ignore[attr-defined]
        kept = [None if d in dims else split[d] or None for d in range(value.ndim)]
    if rule.leading:
        kept = [*[None] * np.ndim(bound[rule.leading]), *kept]
    arguments = Arguments(where, args, kwargs)
    specs = [spec if a is x else P() for a in arguments.arrays]
    return on_blocks(where, _make, (fun, arguments.template), arguments.arrays, specs, P(*kept), value.mesh)


def _register(fun: Any, rule: Along) -> None:
    @implements(fun)
    def handler(*args: Any, **kwargs: Any) -> Any:
        return along(fun, rule, args, kwargs)


for _fun, _rule in _TABLE.items():
    _register(_fun, _rule)


# Matrices in the last two dimensions.

_MATRIX = "inv pinv cholesky qr eigh eigvalsh eig eigvals svd svdvals det slogdet matrix_rank matrix_power cond"


def _of_matrices(fun: Any) -> None:
    @implements(fun)
    def handler(*args: Any, **kwargs: Any) -> Any:
        where = name_of(fun)
        x = args[0] if args else next(iter(kwargs.values()))
        value = global_value(x)
        if value is None or value.ndim < 3 or len(Arguments(where, args, kwargs).arrays) > 1:
            return whole(fun, args, kwargs)
        spec = moved_spec(as_spec(x), value.shape, (value.ndim - 2, value.ndim - 1))
        assert spec is not None
        batch = P(*(names or None for names in names_of(spec)[: value.ndim - 2]))
        arguments = Arguments(where, args, kwargs)
        return on_blocks(where, _make, (fun, arguments.template), arguments.arrays, [spec], batch, value.mesh)


for _name in _MATRIX.split():
    if hasattr(np.linalg, _name):
        _of_matrices(getattr(np.linalg, _name))
