"""The traced array: plain NumPy syntax that records itself.

An `Array` holds a value, the state of that value (opaque here), and, where it is differentiated, a tape and its node
there. The value is bare data, or an `Array` of an outer differentiation: transformations nest by nesting arrays.

`dispatch` gives an Array NumPy's protocols (`np.tanh(x)`, `bare @ x`, `np.concatenate([x, y])`), `array_methods` its
operators and methods, `namespace` its namespace. The rules of functions are in `autodiff/rules/`.
"""

from __future__ import annotations

import functools
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.autodiff import devices, tree
from spmd.autodiff.admission import ADMITTED
from spmd.autodiff.staging.recorder import Number, Slot, slot_of
from spmd.autodiff.static_array import StaticArray
from spmd.errors import (
    MissingMethodError,
    StateError,
    TracedConversionError,
    describe,
    message,
)

__all__ = [
    "ARRAY_TYPES",
    "BARE_OPERANDS",
    "OPERANDS",
    "PLAIN_TYPES",
    "SEQUENCES",
    "USUAL",
    "Array",
    "Missing",
    "Mixing",
    "bare",
    "find",
    "missing",
    "mixing",
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

    def summed(self, gs: list, values: list) -> list:
        """Gradients of arguments `values`, with sums over workers that are still to be taken taken together."""
        return gs

    def settle(self, g, value):
        """A gradient in the form in which its argument `value` came."""
        return g

    def differentiated(self, scalar: Array) -> None:
        """A traced scalar whose gradient is asked for."""

    def gives(self, scalar: Array, gradients: list) -> None:
        """The gradients of a scalar, before the caller gets them."""

    def alike(self, args: Any) -> Any:
        """Operands outside of maps: where some are spread over workers, so are the traced ones, whose cotangents then
        come back as what they are. The same object, if nothing is to change."""
        return args

    def function(self, fun: Any, args: Any, kwargs: Any) -> Any:
        """What is run in place of a function of NumPy outside of maps, because arrays among its arguments are spread
        over workers; None: the function and its derivative rule."""
        return None

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


USUAL = {np.ndarray, np.float64, np.float32}
"""The types of values without any surprise: no number of Python's, and no Array of another level."""
BARE_OPERANDS = USUAL | {int, float}
PLAIN_TYPES = {*BARE_OPERANDS, bool, str, type(None), np.dtype, type}
_NUMBERS = {int, float, complex, bool, Number}
"""Python's numbers, and one of a program."""


def register_device_arrays(module: Any) -> None:
    """Arrays of a module that is like NumPy, CuPy, may come: they take the short ways too."""
    devices.register(module)
    for kinds in (USUAL, BARE_OPERANDS, PLAIN_TYPES, OPERANDS, ARRAY_TYPES, ADMITTED):
        kinds.add(module.ndarray)


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


class Array(StaticArray, metaclass=Shown):
    """An array whose operations are tracked: its state always, its derivative where a tape is given.

    It is immutable and behaves as the NumPy array it holds; `x.at[i].set(v)` gives a changed copy.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: (isinstance(x, spmd.Array), repr(spmd.psum(x, "x"))), P("x"), None)
        ...     f(np.arange(4.0))
        (True, 'Array([2., 4.], Invariant array float64[2])')
    """

    __slots__ = ("__weakref__", "node", "state", "tape", "value")
    __array_priority__ = 1000.0

    def __init__(self, value: Any, state: Any = None, tape: Any = None, node: Any = None):
        self.value = value
        self.state: Any = state
        self.tape: Any = tape
        self.node: Any = node

    # What it is

    @property
    def shape(self) -> tuple[int, ...]:
        return () if type(self.value) in _NUMBERS else self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
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
        from spmd.autodiff.conversion_errors import find_converter

        traced = self.tape is not None
        where, mend = find_converter(sys._getframe(1)) or ("np.asarray, or a function that calls it", "")
        raise TracedConversionError.at(
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

    def _number(self, kind: str):
        where = f"{kind}()" + {"bool": ", as `if` calls it", "index": ", as range(x) and list[x] call it"}.get(kind, "")
        if self.tape is not None:
            from spmd.autodiff.conversion_errors import find_converter

            function, mend = find_converter(sys._getframe(2)) or ("", "")
            raise TracedConversionError.at(
                f"{function}, which calls {where}" if mend and function not in where else where,
                got=describe(self),
                need="an undifferentiated array; a Python number has no gradient",
                mend=(f"{mend}; " if mend else "keep it an array (np.where in place of `if`), or take ")
                + "spmd.stop_gradient(x) first",
            )
        if self.state is not None and self.state.varying:
            raise StateError.at(
                where,
                got=describe(self),
                need="an Invariant array: each worker would go its own way",
                mend="reduce it over the axes it varies over (spmd.psum, spmd.pmax), or use np.where; "
                "spmd.block(x) gives this worker's bare data, spmd.worker_index the worker's plain index",
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

    def item(self, *args: Any) -> Any:
        value = self._number("x.item")
        return value.item(*args) if hasattr(value, "item") else np.asarray(value).item(*args)

    def tolist(self) -> Any:
        value = self._number("x.tolist")
        return value.tolist() if hasattr(value, "tolist") else value

    def __setitem__(self, index, value):
        raise StateError.at(
            "x[i] = v",
            got=f"an assignment into a {self.__spmd_describe__()}",
            need="arrays are immutable",
            mend="x = x.at[i].set(v), or spmd.at(x)[i].set(v) where x may be a bare array",
        )

    def __hash__(self):
        raise TypeError("arrays are not hashable")


missing: dict[str, tuple[str, str]] = {}
"""What NumPy's arrays have and an Array has not: why, and what to write instead."""

SEQUENCES = {list, tuple}
OPERANDS = {Array, np.ndarray, int, float, complex, bool}
ARRAY_TYPES = {Array, np.ndarray}
for _kinds in (BARE_OPERANDS, PLAIN_TYPES, OPERANDS, ARRAY_TYPES):  # what stands for them in programs
    _kinds |= {Slot, Number}
USUAL.add(Slot)
ADMITTED |= {Array, Slot, Number}
tree.LEAF_TYPES.add(Array)
