"""The traced array: plain NumPy syntax that records itself.

An `Array` holds a value, the state of that value (opaque here), and, where it is differentiated, a tape and its node
there. The value is bare data, or an `Array` of an outer differentiation: transformations nest by nesting arrays.

NumPy reaches an Array by its protocols (`np.tanh(x)`, `bare @ x`, `np.concatenate([x, y])`); operators reach it
directly. What a function does here stands in `autodiff/rules/`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.autodiff import devices, tree
from spmd.autodiff.admission import ADMITTED, admit
from spmd.autodiff.primitive import (
    NOTHING,
    VALUE,
    Like,
    Method,
    Plan,
    Primitive,
    composites,
    constants,
    handlers,
    in_place,
    name_of,
    primitives,
    refusals,
    valued,
)
from spmd.autodiff.program import Number, Slot, slot_of
from spmd.autodiff.rooms import owns_memory, writable
from spmd.autodiff.tape import Bundle, Node, Tape
from spmd.errors import (
    DifferentiationError,
    DtypeError,
    MissingMethodError,
    StateError,
    TracedConversionError,
    describe,
    message,
    nearest,
)

__all__ = [
    "Array",
    "Mixing",
    "apply",
    "bare",
    "by_numpy",
    "mixing",
    "record",
    "register_device_arrays",
    "use_mixing",
    "value_of",
]


class Mixing:
    """How operands of different state are brought together: the one hook for distributed meaning.

    This default knows one state, None: that of arrays outside of any map.
    """

    def ambient(self) -> Any:
        """The state of bare arrays here."""
        return None

    def join(self, arrays: list[Array]) -> tuple[list[Array], Any]:
        """The arrays brought to one state (those without a tape may stay as they are), and that state."""
        raise NotImplementedError

    def differentiates(self, leaves: list) -> None:
        """Arguments of a gradient that is about to be taken."""

    def bring(self, g, have, state):
        """A cotangent in state `have` brought to exactly `state`; arrays of more state than that are summed."""
        return g

    def kept(self, g: np.ndarray) -> np.ndarray:
        """A cotangent that a user gave, as one that may be kept, and handed on to others."""
        return g

    def settle(self, g, value):
        """A gradient in the form in which its argument `value` came."""
        return g

    def differentiated(self, scalar: Array) -> None:
        """A traced scalar whose gradient is asked for."""

    def whole(self, x: Array):
        """An array whose value is spread over workers, as one that is not."""
        return x


mixing = Mixing()


def use_mixing(hook: Mixing) -> None:
    global mixing
    mixing = hook


def value_of(x):
    """The bare data under x, through all levels."""
    while type(x) is Array:
        x = x.value
    return x


def bare(x) -> Any:
    """The bare data under every array in nested tuples, lists and dicts."""
    if type(x) is Array:
        return value_of(x)
    if isinstance(x, tuple | list):
        parts = [bare(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, dict):
        return {k: bare(v) for k, v in x.items()}
    if isinstance(x, slice):
        return slice(bare(x.start), bare(x.stop), bare(x.step))
    return x


def find(tree, into: list[Array]) -> list[Array]:
    """Every Array in nested tuples, lists, dicts and slices."""
    if type(tree) is Array:
        into.append(tree)
    elif isinstance(tree, tuple | list):
        for t in tree:
            find(t, into)
    elif isinstance(tree, dict):
        for t in tree.values():
            find(t, into)
    elif isinstance(tree, slice):
        find((tree.start, tree.stop, tree.step), into)
    return into


def apply(prim: Primitive, args, kwargs):
    """Run a primitive on arrays of any level and state, and record it where a rule will be asked for."""
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
    if kwargs and not _PLAIN.issuperset(map(type, kwargs.values())) and find(kwargs, []):
        return _with_keyword_arrays(prim, args, kwargs)
    if mixed:
        joined, state = mixing.join([a for a in args if type(a) is Array])
        rest = iter(joined)
        args = [next(rest) if type(a) is Array else a for a in args]
    if top is None:
        bared = [a.value if type(a) is Array else a for a in args]
        try:
            ans = prim.fun(*bared, **kwargs)
        except Exception as error:
            ans = devices.again(prim.fun, bared, kwargs, error, prim.name)
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
    plan = prim.plans.get(key) or prim.plan(key)
    options = plan.chosen(kwargs) if kwargs else kwargs
    try:
        ans = apply(prim, lower, kwargs) if deeper else prim.fun(*lower, **kwargs)
    except Exception as error:
        if deeper:
            raise
        ans = devices.again(prim.fun, lower, kwargs, error, prim.name)
    return _recorded(plan, parents, lower, likes, options, ans, state, top)


def _copied(tree):
    """Nested lists (of indices, of axes) as their owner cannot change them later; the rest as it is."""
    return [_copied(t) for t in tree] if type(tree) is list else tree


def _no_array(prim: Primitive, ans) -> Exception:
    return DifferentiationError(
        message(
            prim.name,
            argument="result",
            got=describe(ans),
            need="an array, a number, or a tuple of arrays, as results that a tape records",
            mend="return a tuple",
        )
    )


def _inside(prim: Primitive, a) -> Exception:
    return TracedConversionError(
        message(
            prim.name,
            got=f"a traced array within a {type(a).__name__}",
            need="arrays as arguments of their own; a list of them would be converted, and cut off from its gradient",
            mend="np.stack([a, b]) in place of [a, b]; in a function of your own, f(*arrays) with a rule for each, "
            "or spmd.custom_vjp, whose arguments are pytrees",
        )
    )


def _recorded(plan: Plan, parents, args: list, likes, options, ans, state, tape: Tape):
    """A result with what its rules ask for on the tape; one that has no derivative as it is."""
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


# The same for one and for two operands, where nothing is unusual: a tape of its own level, or none.


def apply_unary(prim: Primitive, x: Array):
    """As `apply`, of one Array."""
    value = x.value
    if type(value) is not NDARRAY and type(value) not in USUAL:
        return apply(prim, (x,), NO_OPTIONS)
    try:
        ans = prim.fun(value)
    except Exception as error:
        ans = devices.again(prim.fun, [value], NO_OPTIONS, error, prim.name)
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
    # The node and the result are made without their constructors: what is most often done, for a tenth of its time.
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
    """As `apply`, of two operands, of which one at least is an Array.

    into: the operand whose data may be written over by the result, which `ufunc` computes; it is of no use then.
    """
    if type(x) is Array:
        tape, state, a, left = x.tape, x.state, x.value, x.node
        if type(y) is Array:
            if y.state is not state:
                (x, y), state = mixing.join([x, y])
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
    if type(a) not in _operands or type(b) not in _operands:
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
            ans = devices.again(prim.fun, pair := [a, b], NO_OPTIONS, error, prim.name)
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
    """What is left of an operand whose value is not kept: its node, or its shape and dtype."""
    return Like(x.shape, x.dtype) if hasattr(x, "dtype") and type(x) is not Node else x


class _Taken:
    """What is left of a temporary whose data a result was written into."""

    def __getattr__(self, name: str):
        raise StateError(
            message(
                "an array",
                got="a temporary array, used again after an operator had written its result into it",
                need="arrays that Python code holds in a variable while it needs them",
                mend="assign it to a variable before the operator, in code that is compiled to C",
            )
        )


TAKEN: Any = _Taken()

FLOAT, NDARRAY = np.dtype(float), np.ndarray
NO_OPTIONS: dict[str, Any] = {}
looked_at = False
"""Whether `Array.__init__` looks at every array that is made: `spmd.debug`."""
_new: Any = object.__new__
USUAL = {np.ndarray, np.float64, np.float32}
"""The types of values without any surprise: no number of Python's, and no Array of another level."""
_operands = USUAL | {int, float}
_PLAIN = {*_operands, bool, str, type(None), np.dtype, type}
_NUMBERS = {int, float, complex, bool, Number}
"""Python's numbers, and one of a program."""


