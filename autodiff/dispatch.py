"""What a NumPy function does when one of its arguments is an Array."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff import devices, tracer
from spmd.autodiff.apply import (
    apply,
    apply_binary,
    apply_unary,
    compute,
    compute_bare,
    is_ours,
    operand,
    signature_of,
    split_arrays,
    takes_over,
)
from spmd.autodiff.primitive import (
    Method,
    composites,
    constants,
    handlers,
    in_place,
    lazy_rules,
    method_rules,
    name_of,
    numpy_valued,
    primitives,
    refusals,
)
from spmd.autodiff.tracer import ARRAY_TYPES, OPERANDS, SEQUENCES, Array, value_of
from spmd.errors import (
    DifferentiationError,
    DtypeError,
    StateError,
    describe,
    nearest,
)

__all__ = ["by_numpy", "creators", "dispatch", "load_families"]


def _no_mask(fun, where: Array) -> Exception:
    return DtypeError.at(name_of(fun), argument="where", got=describe(where), need="a mask of booleans", mend="x != 0")


def dispatch(fun, args, kwargs):
    """What a NumPy function does when one of its arguments is an Array."""
    out = kwargs.pop("out", None) if kwargs else None
    if out is not None and not (isinstance(out, tuple) and all(o is None for o in out)):
        raise StateError.at(
            name_of(fun),
            argument="out",
            got="an array to write into",
            need="no out: arrays are immutable",
            mend=f"use the result: y = {name_of(fun)}(...); for `y += x`: y = y + x",
        )
    if kwargs and type(where := kwargs.get("where")) is Array and where.dtype.kind != "b":
        raise _no_mask(fun, where)
    handler = handlers.get(fun)
    if fun in primitives:
        return handler(*args, **kwargs)  # type: ignore[misc]
    if handler is None and fun not in constants and fun not in refusals:
        load_families()
        handler = handlers.get(fun)
    if fun in constants:
        return compute(fun, args, kwargs)
    if fun in in_place:
        raise _no_rule(fun)
    if handler is None or fun in composites:
        split = split_arrays(args, kwargs)
        for a in split[2]:
            if a.tape is not None:
                break
        else:
            return compute_bare(fun, *split)
        if handler is None:
            raise _no_rule(fun)
        if fun in numpy_valued:
            return _valued(fun, handler, args, kwargs, split)
    return handler(*args, **kwargs)


def by_numpy(fun, composition, *args, **kwargs):
    """composition(*args, **kwargs), with the value, the errors and the warnings of NumPy's own function."""
    return _valued(fun, composition, args, kwargs, split_arrays(args, kwargs))


def _valued(fun, composition, args, kwargs, split):
    if next(devices.arrays(split[:2]), None) is not None:  # a device has functions of its own
        return composition(*args, **kwargs)
    with np.errstate(all="ignore"):
        result = composition(*args, **kwargs)
    return _with_values(result, compute_bare(fun, *split))


def _with_values(result, exact):
    """Results with the values of `exact`, on the same tapes."""
    if type(result) is Array:
        value = value_of(exact)
        return _with_value(result, value) if getattr(value, "shape", ()) == result.shape else result
    if isinstance(result, tuple | list) and isinstance(exact, tuple | list):
        parts = [_with_values(r, e) for r, e in zip(result, exact, strict=True)]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result


def _with_value(x: Array, value) -> Array:
    """An Array with another value under all its levels."""
    return Array(_with_value(x.value, value) if type(x.value) is Array else value, x.state, x.tape, x.node)


@functools.cache
def place_of_out(fun) -> int:
    """The position of `out` among the arguments of a function."""
    parameters = signature_of(fun) or signature_of(handlers.get(fun, fun))  # older NumPy has no signatures of its own
    return next((i for i, p in enumerate(parameters) if p.name == "out" and p.kind != p.KEYWORD_ONLY), 1000)


