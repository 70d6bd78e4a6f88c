"""Arrays of a device beside constants of the host, and beside what CuPy does not take.

CuPy takes no arrays of NumPy as operands. A body that writes `x + np.zeros(3)` means an array where x is: so what fails
for that reason is done again with the constants on x's device. What CuPy has not, or not with these options, is done
otherwise, or composed of functions that it has. Only what has failed comes here, so arrays of NumPy pay nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from spmd.autodiff.primitive import composites, handlers
from spmd.autodiff.program import whole_line
from spmd.errors import JitError, StateError, describe, message

__all__ = [
    "ALONE",
    "again",
    "arrays",
    "at",
    "beside",
    "is_array",
    "on_host",
    "pulled_again",
    "register",
    "run",
    "stepwise",
    "to_host",
]

_modules: list[Any] = []
"""CuPy, once one of its arrays may come."""


def register(module: Any) -> None:
    """Arrays of this module may come from now on."""
    if module not in _modules:
        _modules.append(module)


def is_array(x: object) -> bool:
    """Whether x is an array of a device."""
    if type(x).__module__.partition(".")[0] != "cupy":
        return False
    if not _modules:  # no mesh of a device has been made: the user has
        register(sys.modules["cupy"])
    return isinstance(x, _modules[-1].ndarray)


def to_host(x: Any) -> Any:
    """Bare data on the host; waits for what computes it."""
    return x.get() if is_array(x) else x


def beside(a: Any, x: Any) -> Any:
    """An array of the host where x lies, if that is on a device."""
    if type(a) is not np.ndarray or not is_array(x):
        return a
    with x.device:
        return _modules[-1].asarray(a)


def at(ufunc: Any, out: Any, index: Any, v: Any) -> None:
    """ufunc.at(out, index, v), also on a device, where NumPy's does not find CuPy's if the index is a list or tuple."""
    if is_array(out):
        getattr(_modules[-1], ufunc.__name__).at(out, index, v)
    else:
        ufunc.at(out, index, v)


def arrays(tree: Any) -> Iterator[Any]:
    """The arrays of a device in tuples, lists and dicts."""
    if is_array(tree):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from arrays(x)
    elif isinstance(tree, dict):
        yield from arrays(list(tree.values()))


def on_host(tree: Any) -> Any:
    """Bare data, and what lies in tuples, lists and dicts, on the host; waits for what computes it."""
    if isinstance(tree, tuple | list):
        return type(tree)(on_host(x) for x in tree)
    if isinstance(tree, dict):
        return {k: on_host(v) for k, v in tree.items()}
    return to_host(tree)


def _moved(tree: Any, module: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return module.asarray(tree)
    if isinstance(tree, tuple | list):
        parts = [_moved(x, module) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def run(fun: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function of NumPy on bare data, which may be of a device."""
    try:
        return fun(*args, **kwargs)
    except Exception as error:
        return again(fun, list(args), kwargs, error, getattr(fun, "__name__", "a function"))


_REFUSALS = (TypeError, ValueError, AttributeError, IndexError, NotImplementedError)
"""What CuPy raises where it does not take an argument; anything else has another reason."""


def again(fun: Callable, args: list[Any], kwargs: dict[str, Any], error: Exception, name: str) -> Any:
    """What has failed with an error, computed with constants of the host on the device of the arrays beside them.

    args becomes what it was computed from. Without arrays of a device the error is raised as it is.
    """
    if type(error) is JitError and error.looked:
        return whole_line(fun, args, kwargs, error)
    if not isinstance(error, _REFUSALS) or type(error).__module__.startswith("spmd"):
        raise error
    there = next(arrays([args, kwargs]), None)
    if there is None:
        raise error
    with there.device:
        args[:] = [_moved(a, _modules[-1]) for a in args]
        kwargs = {k: _moved(v, _modules[-1]) for k, v in kwargs.items()}
        second: Exception = error
        for way in _ways(fun):
            try:
                return way(*args, **kwargs)
            except (TypeError, AttributeError, NotImplementedError) as failed:
                if type(failed).__module__.startswith("spmd"):
                    raise
                second = failed
        raise StateError(
            message(
                name,
                got=f"{describe(there)} on a GPU, which CuPy's function does not take: {second}",
                need="a function, and options, that CuPy has too",
                mend="compose it of others; or a host function on spmd.block(x).get(), which waits for the GPU",
            )
        ) from error


def _ways(fun: Any) -> Iterator[Callable[..., Any]]:
    """How a function may be computed on a device: as it is, and composed of others."""
    from spmd.autodiff.otherwise import otherwise

    yield otherwise(fun)
    composed = handlers.get(fun) if fun in composites else fun
    if getattr(composed, "__module__", "").startswith("spmd.") and composed not in _composing.get():
        yield partial(stepwise, composed)


_composing: ContextVar[tuple[Any, ...]] = ContextVar("composing", default=())
"""The functions that are being done step by step: a composition that needs itself has an end."""


class _Alone:
    """The state of arrays outside of any body while a function is done step by step: they are tracked, that is all."""

    varying = frozenset[str]()

    def __repr__(self) -> str:
        return "device"


ALONE = _Alone()


def stepwise(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of NumPy's functions on bare data of a device, each of which is done again where CuPy refuses it.

    Arrays take part in NumPy's functions by way of the tracer; so they are traced, on no tape.
    """
    from spmd.autodiff import tracer

    state = tracer.mixing.ambient() or ALONE

    def tracked(tree: Any) -> Any:
        if is_array(tree):
            return tracer.Array(tree, state)
        if isinstance(tree, tuple | list):
            parts = [tracked(x) for x in tree]
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        return tree

    token = _composing.set((*_composing.get(), fun))
    try:
        return tracer.bare(fun(*map(tracked, args), **{k: tracked(v) for k, v in kwargs.items()}))
    finally:
        _composing.reset(token)


def pulled_again(pull: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """What a derivative rule that has failed gives when it is done step by step; the error where it fails again."""
    if type(error) is JitError and error.looked:
        return whole_line(pull, args, kwargs, error)
    if not isinstance(error, _REFUSALS) or type(error).__module__.startswith("spmd"):
        raise error
    there = next(arrays([args, kwargs]), None)
    if there is None or pull in _composing.get():
        raise error
    with there.device:
        try:
            return stepwise(pull, *args, **kwargs)
        except StateError:
            raise
        except Exception:
            raise error from None