def register_device_arrays(module: Any) -> None:
    """Arrays of a module that is like NumPy, CuPy, may come: they take the short ways too."""
    devices.register(module)
    for kinds in (USUAL, _operands, _PLAIN, OPERANDS, _TYPES, ADMITTED):
        kinds.add(module.ndarray)


_SELECT = Primitive(None, "select", (lambda g, ans, k: Bundle({k: g}),))


def part(node: Node, k: int, value, state, tape: Tape) -> Array:
    """Result k of a node with several results, recorded as a node of its own."""
    return Array(value, state, tape, record(tape, _SELECT, [node], (k,), getattr(value, "shape", ()), value.dtype))


def _parts(ans: Any, state, tape: Tape, node: Node):
    """The results of a function that has several; those of integers and booleans have no derivative."""
    node.results = tuple(Like(a.shape, a.dtype) for a in ans)
    parts = [part(node, k, a, state, tape) if a.dtype.kind not in "biu" else wrap(a, state) for k, a in enumerate(ans)]
    return type(ans)(*parts) if hasattr(ans, "_fields") else tuple(parts)


def weak(number: float | complex):
    """The dtype by which a node marks a Python number: none for a real one, whose type adapts to what it meets."""
    return np.dtype(complex) if isinstance(slot_of(number), complex) else None


