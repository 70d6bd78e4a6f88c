"""Arrays of a device beside constants of the host, and what CuPy's functions lack of NumPy's.

CuPy takes no arrays of NumPy as operands. A body that writes `x + np.zeros(3)` means an array where x is: so what fails
for that reason is done again with the constants on x's device. Only what has failed comes here, so arrays of NumPy pay
nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from spmd.errors import StateError, describe, message

__all__ = ["again", "is_array", "register", "to_host"]

_modules: list[Any] = []
"""CuPy, once one of its arrays may come."""


def register(module: Any) -> None:
    """Arrays of this module may come from now on."""
    if module not in _modules:
        _modules.append(module)


def is_array(x: object) -> bool:
    """Whether x is an array of a device."""
    return bool(_modules) and isinstance(x, _modules[-1].ndarray)


def to_host(x: Any) -> Any:
    """Bare data on the host; waits for what computes it."""
    return x.get() if is_array(x) else x


def _arrays(tree: Any) -> Iterator[Any]:
    if is_array(tree):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from _arrays(x)
    elif isinstance(tree, dict):
        yield from _arrays(list(tree.values()))


def _moved(tree: Any, module: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return module.asarray(tree)
    if isinstance(tree, tuple | list):
        parts = [_moved(x, module) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


_REFUSALS = (TypeError, ValueError, AttributeError, IndexError, NotImplementedError)
"""What CuPy raises where it does not take an argument; anything else has another reason."""


def again(fun: Callable, args: list[Any], kwargs: dict[str, Any], error: Exception, name: str) -> Any:
    """What has failed with an error, computed with constants of the host on the device of the arrays beside them.

    args becomes what it was computed from. Without arrays of a device the error is raised as it is.
    """
    if not isinstance(error, _REFUSALS) or type(error).__module__.startswith("spmd"):
        raise error
    beside = next(_arrays([args, kwargs]), None)
    if beside is None:
        raise error
    module = _modules[-1]
    with beside.device:
        args[:] = [_moved(a, module) for a in args]
        kwargs = {k: _moved(v, module) for k, v in kwargs.items()}
        try:
            return _otherwise.get(fun, fun)(*args, **kwargs)
        except (TypeError, AttributeError, NotImplementedError) as second:
            if type(second).__module__.startswith("spmd"):
                raise
            raise StateError(
                message(
                    name,
                    got=f"{describe(beside)} on a GPU, which CuPy's function does not take: {second}",
                    need="a function, and options, that CuPy has too",
                    mend="compose it of others; or a host function on spmd.block(x).get(), which waits for the GPU",
                )
            ) from error


# CuPy's sorts are stable, and know no other kind.


def _sort(a, axis=-1, kind=None, order=None, *, stable=None):
    return np.sort(a, axis)


def _argsort(a, axis=-1, kind=None, order=None, *, stable=None):
    return np.argsort(a, axis)


def _clip(a, a_min=None, a_max=None, *, min=None, max=None):
    return np.clip(a, min if a_min is None else a_min, max if a_max is None else a_max)


_NEUTRAL = {np.sum: 0, np.prod: 1, np.any: False, np.all: True, np.mean: 0, np.max: None, np.min: None}
_JOIN = {np.sum: np.add, np.prod: np.multiply, np.max: np.maximum, np.min: np.minimum}


def _reduced(fun: Any, a: Any, *rest: Any, **kwargs: Any) -> Any:
    """A reduction with `where` and `initial`, which CuPy's do not have."""
    kwargs = {k: v for k, v in kwargs.items() if v is not np._NoValue}  # type: ignore[attr-defined]
    where, initial = kwargs.pop("where", True), kwargs.pop("initial", None)
    axis = kwargs.get("axis", rest[0] if rest else None)
    if where is not True:
        neutral = initial if fun in (np.max, np.min) else _NEUTRAL[fun]
        if neutral is None:
            raise TypeError(f"{fun.__name__} with where= needs initial=")
        if fun is np.mean:
            mask = np.broadcast_to(where, a.shape)
            keep = {"keepdims": kwargs.get("keepdims", False)}
            return np.sum(np.where(mask, a, 0), axis, **keep) / np.sum(mask, axis, dtype=a.dtype, **keep)
        a = np.where(where, a, np.asarray(neutral, a.dtype)[()])
    if initial is None:
        return fun(a, *rest, **kwargs)
    axes = range(a.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    if fun in (np.max, np.min) and any(a.shape[d] == 0 for d in axes):  # of nothing there is none
        shape = np.empty(a.shape, bool).any(axis=axis, keepdims=kwargs.get("keepdims", False)).shape
        return np.full_like(a, initial, shape=shape)
    return _JOIN[fun](fun(a, *rest, **kwargs), initial)


_otherwise: dict[Any, Callable[..., Any]] = {
    np.sort: _sort,
    np.argsort: _argsort,
    np.clip: _clip,
    **{fun: partial(_reduced, fun) for fun in _NEUTRAL},
}
"""Functions with options that CuPy's have by another name, or not at all."""