def load_families() -> None:
    """Load the remaining rules, those of other libraries only if these are imported."""
    for name, library in tuple(lazy_rules.items()):
        if library is None or library in sys.modules:
            importlib.import_module(name)  # a thread that comes meanwhile waits for the module too
            lazy_rules.pop(name, None)


def _no_rule(fun) -> Exception:
    names = {f.__name__: name_of(f) for f in tuple(handlers)}
    instead = refusals.get(fun)
    if fun in in_place:
        from spmd.autodiff.conversion_errors import find_converter

        # A function of NumPy that writes into what it makes has an override.
        instead = (find_converter(sys._getframe(3)) or ("", ""))[1] or instead
    nearest_names = [] if instead else [names[k] for k in nearest(fun.__name__, names)]
    return DifferentiationError.at(
        name_of(fun),
        got="an Array, which is immutable"
        if fun in in_place
        else "a traced array, and no derivative rule for this function",
        need=f"a function with a rule{'; the nearest are ' if nearest_names else ''}{', '.join(nearest_names)}",
        mend=instead
        or "compose it of functions with rules, declare it with spmd.custom_vjp, "
        "or cut its argument off with spmd.stop_gradient",
    )


creators: dict[Any, Callable[..., Any]] = {}
"""Functions that dispatch on an Array by `like=` only: creator(function, args, kwargs, array) makes the result."""


# How NumPy reaches an Array


def _array_ufunc(self, ufunc, method, first, *others, **kwargs):
    if not kwargs and method == "__call__":
        prim = primitives.get(ufunc)
        if prim is not None:
            if not others:
                return apply_unary(prim, self)
            if type(first) in OPERANDS and type(others[0]) in OPERANDS and len(others) == 1:
                return apply_binary(prim, first, others[0])
    inputs = (first, *others)
    if any(takes_over(type(x)) for x in inputs if type(x) not in OPERANDS):
        return NotImplemented
    inputs = tuple([operand(x, name_of(ufunc)) for x in inputs])
    if not SEQUENCES.isdisjoint(map(type, inputs)):
        inputs = tuple(np.asarray(a) if type(a) in SEQUENCES else a for a in inputs)
    if self.state is None and (method != "__call__" or ufunc.signature is not None):
        instead = tracer.mixing.function(ufunc if method == "__call__" else Method((ufunc, method)), inputs, kwargs)
        if instead is not None:
            return instead(*inputs, **kwargs)
    if method == "__call__":
        if kwargs and kwargs.pop("where", True) is not True:
            raise DifferentiationError.at(
                name_of(ufunc),
                argument="where",
                got="a mask",
                need="no where argument",
                mend="np.where(mask, f(x), other)",
            )
        return dispatch(ufunc, inputs, kwargs)
    key = Method((ufunc, method))
    if key not in handlers and key not in constants and key not in refusals:
        load_families()
        for declare in method_rules:
            declare(ufunc)
    return dispatch(key, inputs, kwargs)


def _array_function(self, fun, types, args, kwargs):
    if self.state is None:
        instead = tracer.mixing.function(fun, args, kwargs)
        if instead is not None:
            return instead(*args, **kwargs)
    if not ARRAY_TYPES.issuperset(types):
        name = name_of(fun)
        args = tuple([operand(x, name) for x in args])
        kwargs = {key: operand(x, name) for key, x in kwargs.items()}
        if any(t not in ARRAY_TYPES and not is_ours(t) for t in types):
            return NotImplemented
    prim = primitives.get(fun)
    if prim is not None and not kwargs and len(args) <= place_of_out(fun):
        return apply_unary(prim, self) if len(args) == 1 and args[0] is self else apply(prim, args, kwargs)
    if fun in creators:
        return creators[fun](fun, args, kwargs, self)
    if len(args) > 1 and len(args) > (place := place_of_out(fun)) and args[place] is not None:
        kwargs = {**kwargs, "out": args[place]}
    return dispatch(fun, args, dict(kwargs) if kwargs else kwargs)


Array.__array_ufunc__ = _array_ufunc  # type: ignore[attr-defined]
Array.__array_function__ = _array_function  # type: ignore[attr-defined]
