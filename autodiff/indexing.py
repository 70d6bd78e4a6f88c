"""Indexing, its transpose, and changed copies: x[i], `scatter_add`, `x.at[i].set(v)`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from spmd.autodiff import devices, tracer
from spmd.autodiff.admission import admit
from spmd.autodiff.apply import FLOAT, NO_OPTIONS
from spmd.autodiff.dtypes import cotangent_dtype, kind_of_dtype
from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.program import SUMS_IN_PLACE
from spmd.autodiff.staging.recorder import one_line
from spmd.autodiff.tape import Node
from spmd.autodiff.tracer import USUAL, Array, bare, find, value_of
from spmd.errors import DtypeError, describe
from spmd.tracebacks import api_boundary

__all__ = ["At", "astype", "at", "define_indexing", "scatter_add"]

Changed = TypeVar("Changed")

_NUMBERS = {int, type(None)}
_BASIC = {int, slice, type(None), type(Ellipsis)}
_NO_ARRAYS = {int, np.ndarray, type(None), type(Ellipsis)}


def _holds_no_arrays(index) -> bool:
    """Whether an index is seen at once to hold no array of ours."""
    for part in index if type(index) is tuple else (index,):
        if type(part) is slice:
            if not (type(part.start) in _NUMBERS and type(part.stop) in _NUMBERS and type(part.step) in _NUMBERS):
                return False
        elif type(part) not in _NO_ARRAYS:
            return False
    return True


def _is_basic(index) -> bool:
    """Whether an index takes each entry once, by numbers and slices."""
    parts = index if type(index) is tuple else (index,)
    if _BASIC.issuperset(map(type, parts)):
        return True
    return all(p is None or p is Ellipsis or isinstance(p, int | np.integer | slice) for p in parts)


def _is_mask(index) -> bool:
    """Whether an index is a boolean mask, which takes each entry at most once."""
    return isinstance(index, bool | np.bool_) or getattr(getattr(index, "dtype", None), "kind", "") == "b"


def _places(x, index):
    """The positions in x, in C order, of the entries that an index takes."""
    return np.reshape(np.arange(x.size, like=value_of(x)), x.shape)[index]


def _add_into(out, index, v) -> None:
    """out[index] += v, for repeated positions as often as they stand there."""
    if _is_basic(index) or _is_mask(index):
        out[index] += v
    elif type(out) is not np.ndarray or out.ndim < 2 or not out.flags.c_contiguous:
        devices.at(np.add, out, index, v)
    else:  # NumPy is several times quicker in one dimension
        places = _places(out, index)
        np.add.at(out.reshape(-1), places.reshape(-1), np.broadcast_to(v, places.shape).reshape(-1))


def _scattered(g, shape, index):
    scatter = _scatter_once if _is_basic(index) or _is_mask(index) else _scatter
    return scatter(g, shape, index) if type(g) is np.ndarray else one_line(scatter, (g, shape, index), fresh=True)


def _scatter_once(g, shape, index):
    """For an index that takes each entry at most once."""
    out = np.zeros(shape, g.dtype) if type(g) is np.ndarray else np.zeros_like(g, shape=shape)
    out[index] = g
    return out


def _scatter(g, shape, index):
    dtype = cotangent_dtype(g.dtype) or g.dtype
    out = np.zeros(shape, dtype) if type(g) is np.ndarray else np.zeros_like(g, shape=shape, dtype=dtype)
    _add_into(out, index, g)
    return out if out.dtype == g.dtype else out.astype(g.dtype)


def _added(total, g, _shape, index):
    """total with g added at an index, in place."""
    total[index] += g
    return total


SUMS_IN_PLACE[_scatter_once] = _added


@primitive("scatter_add", lambda g, _ans, _v, _shape, index: g[index])
def scatter_add(g, shape, index):
    """Zeros of `shape` with g added at `index`; the transpose of indexing."""
    return _scattered(g, shape, index)


@primitive(
    "x[i]",
    lambda g, _ans, _x, index: (scatter_add if type(g) is Array else _scattered)(g, _x.shape, index),
    into=lambda total, g, _ans, _x, index: _add_into(total, index, g),
)
def _getitem(x, index):
    return x[index]


_GET = _getitem.primitive  # type: ignore[attr-defined]


def _get(x: Array, index):
    """x[index]; Arrays in the index are integers or masks, whose state the result has too."""
    tape, value = x.tape, x.value
    simple = _holds_no_arrays(index)
    if simple and tape is None and x.state is not None and type(value) is np.ndarray:
        ans = value[index]
        return Array(ans, x.state)
    if not simple or tape is None or type(value) not in USUAL:
        if x.state is None and (instead := tracer.mixing.function(operator.getitem, (x, index), {})) is not None:
            return instead(x, index)
        arrays = find(index, [])
        if any(a.state is not x.state for a in arrays):
            x = tracer.mixing.join([x, *[Array(value_of(a), a.state) for a in arrays]])[0][0]
        return _getitem(x, bare(index) if arrays else index)
    ans = value[index]
    dtype = ans.dtype
    if dtype is not FLOAT and dtype.kind in "biu":
        return _getitem(x, index)
    plan = _GET.plans.get(6) or _GET.plan(6)
    parent = x.node
    node = Node(_GET, plan.pulls, (parent,), (None, parent, index), NO_OPTIONS, ans.shape, dtype)
    tape.open.append(node)
    return Array(ans, x.state, tape, node)


@primitive("astype", lambda g, _ans, _x, _dtype: g)
def astype(x, dtype):
    """x in another dtype."""
    return x.astype(dtype) if hasattr(x, "astype") else np.asarray(x, dtype)


# Changed copies. Where a position stands several times in an index, each of its values counts, as in JAX.


def _last(g, index):
    """The entries of g at index; zero for those that a later entry of the index overwrites."""
    if _is_basic(index) or _is_mask(index):
        return g[index]
    writer = np.full_like(value_of(g), -1, dtype=int)
    order = np.reshape(np.arange(writer[index].size, like=writer), writer[index].shape)
    writer[index] = order
    return g[index] * (writer[index] == order)


def _cleared(g, index) -> Any:
    """g with zeros at index."""
    return _set(g, 0.0, index)


@primitive(
    "x.at[i].set", lambda g, _ans, _x, _v, index: _cleared(g, index), lambda g, _ans, _x, _v, index: _last(g, index)
)
def _set(x, v, index):
    return one_line(_with_set, (x, v, index))


def _with_set(x, v, index):
    out = np.copy(x)
    out[index] = v
    return out


@primitive("x.at[i].add", lambda g, _ans, _x, _v, index: g, lambda g, _ans, _x, _v, index: g[index])
def _add(x, v, index):
    return one_line(_with_added, (x, v, index))


def _with_added(x, v, index):
    out = np.copy(x)
    _add_into(out, index, v)
    return out


def _share(g, ans, x, v, index):
    """g divided by how many of x and v attain the extreme."""
    attained = _add((x == ans).astype(g.dtype), (v == ans[index]).astype(g.dtype), index)
    return g / (attained + (attained == 0))


def _extreme(name: str, ufunc) -> Callable:
    """The larger or smaller of entries and what comes to them. Those that tie share the derivative."""

    @primitive(
        name,
        lambda g, ans, x, v, index: _share(g, ans, x, v, index) * (x == ans),
        lambda g, ans, x, v, index: _share(g, ans, x, v, index)[index] * (v == ans[index]),
    )
    def run(x, v, index):
        out = np.copy(x)
        devices.at(ufunc, out, index, v)
        return out

    return run


_max, _min = _extreme("x.at[i].max", np.maximum), _extreme("x.at[i].min", np.minimum)


def _in_turn(x, index, step: Callable, v=None):
    """x with step(x[i], v) at i; where a position stands several times, one after the other."""
    if _is_basic(index) or _is_mask(index):
        return _set(x, step(x[index], v), index)
    places = _places(x, index)
    v = devices.beside(v, value_of(x))
    v, places = None if v is None else np.ravel(np.broadcast_to(v, places.shape)), np.ravel(places)
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order), like=order) - np.repeat(begins, np.diff(begins, append=len(order)))
    flat = np.ravel(x)
    for k in range(int(turn.max()) + 1 if turn.size else 0):
        (chosen,) = np.nonzero(turn == k)
        at_once = places[chosen]
        flat = _set(flat, step(flat[at_once], None if v is None else v[chosen]), at_once)
    return np.reshape(flat, np.shape(x))


class At(Generic[Changed]):
    """`x.at[i].set(v)`, `.add`, `.subtract`, `.multiply`, `.divide`, `.power`, `.min`, `.max`, `.apply(f)`, `.get()`:
    changed copies of an array, traced or bare.

    v broadcasts to x[i]. Where i holds a position several times, `set` takes the last value, and the others apply
    every value. Extremes that tie share the derivative equally.
    Raises DtypeError where x cannot hold v.
    """

    __slots__ = ("array", "index")

    def __init__(self, array: Changed, index: Any = None):
        self.array = array
        self.index = index

    def __getitem__(self, index: Any) -> At[Changed]:
        return At(self.array, index)

    @api_boundary
    def get(self) -> Any:
        array: Any = self.array
        return array[self.index]

    @api_boundary
    def set(self, v: Any) -> Changed:
        return self._update("set", _set, v)

    @api_boundary
    def add(self, v: Any) -> Changed:
        return self._update("add", _add, v)

    @api_boundary
    def subtract(self, v: Any) -> Changed:
        return self._update(
            "add", _add, -v if hasattr(v, "dtype") or type(v) in (int, float, complex) else np.negative(v)
        )

    @api_boundary
    def multiply(self, v: Any) -> Changed:
        return self._update("multiply", lambda x, v, index: _in_turn(x, index, operator.mul, v), v)

    @api_boundary
    def divide(self, v: Any) -> Changed:
        return self._update("divide", lambda x, v, index: _in_turn(x, index, operator.truediv, v), v)

    @api_boundary
    def power(self, v: Any) -> Changed:
        return self._update("power", lambda x, v, index: _in_turn(x, index, operator.pow, v), v)

    @api_boundary
    def min(self, v: Any) -> Changed:
        return self._update("min", _min, v)

    @api_boundary
    def max(self, v: Any) -> Changed:
        return self._update("max", _max, v)

    @api_boundary
    def apply(self, f: Callable[[Any], Any]) -> Changed:
        """x with f(x[i]) at i; f acts entry by entry."""
        return self._update("apply", lambda x, _v, index: _in_turn(x, index, lambda y, _: f(y)), 0, f)

    def _update(self, name: str, update: Callable, v: Any, argument: Any = None) -> Any:
        """A method of this name. argument: that of the user, if it is not v."""
        x: Any = self.array
        if (x.state if type(x) is Array else None) is None:
            instead = tracer.mixing.function(At, (x, v, self.index), {})
            if instead is not None:
                return instead(x, self.index, name, v if argument is None else argument)
        arrays = find(self.index, [])
        if type(x) is not Array and isinstance(x, np.ndarray):
            x = admit(x, "spmd.at", error=DtypeError)
        if arrays:
            ambient = x if type(x) is Array else Array(x, tracer.mixing.ambient())
            x = tracer.mixing.join([ambient, *[Array(value_of(a), a.state) for a in arrays]])[0][0]
        if not hasattr(x, "dtype"):
            raise DtypeError.at(
                "spmd.at", argument="x", got=describe(x), need="an array", mend="spmd.at(np.asarray(x))[i]"
            )
        if not isinstance(v, Array | int | float | complex | list | tuple) and not devices.is_array(v):
            v = admit(v, "x.at[i]", "v", error=DtypeError)
        if isinstance(v, list | tuple):
            v = np.stack(v)
        comes = np.result_type(value_of(v))
        if -1 < _rank(x.dtype) < _rank(comes):
            raise DtypeError.at(
                "x.at[i]",
                argument="v",
                got=f"{comes} for an array of {x.dtype}",
                need=f"values that {x.dtype} can hold: others would be cut, and their gradient lost",
                mend=f"x.astype({str(comes)!r}).at[i], or convert v",
            )
        return update(x, v, bare(self.index))


def _rank(dtype) -> int:
    """Boolean, integer, floating, complex: each holds those before it. -1 for anything else."""
    return "bifc".find("b" if dtype.kind == "b" else kind_of_dtype(dtype) or "?")


def at(x: Changed) -> At[Changed]:
    """Changed copies of x, which may be bare or traced: `spmd.at(x)[i].set(v)`.

    >>> spmd.at(np.zeros(3))[1].set(5.0)
    array([0., 5., 0.])
    >>> spmd.grad(lambda x: np.sum(spmd.at(x)[1].set(5.0) ** 2))(np.arange(3.0))
    array([0., 0., 4.])
    """
    return At(x)


def define_indexing() -> None:
    """Give Array x[i] and x.at."""
    Array.__getitem__ = _get  # type: ignore[attr-defined]
    Array.at = property(at)  # type: ignore[attr-defined]
