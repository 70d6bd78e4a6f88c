"""Run a primitive on arrays of any level and state, and record it if an argument is differentiated."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from spmd.autodiff import cupy_fallback, tracer
from spmd.autodiff.admission import admit
from spmd.autodiff.allocation import owns_memory, writable
from spmd.autodiff.primitive import NOTHING, VALUE, Plan, Primitive, constants, handlers, name_of
from spmd.autodiff.staging.recorder import Number, slot_of
from spmd.autodiff.tape import Bundle, Like, Node, Tape
from spmd.autodiff.tracer import BARE_OPERANDS, OPERANDS, PLAIN_TYPES, USUAL, Array, bare, find, value_of
from spmd.errors import (
    DifferentiationError,
    StateError,
    TracedConversionError,
    describe,
)

__all__ = [
    "apply",
    "apply_binary",
    "apply_unary",
    "compute",
    "compute_bare",
    "is_elsewhere",
    "is_ours",
    "joined",
    "operand",
    "part",
    "read_only_views",
    "record",
    "signature_of",
    "split_arrays",
    "takes_over",
    "weak",
    "wrap",
]


def apply(prim: Primitive, args, kwargs):
    """Run a primitive on arrays of any level and state, and record it if an argument is differentiated."""
    top = first = state = None
    mixed = False
    for a in args:
        if type(a) is Array:
            if first is None:
                first, state = a, a.state
            elif a.state is not state:
                mixed = True
            tape = a.tape
            if tape is not top and tape is not None and (top is None or tape.level > top.level):
                top = tape
    if kwargs and not PLAIN_TYPES.issuperset(map(type, kwargs.values())) and find(kwargs, []):
        return _with_keyword_arrays(prim, args, kwargs)
    if mixed:
        joined, state = tracer.mixing.join([a for a in args if type(a) is Array])
        rest = iter(joined)
        args = [next(rest) if type(a) is Array else a for a in args]
    if top is None:
        bared = [a.value if type(a) is Array else a for a in args]
        try:
            ans = prim.fun(*bared, **kwargs)
        except Exception as error:
            ans = cupy_fallback.retry(prim.fun, bared, kwargs, error, prim.name)
        return wrap(ans, state)
    lower, likes, parents, deeper, key = [], [], [], False, 1
    for a in args:
        key <<= 1
        like = None
        if type(a) is Array:
            tape = a.tape
            if tape is top:
                like = a.node
                parents.append(like)
                key |= 1
                a = a.value
                deeper = deeper or type(a) is Array
            elif tape is None:
                a = a.value
            else:
                deeper = True
        elif type(a) is list or (type(a) is tuple and Array in map(type, a)):
            if find(a, []):
                raise _inside(prim, a)
            a = _copied(a)
        lower.append(a)
        likes.append(like)
    if state is None and (alike := _alike(args, lower)) is not args:
        return apply(prim, alike, kwargs)
    plan = prim.plans.get(key) or prim.plan(key)
    options = plan.chosen(kwargs) if kwargs else kwargs
    try:
        ans = apply(prim, lower, kwargs) if deeper else prim.fun(*lower, **kwargs)
    except Exception as error:
        if deeper:
            raise
        ans = cupy_fallback.retry(prim.fun, lower, kwargs, error, prim.name)
    return _recorded(plan, parents, lower, likes, options, ans, state, top)


def _alike(args, values):
    """Operands outside of maps, and in no other form than they are where all values are bare."""
    return args if BARE_OPERANDS.issuperset(map(type, values)) else tracer.mixing.alike(args)


def _copied(tree):
    """Copies of nested lists (of indices, of axes), which their owner may change later; the rest unchanged."""
    return [_copied(t) for t in tree] if type(tree) is list else tree


def _no_array(prim: Primitive, ans) -> Exception:
    return DifferentiationError.at(
        prim.name,
        argument="result",
        got=describe(ans),
        need="an array, a number, or a tuple of arrays, as results that a tape records",
        mend="return a tuple",
    )


def _inside(prim: Primitive, a) -> Exception:
    return TracedConversionError.at(
        prim.name,
        got=f"a traced array within a {type(a).__name__}",
        need="arrays as arguments of their own; a list of them would be converted, and cut off from its gradient",
        mend="np.stack([a, b]) in place of [a, b]; in a function of your own, f(*arrays) with a rule for each, "
        "or spmd.custom_vjp, whose arguments are pytrees",
    )


def _recorded(plan: Plan, parents, args: list, likes, options, ans, state, tape: Tape):
    """Record a result with what its rules need; one without derivative is not recorded."""
    try:
        shape, dtype = ans.shape, ans.dtype
        if dtype.kind in "biu":
            return wrap(ans, state)
    except AttributeError:
        if isinstance(ans, tuple):
            shape, dtype = None, None
        elif isinstance(slot_of(ans), float | complex):
            shape, dtype = (), weak(ans)
        elif isinstance(slot_of(ans), int):
            return wrap(ans, state)
        else:
            raise _no_array(plan.prim, ans) from None
    for i, keep in enumerate(plan.keeps):
        if keep is not VALUE:
            args[i] = None if keep is NOTHING else _like(args[i] if likes[i] is None else likes[i])
    args.insert(0, ans if plan.keep_ans else None)
    node = Node(plan.prim, plan.pulls, parents, args, options, shape, dtype)
    tape.open.append(node)
    return Array(ans, state, tape, node) if shape is not None else _parts(ans, state, tape, node)


# `apply` for one and for two operands in the common case: one tape at most, no nested Arrays.


def apply_unary(prim: Primitive, x: Array):
    """`apply` for one Array."""
    value = x.value
    if type(value) is not NDARRAY and type(value) not in USUAL:
        return apply(prim, (x,), NO_OPTIONS)
    try:
        ans = prim.fun(value)
    except Exception as error:
        ans = cupy_fallback.retry(prim.fun, [value], NO_OPTIONS, error, prim.name)
    if type(ans) is not NDARRAY and type(ans) not in USUAL:
        return _unusual(prim, x, ans)
    tape = x.tape
    if tape is None:
        return Array(ans, x.state) if x.state is not None else ans
    dtype = ans.dtype
    if dtype is not FLOAT and dtype.kind in "biu":
        return wrap(ans, x.state)
    pulls, keeps_ans, keeps_x = prim.unary or prim.plan_unary()
    parent = x.node
    # Without the constructors of Node and Array: this is the hottest path.
    node = _new(Node)
    node.prim = prim
    node.pulls = pulls
    node.parents = (parent,)
    node.args = (ans if keeps_ans else None, value if keeps_x else parent)
    node.kwargs = NO_OPTIONS
    node.shape = ans.shape
    node.dtype = dtype
    tape.open.append(node)
    if looked_at:
        return Array(ans, x.state, tape, node)
    result = _new(Array)
    result.value = ans
    result.state = x.state
    result.tape = tape
    result.node = node
    return result


def _unusual(prim: Primitive, x: Array, ans):
    """The end of `apply_unary` for several results, and for a scalar of another type."""
    if x.tape is None:
        return wrap(ans, x.state)
    plan = prim.plans.get(3) or prim.plan(3)
    return _recorded(plan, (x.node,), [x.value], [x.node], NO_OPTIONS, ans, x.state, x.tape)


def apply_binary(prim: Primitive, x, y, into: Array | None = None, ufunc: Any = None):
    """`apply` for two operands, at least one of them an Array.

    into: the operand whose data the result, which `ufunc` computes, may overwrite; the operand is invalid then.
    """
    if type(x) is Array:
        tape, state, a, left = x.tape, x.state, x.value, x.node
        if type(y) is Array:
            if y.state is not state:
                (x, y), state = tracer.mixing.join([x, y])
                tape, a, left, into = x.tape, x.value, x.node, None
            b, right, key = y.value, y.node, 7
            if y.tape is not tape:
                if y.tape is None:
                    right, key = b, 6
                elif tape is None:
                    tape, left, key = y.tape, a, 5
                else:
                    return apply(prim, (x, y), NO_OPTIONS)
        else:
            b, right, key = y, y, 6
    else:
        tape, state, a, b, left, right, key = y.tape, y.state, x, y.value, x, y.node, 5
    if type(a) not in BARE_OPERANDS or type(b) not in BARE_OPERANDS:
        return apply(prim, (x, y), NO_OPTIONS)
    if left is right and prim.same is not None and type(a) in USUAL and tape is not None:
        return apply_unary(prim.same, x)
    plan = prim.plans.get(key) or prim.plan(key) if tape is not None else None
    if into is not None and (plan is None or plan.keeps[into is not x] is not VALUE):
        ans = ufunc(a, b, out=into.value)
        into.value = TAKEN
    else:
        try:
            ans = prim.fun(a, b)
        except Exception as error:
            ans = cupy_fallback.retry(prim.fun, pair := [a, b], NO_OPTIONS, error, prim.name)
            a, b = pair
    if plan is None or tape is None:
        return Array(ans, state) if state is not None and type(ans) in USUAL else wrap(ans, state)
    parents = (left, right) if key == 7 else (left,) if key == 6 else (right,)
    if type(ans) not in USUAL:
        return _recorded(plan, parents, [a, b], [left, right], NO_OPTIONS, ans, state, tape)
    dtype = ans.dtype
    if dtype is not FLOAT and dtype.kind in "biu":
        return wrap(ans, state)
    first, second = plan.keeps
    args = (
        ans if plan.keep_ans else None,
        a if first is VALUE else None if first is NOTHING else _like(left),
        b if second is VALUE else None if second is NOTHING else _like(right),
    )
    node = Node(prim, plan.pulls, parents, args, NO_OPTIONS, ans.shape, dtype)
    tape.open.append(node)
    return Array(ans, state, tape, node)


def _like(x):
    """What the tape keeps of an operand without its value: its node, or its shape and dtype."""
    return Like(x.shape, x.dtype) if hasattr(x, "dtype") and not isinstance(x, Node) else x


class _Taken:
    """The value of a temporary whose data a result has overwritten; every use raises."""

    def __getattr__(self, name: str):
        raise StateError.at(
            "an array",
            got="a temporary array, used again after an operator had written its result into it",
            need="arrays that Python code holds in a variable while it needs them",
            mend="assign it to a variable before the operator, in code that is compiled to C",
        )


TAKEN: Any = _Taken()
FLOAT, NDARRAY = np.dtype(float), np.ndarray
NO_OPTIONS: dict[str, Any] = {}
looked_at = False
"""Whether `Array.__init__` checks every new array, for `spmd.debug`."""
_new: Any = object.__new__
_SELECT = Primitive(None, "select", (lambda g, ans, k: Bundle({k: g}),))


def part(node: Node, k: int, value, state, tape: Tape) -> Array:
    """Result k of a node with several results, recorded as a node of its own."""
    return Array(value, state, tape, record(tape, _SELECT, [node], (k,), getattr(value, "shape", ()), value.dtype))


def _parts(ans: Any, state, tape: Tape, node: Node):
    """The results of a function with several; integers and booleans have no derivative."""
    node.results = tuple(Like(a.shape, a.dtype) for a in ans)
    parts = [part(node, k, a, state, tape) if a.dtype.kind not in "biu" else wrap(a, state) for k, a in enumerate(ans)]
    return type(ans)(*parts) if hasattr(ans, "_fields") else tuple(parts)


def weak(number: float | complex):
    """The dtype of a node for a Python number: None for a real one, which is weakly typed."""
    return np.dtype(complex) if isinstance(slot_of(number), complex) else None


def _with_keyword_arrays(prim: Primitive, args, kwargs):
    """Apply with arrays given by keyword: moved to their positions if these follow, else taken as constants."""
    names = [p.name for p in signature_of(prim.fun) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    args, kwargs = list(args), dict(kwargs)
    while len(args) < len(names) and names[len(args)] in kwargs:
        args.append(kwargs.pop(names[len(args)]))
    arrays, extra = [a for a in args if type(a) is Array], find(kwargs, [])
    if any(a.tape is not None for a in extra):
        raise _keyword_array(prim)
    if all(a.tape is None for a in arrays):
        return compute(prim.fun, args, kwargs)
    joined = iter(
        arrays if all(a.state is arrays[0].state for a in arrays + extra) else tracer.mixing.join(arrays + extra)[0]
    )
    return apply(prim, [next(joined) if type(a) is Array else a for a in args], bare(kwargs))


def signature_of(fun):
    try:
        return inspect.signature(fun).parameters.values()
    except ValueError:
        return ()


def record(tape: Tape, prim: Primitive, parents: list[Node | None], args: tuple, shape, dtype) -> Node:
    """Record a result that was computed elsewhere; `args` is what the rule is given."""
    node = Node(prim, prim.rules, parents, (None, *args), NO_OPTIONS, shape, dtype)
    tape.open.append(node)
    return node


def wrap(ans, state) -> Any:
    """Give results their state; outside of maps constants are bare."""
    if state is None:
        return ans
    if type(ans) is np.ndarray:
        return Array(ans, state)
    if isinstance(ans, tuple | list):
        parts = (wrap(a, state) for a in ans)
        return type(ans)(*parts) if hasattr(ans, "_fields") else type(ans)(parts)
    return Array(ans, state) if hasattr(ans, "dtype") or isinstance(ans, int | float | complex | Number) else ans


def compute(fun, args, kwargs) -> Any:
    """Run a function on bare data and give the results the joined state of all arrays in its arguments."""
    return compute_bare(fun, *split_arrays(args, kwargs))


def operand(x, where: str) -> Any:
    """x as an operand beside an Array: arrays of NumPy are admitted, in lists and tuples too; the rest is unchanged.

    Raises if x is an array whose operations mean something else, or are recorded by another library.
    """
    kind = type(x)
    if kind is list or kind is tuple:
        return kind([operand(part, where) for part in x])
    if kind in OPERANDS:
        return x
    if isinstance(x, np.ndarray):
        return admit(x, where, None, need="a plain array", beside=" beside an Array", name="m")
    if is_elsewhere(kind):
        raise TracedConversionError.at(
            where,
            got=f"{describe(x)} beside an Array",
            need="arrays of NumPy or CuPy: other libraries do not record on this tape, nor it on theirs",
            mend="np.asarray(x) of it, where it is a constant; spmd.custom_vjp around the other library",
        )
    return x


@functools.lru_cache(maxsize=256)
def is_ours(kind: type) -> bool:
    """Whether arrays of a class are ours, NumPy's or CuPy's."""
    return issubclass(kind, np.ndarray) or kind.__module__.partition(".")[0] in ("spmd", "cupy")


@functools.lru_cache(maxsize=256)
def takes_over(kind: type) -> bool:
    """Whether NumPy's ufuncs are left to operands of a class, or refused by it (`__array_ufunc__ = None`)."""
    if is_ours(kind) or not hasattr(kind, "__array_ufunc__"):
        return False
    return not is_elsewhere(kind)