def _with_keyword_arrays(prim: Primitive, args, kwargs):
    """Arrays given by keyword: brought to their positions where they follow there, else taken as constants."""
    names = [p.name for p in _signature(prim.fun) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    args, kwargs = list(args), dict(kwargs)
    while len(args) < len(names) and names[len(args)] in kwargs:
        args.append(kwargs.pop(names[len(args)]))
    arrays, extra = [a for a in args if type(a) is Array], find(kwargs, [])
    if any(a.tape is not None for a in extra):
        raise _keyword_array(prim)
    if all(a.tape is None for a in arrays):
        return compute(prim.fun, args, kwargs)
    joined = iter(arrays if all(a.state is arrays[0].state for a in arrays + extra) else mixing.join(arrays + extra)[0])
    return apply(prim, [next(joined) if type(a) is Array else a for a in args], bare(kwargs))


def _signature(fun):
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
    return _computed(fun, *_all_bared(args, kwargs))


def operand(x, where: str) -> Any:
    """What may be computed with beside an Array: arrays of NumPy admitted, in lists and tuples too; the rest as it is.

    Raises where x is an array whose operations mean something else, or are recorded elsewhere.
    """
    kind = type(x)
    if kind is list or kind is tuple:
        return kind([operand(part, where) for part in x])
    if kind in OPERANDS:
        return x
    if isinstance(x, np.ndarray):
        return admit(x, where, None, need="a plain array", beside=" beside an Array", name="m")
    if is_elsewhere(kind):
        raise TracedConversionError(
            message(
                where,
                got=f"{describe(x)} beside an Array",
                need="arrays of NumPy or CuPy: other libraries do not record on this tape, nor it on theirs",
                mend="np.asarray(x) of it, where it is a constant; spmd.custom_vjp around the other library",
            )
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
    return hasattr(kind, "__torch_function__") or kind.__module__.partition(".")[0] in ("jax", "jaxlib")


def joined(arrays) -> list[Any]:
    """Arrays, bare ones too, brought to one state: what a function that returns them all gives undifferentiated."""
    some = find(list(arrays), [])
    if not some or some[0].state is None or some[0].state is devices.ALONE:
        return list(arrays)
    return mixing.join([a if type(a) is Array else Array(np.asarray(a), mixing.ambient()) for a in arrays])[0]


def _computed(fun, args, kwargs, arrays: list[Array]) -> Any:
    """The end of `compute`, with the bare arguments and the arrays that were among them."""
    if not arrays:
        raise _hidden(fun)
    state = arrays[0].state
    for a in arrays:
        if a.state is not state:
            state = mixing.join([Array(value_of(a), a.state) for a in arrays])[1]
            break
    if fun not in handlers and fun not in constants:
        args, kwargs = _read_only(args), _read_only(kwargs)
    try:
        ans = fun(*args, **kwargs)
    except Exception as error:
        ans = devices.again(fun, list(args), kwargs, error, name_of(fun))
    return wrap(_unshared(ans), state)


def _no_mask(fun, where: Array) -> Exception:
    return DtypeError(
        message(name_of(fun), argument="where", got=describe(where), need="a mask of booleans", mend="x != 0")
    )


def _hidden(fun) -> Exception:
    return TracedConversionError(
        message(
            name_of(fun),
            got="an Array as like=, or within an object of another class",
            need="arrays as arguments, or in lists, tuples and dicts",
            mend="pass the array itself; leave like out",
        )
    )


def _all_bared(args, kwargs) -> tuple[Any, Any, list[Array]]:
    """Arguments as `bare` makes them, and the arrays on the way."""
    arrays: list[Array] = []
    args = [_bared(a, arrays) for a in args]
    return args, {k: _bared(v, arrays) for k, v in kwargs.items()} if kwargs else kwargs, arrays


def _bared(tree, into: list[Array]) -> Any:
    """As `bare`, and the arrays on the way."""
    kind = type(tree)
    if kind is Array:
        into.append(tree)
        return value_of(tree)
    if kind is np.ndarray or kind is int:
        return tree
    if kind is tuple or kind is list:
        found = []
        for t in tree:
            if type(t) is Array and type(t.value) is np.ndarray:
                into.append(t)
                found.append(t.value)
            else:
                found.append(_bared(t, into))
        return found if kind is list else tuple(found)
    if isinstance(tree, tuple | list | dict | slice):
        find(tree, into)
        return bare(tree)
    return tree


def _unshared(ans):
    """Results as arrays of their own: a view of a bare argument could change under its owner's hand."""
    if type(ans) is np.ndarray:
        return ans if owns_memory(ans) or not writable(ans) else ans.copy()
    if isinstance(ans, tuple | list):
        parts = [_unshared(a) for a in ans]
        return type(ans)(*parts) if hasattr(ans, "_fields") else type(ans)(parts)
    return ans


def _read_only(tree) -> Any:
    """Views that a function without rule cannot write through."""
    if isinstance(tree, np.ndarray):
        view = tree.view()
        view.flags.writeable = False
        return view
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return type(tree)(_read_only(t) for t in tree)
    if isinstance(tree, dict):
        return {k: _read_only(v) for k, v in tree.items()}
    return tree


def dispatch(fun, args, kwargs):
    """What a NumPy function does when one of its arguments is an Array."""
    out = kwargs.pop("out", None) if kwargs else None
    if out is not None and not (isinstance(out, tuple) and all(o is None for o in out)):
        raise StateError(
            message(
                name_of(fun),
                argument="out",
                got="an array to write into",
                need="no out: arrays are immutable",
                mend=f"use the result: y = {name_of(fun)}(...); for `y += x`: y = y + x",
            )
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
        bared = _all_bared(args, kwargs)
        for a in bared[2]:
            if a.tape is not None:
                break
        else:
            return _computed(fun, *bared)
        if handler is None:
            raise _no_rule(fun)
        if fun in valued:
            return _valued(fun, handler, args, kwargs, bared)
    return handler(*args, **kwargs)


def by_numpy(fun, composition, *args, **kwargs):
    """composition(*args, **kwargs), with the value, the errors and the warnings of NumPy's own function."""
    return _valued(fun, composition, args, kwargs, _all_bared(args, kwargs))


def _valued(fun, composition, args, kwargs, bared):
    if next(devices.arrays(bared[:2]), None) is not None:  # a device has functions of its own
        return composition(*args, **kwargs)
    with np.errstate(all="ignore"):
        result = composition(*args, **kwargs)
    return _with_values(result, _computed(fun, *bared))


def _with_values(result, exact):
    """Results with other values, on the tapes where they are."""
    if type(result) is Array:
        value = value_of(exact)
        return _holding(result, value) if getattr(value, "shape", ()) == result.shape else result
    if isinstance(result, tuple | list) and isinstance(exact, tuple | list):
        parts = [_with_values(r, e) for r, e in zip(result, exact, strict=True)]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result


def _holding(x: Array, value) -> Array:
    """An Array with another value under all its levels."""
    return Array(_holding(x.value, value) if type(x.value) is Array else value, x.state, x.tape, x.node)


_families = ["statistics", "decompose", "fourier", "refused", "series", "sets"]
"""The rules that most programs do not need: loaded when a function first meets an Array that has no rule so far."""


@functools.cache
def _place_of_out(fun) -> int:
    """Where a function takes an array to write into, among its arguments by position."""
    parameters = _signature(fun) or _signature(handlers.get(fun, fun))  # of its own functions older NumPy tells none
    return next((i for i, p in enumerate(parameters) if p.name == "out" and p.kind != p.KEYWORD_ONLY), 1000)


def load_families() -> None:
    """Load the rules that are left, those of scipy.special too where it is imported."""
    for name in tuple(_families):  # a thread that comes meanwhile waits for the module too
        importlib.import_module(f"spmd.autodiff.rules.{name}")
    _families.clear()
    if "scipy.special" in sys.modules:
        importlib.import_module("spmd.autodiff.rules.special")


def _no_rule(fun) -> Exception:
    names = {f.__name__: name_of(f) for f in tuple(handlers)}
    instead = refusals.get(fun)
    if fun in in_place:
        from spmd.autodiff.conversion import asked

        # A function of NumPy that writes into what it makes has a twin.
        instead = (asked(sys._getframe(3)) or ("", ""))[1] or instead
    known = [] if instead else [names[k] for k in nearest(fun.__name__, names)]
    return DifferentiationError(
        message(
            name_of(fun),
            got="an Array, which is immutable"
            if fun in in_place
            else "a traced array, and no derivative rule for this function",
            need=f"a function with a rule{'; the nearest are ' if known else ''}{', '.join(known)}",
            mend=instead
            or "compose it of functions with rules, declare it with spmd.custom_vjp, "
            "or cut its argument off with spmd.stop_gradient",
        )
    )


def _keyword_array(prim: Primitive) -> Exception:
    return DifferentiationError(
        message(
            prim.name,
            got="a traced array passed by keyword",
            need="array arguments by position",
            mend="write it without the keyword",
        )
    )


class Shown(type):
    """A class that shows only what its objects have, and not the names for which they have an explanation."""

    def __dir__(cls):
        return [name for name in super().__dir__() if type(vars(cls).get(name)) is not Missing]


class Missing:
    """What an Array has not: asking for it says why, and what to write instead.

    Not a `__getattr__`: that would make every access to an attribute slower.
    """

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __get__(self, x, kind=None):
        if x is None:
            raise AttributeError(f"type object 'Array' has no attribute {self.name!r}")
        raise MissingMethodError(functools.partial(self.text, x))

    def text(self, x: Array) -> str:
        need, mend = missing.get(
            self.name, ("a method that arrays of a body, or traced ones, have", f"np.{self.name}(x)")
        )
        data = "x" if x.tape is None else "spmd.stop_gradient(x)"
        return message(
            f"x.{self.name}",
            got=describe(x),
            need=need,
            mend=mend.format(data=data if x.state is None else f"spmd.block({data})"),
        )


_OF_UNKNOWN = (
    "np.stack([a, b]) in place of a list; of a function of NumPy the one in spmd.numpy; spmd.custom_vjp around one of "
    "another library, with its derivative"
)
"""The mend where it is not known what asks for bare data."""


class Array(metaclass=Shown):
    """An array whose operations are tracked: its state always, its derivative where a tape is given.

    It is immutable and behaves as the NumPy array it holds; `x.at[i].set(v)` gives a changed copy.
    """

    __slots__ = ("__weakref__", "node", "state", "tape", "value")
    __array_priority__ = 1000.0

    def __init__(self, value, state=None, tape=None, node=None):
        self.value = value
        self.state: Any = state
        self.tape: Any = tape
        self.node: Any = node

    # What it is

    @property
    def shape(self) -> tuple[int, ...]:
        return () if type(self.value) in _NUMBERS else self.value.shape

    @property
    def dtype(self) -> np.dtype:
        value = self.value
        return np.asarray(slot_of(value)).dtype if type(value) in _NUMBERS else value.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __dir__(self):
        return dir(Array)

    def __len__(self) -> int:
        if not self.shape:
            # Libraries that take an array for a sequence ask this of its entries, to make numbers of them.
            raise TypeError(
                message(
                    "len()",
                    got=describe(self),
                    need="an array with dimensions",
                    mend="x.size; spmd.stop_gradient(x), before another library takes its entries",
                )
            )
        return self.shape[0]

    def __iter__(self):
        if not self.shape:
            raise TypeError("iteration over an array without dimensions")
        return (self[i] for i in range(len(self)))  # type: ignore[index]

    def __spmd_describe__(self) -> str:
        state = f"{self.state} array" if self.state is not None else "array"
        return f"{'traced ' if self.tape is not None else ''}{state} {self.dtype}{list(self.shape)}"

    def __repr__(self) -> str:
        value = slot_of(value_of(self))
        value = value.get() if hasattr(value, "get") else np.asarray(value)
        data = np.array2string(value, separator=", ", threshold=20, edgeitems=2)
        return f"Array({data}, {self.__spmd_describe__()})"

    def __format__(self, spec: str) -> str:
        if not spec or self.shape:
            return object.__format__(self, spec)
        value = slot_of(value_of(self))
        return format(value.item() if hasattr(value, "item") else value, spec)

    # What it refuses

    def __array__(self, dtype=None, copy=None):
        from spmd.autodiff.conversion import asked

        traced = self.tape is not None
        where, mend = asked(sys._getframe(1)) or ("np.asarray, or a function that calls it", "")
        raise TracedConversionError(
            message(
                where,
                got=describe(self),
                need="a bare array; converting would "
                + ("cut the result off from its gradient" if traced else "lose the state of the array"),
                mend=(mend or _OF_UNKNOWN)
                + (
                    "; spmd.stop_gradient(x) if no gradient is wanted"
                    if traced
                    else "; spmd.block(x) gives the bare read-only data"
                ),
            )
        )

    def _number(self, kind: str):
        where = f"{kind}()" + {"bool": ", as `if` calls it", "index": ", as range(x) and list[x] call it"}.get(kind, "")
        if self.tape is not None:
            from spmd.autodiff.conversion import asked

            function, mend = asked(sys._getframe(2)) or ("", "")
            raise TracedConversionError(
                message(
                    f"{function}, which calls {where}" if mend and function not in where else where,
                    got=describe(self),
                    need="an undifferentiated array; a Python number has no gradient",
                    mend=(f"{mend}; " if mend else "keep it an array (np.where in place of `if`), or take ")
                    + "spmd.stop_gradient(x) first",
                )
            )
        if self.state is not None and self.state.varying:
            raise StateError(
                message(
                    where,
                    got=describe(self),
                    need="an Invariant array: each worker would go its own way",
                    mend="reduce it over the axes it varies over (spmd.psum, spmd.pmax), or use np.where; "
                    "spmd.block(x) gives this worker's bare data, spmd.worker_index the worker's plain index",
                )
            )
        return self.value

    def __bool__(self) -> bool:
        return bool(self._number("bool"))

    def __int__(self) -> int:
        return int(self._number("int"))

    def __float__(self) -> float:
        return float(self._number("float"))

    def __complex__(self) -> complex:
        return complex(self._number("complex"))

    def __index__(self) -> int:
        value = self._number("index")
        return operator.index(value.item() if devices.is_array(value) else value)

    def item(self, *args):
        value = self._number("x.item")
        return value.item(*args) if hasattr(value, "item") else np.asarray(value).item(*args)

    def tolist(self):
        value = self._number("x.tolist")
        return value.tolist() if hasattr(value, "tolist") else value

    def __setitem__(self, index, value):
        raise StateError(
            message(
                "x[i] = v",
                got=f"an assignment into a {self.__spmd_describe__()}",
                need="arrays are immutable",
                mend="x = x.at[i].set(v), or spmd.at(x)[i].set(v) where x may be a bare array",
            )
        )

    def __hash__(self):
        raise TypeError("arrays are not hashable")

    # How NumPy reaches it

    def __array_ufunc__(self, ufunc, method, first, *others, **kwargs):
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
        if method == "__call__":
            if kwargs and kwargs.pop("where", True) is not True:
                raise DifferentiationError(
                    message(
                        name_of(ufunc),
                        argument="where",
                        got="a mask",
                        need="no where argument",
                        mend="np.where(mask, f(x), other)",
                    )
                )
            return dispatch(ufunc, inputs, kwargs)
        known = Method((ufunc, method))
        if known not in handlers and known not in constants and known not in refusals:
            load_families()
            importlib.import_module("spmd.autodiff.rules.statistics").declare(ufunc)
        return dispatch(known, inputs, kwargs)

    def __array_function__(self, fun, types, args, kwargs):
        if not _TYPES.issuperset(types):
            name = name_of(fun)
            args = tuple([operand(x, name) for x in args])
            kwargs = {key: operand(x, name) for key, x in kwargs.items()}
            if any(t not in _TYPES and not is_ours(t) for t in types):
                return NotImplemented
        prim = primitives.get(fun)
        if prim is not None and not kwargs and len(args) <= _place_of_out(fun):
            return apply_unary(prim, self) if len(args) == 1 and args[0] is self else apply(prim, args, kwargs)
        if fun in _creators:
            from spmd.autodiff import namespace

            return namespace.create(fun, args, kwargs, self)
        if len(args) > 1 and len(args) > (place := _place_of_out(fun)) and args[place] is not None:
            kwargs = {**kwargs, "out": args[place]}
        return dispatch(fun, args, dict(kwargs) if kwargs else kwargs)

    def __array_namespace__(self, *, api_version=None):
        from spmd.autodiff import namespace

        return namespace.of(self, api_version)


_creators = {
    getattr(np, name) for name in "arange array asanyarray asarray empty eye full identity ones tri zeros".split()
}
"""Functions that reach an Array by `like=` only."""

missing: dict[str, tuple[str, str]] = {}
"""What NumPy's arrays have and an Array has not: why, and what to write instead."""

SEQUENCES = {list, tuple}
OPERANDS = {Array, np.ndarray, int, float, complex, bool}
_TYPES = {Array, np.ndarray}
for _kinds in (_operands, _PLAIN, OPERANDS, _TYPES):  # what stands for them in programs
    _kinds |= {Slot, Number}
USUAL.add(Slot)
ADMITTED |= {Array, Slot, Number}
tree.ALONE.add(Array)


__all__ += ["compute", "dispatch", "name_of"]
