"""Functions that work along some dimensions, each line by itself: these dimensions are made whole first.

What splits them then splits the longest other dimension. Without one the array is gathered, if it is small.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.primitive import name_of
from spmd.global_ops.call import Arguments, as_spec, dims_of, global_of, global_value, names_of, spec_of
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import P, Spec
from spmd.layout_rules import Rule

__all__ = ["Along", "along", "moved_spec"]


def moved_spec(spec: Spec, shape: Sequence[int], dims: Sequence[int]) -> Spec | None:
    """A spec by which these dimensions are whole, and the axes that split them split another one. None: there is no
    other."""
    split = [[*names] for names in names_of(spec, len(shape))]
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
    return spec_of(split)


class Along(NamedTuple):
    """A function along dimensions. default: of its argument `axis`; None: all. reduces: whether these dimensions are
    missing in the result. leading: the name of an argument whose dimensions come first in the result."""

    default: int | None
    reduces: bool = False
    leading: str = ""


_TABLE: dict[Any, Along] = {
    **{f: Along(-1) for f in (np.sort, np.argsort, np.partition, np.argpartition, np.unwrap)},
    **{f: Along(None) for f in (np.cumsum, np.cumprod, np.nancumsum, np.nancumprod, np.flip)},
    **{f: Along(None, True) for f in (np.median, np.nanmedian, np.nanargmax, np.nanargmin, np.nanmax, np.nanmin)},
    **{f: Along(None, True) for f in (np.nanmean, np.nanvar, np.nanstd, np.nansum, np.nanprod)},
    **{f: Along(None, True, "q") for f in (np.quantile, np.percentile, np.nanquantile, np.nanpercentile)},
    **{getattr(np, name): Along(-1, True) for name in ("trapezoid", "trapz") if hasattr(np, name)},
    **{getattr(np, name): Along(None) for name in ("cumulative_sum", "cumulative_prod") if hasattr(np, name)},
    **{f: Along(None) for f in (np.repeat, np.delete, np.insert)},
}


@lru_cache(maxsize=256)
def _names(fun: Any) -> tuple[str, ...]:
    """The parameters of a function, which may all be given by position, or those after the last such by name."""
    return tuple(inspect.signature(fun).parameters)


def along(fun: Any, rule: Along, args: tuple, kwargs: dict) -> Any:
    bound = {**dict(zip(_names(fun), args, strict=False)), **kwargs}
    name, x = next((name, x) for name, x in bound.items() if global_value(x) is not None)
    value = global_of(x)
    axis = bound.get("axis", bound.get("axes", rule.default))
    others = [v for k, v in bound.items() if k != name]
    if axis is None and not (rule.reduces or fun is np.flip):
        return whole(fun, args, kwargs)  # of the flattened array
    if any(global_value(v) is not None for v in others) or any(np.ndim(v) for v in others if v is not axis):
        return whole(fun, args, kwargs)
    dims = dims_of(name_of(fun), axis, value.ndim)
    spec = moved_spec(as_spec(x), value.shape, dims)
    if spec is None and fun is np.flip and len(dims) > 1:
        for d in dims:
            x = np.flip(x, d)
        return x
    if spec is None:
        return whole(fun, args, kwargs)
    kept = names_of(spec, value.ndim)  # the dimensions that are worked along are whole
    if rule.reduces and bound.get("keepdims") in (None, False, np._NoValue):  # type: ignore[attr-defined]
        kept = [names for d, names in enumerate(kept) if d not in dims]
    if rule.leading:
        kept = [*[()] * np.ndim(bound[rule.leading]), *kept]
    arguments = Arguments(args, kwargs)
    return arguments.run(fun, [spec if a is x else P() for a in arguments.arrays], spec_of(kept))


def _register(fun: Any, rule: Along) -> None:
    @implements(fun, rule=Rule.ALONG)
    def handler(*args: Any, **kwargs: Any) -> Any:
        return along(fun, rule, args, kwargs)


for _fun, _rule in _TABLE.items():
    _register(_fun, _rule)


# Matrices in the last two dimensions.

_MATRIX = "inv pinv cholesky qr eigh eigvalsh eig eigvals svd svdvals det slogdet matrix_rank matrix_power cond"


def _of_matrices(fun: Any) -> None:
    @implements(fun, rule=Rule.MATRICES)
    def handler(*args: Any, **kwargs: Any) -> Any:
        value, arguments = global_value(args[0] if args else next(iter(kwargs.values()))), Arguments(args, kwargs)
        if value is None or value.ndim < 3 or len(arguments.arrays) > 1:
            return whole(fun, args, kwargs)
        batch = value.ndim - 2
        spec = moved_spec(as_spec(value), value.shape, (batch, batch + 1))
        assert spec is not None
        return arguments.run(fun, [spec], spec_of(names_of(spec, batch)[:batch]))


for _name in _MATRIX.split():
    if hasattr(np.linalg, _name):
        _of_matrices(getattr(np.linalg, _name))