def is_elsewhere(kind: type) -> bool:
    """Whether arrays of a class are recorded by another library, for its own derivatives."""
    of_torch = hasattr(kind, "__torch_function__") and hasattr(kind, "requires_grad")  # not a handle that refuses both
    return of_torch or kind.__module__.partition(".")[0] in ("jax", "jaxlib")


def joined(arrays) -> list[Any]:
    """Arrays, bare ones too, brought to one state, for functions that return all their arguments."""
    some = find(list(arrays), [])
    if not some or some[0].state is None or some[0].state is cupy_fallback.DEVICE_STATE:
        return list(arrays)
    ambient = tracer.mixing.ambient()
    return tracer.mixing.join([a if type(a) is Array else Array(np.asarray(a), ambient) for a in arrays])[0]


def compute_bare(fun, args, kwargs, arrays: list[Array]) -> Any:
    """The end of `compute`, with the bare arguments and the arrays that were among them."""
    if not arrays:
        raise _hidden(fun)
    state = arrays[0].state
    for a in arrays:
        if a.state is not state:
            state = tracer.mixing.join([Array(value_of(a), a.state) for a in arrays])[1]
            break
    if fun not in handlers and fun not in constants:
        args, kwargs = read_only_views(args), read_only_views(kwargs)
    try:
        ans = fun(*args, **kwargs)
    except Exception as error:
        ans = cupy_fallback.retry(fun, list(args), kwargs, error, name_of(fun))
    return wrap(_unshared(ans), state)


def _hidden(fun) -> Exception:
    return TracedConversionError.at(
        name_of(fun),
        got="an Array as like=, or within an object of another class",
        need="arrays as arguments, or in lists, tuples and dicts",
        mend="pass the array itself; leave like out",
    )


def split_arrays(args, kwargs) -> tuple[Any, Any, list[Array]]:
    """The bare arguments, and the Arrays among them."""
    arrays: list[Array] = []
    args = [_bared(a, arrays) for a in args]
    return args, {k: _bared(v, arrays) for k, v in kwargs.items()} if kwargs else kwargs, arrays


def _bared(tree, into: list[Array]) -> Any:
    """`bare(tree)`; appends its Arrays to `into`."""
    kind = type(tree)
    if kind is Array:
        into.append(tree)
        return value_of(tree)
    if kind is np.ndarray or kind is int:
        return tree
    if kind is tuple or kind is list:
        values = []
        for t in tree:
            if type(t) is Array and type(t.value) is np.ndarray:
                into.append(t)
                values.append(t.value)
            else:
                values.append(_bared(t, into))
        return values if kind is list else tuple(values)
    if isinstance(tree, tuple | list | dict | slice):
        find(tree, into)
        return bare(tree)
    return tree


def _unshared(ans):
    """Results that are no views: the owner of a bare argument could write to a view of it."""
    if type(ans) is np.ndarray:
        return ans if owns_memory(ans) or not writable(ans) else ans.copy()
    if isinstance(ans, tuple | list):
        parts = [_unshared(a) for a in ans]
        return type(ans)(*parts) if hasattr(ans, "_fields") else type(ans)(parts)
    return ans


def read_only_views(tree) -> Any:
    """Read-only views of arrays, for functions without a rule."""
    if isinstance(tree, np.ndarray):
        view = tree.view()
        view.flags.writeable = False
        return view
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return type(tree)(read_only_views(t) for t in tree)
    if isinstance(tree, dict):
        return {k: read_only_views(v) for k, v in tree.items()}
    return tree


def _keyword_array(prim: Primitive) -> Exception:
    return DifferentiationError.at(
        prim.name,
        got="a traced array passed by keyword",
        need="array arguments by position",
        mend="write it without the keyword",
    )
