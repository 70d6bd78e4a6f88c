"""Record a program: what a function did with its arrays, call by call, to be done again with other arrays.

A `Slot` stands for an array. It has the value that the array has while the program is written down, and takes part in
NumPy's functions, operators and methods as the array would; each of these calls becomes a line of the `Program`. What
the function does besides, its own Python, its tapes and its checks, leaves no line: a program does none of it again.

A value leaves its slot for nothing that could decide which lines come next: an `if` on a slot is refused.
"""

from __future__ import annotations

import keyword
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.autodiff.allocation import writable
from spmd.autodiff.primitive import constants, passives, primitives
from spmd.autodiff.staging.function_tables import BARE, BY_VALUE, IN_PLACE, NO_NUMBER, PLAIN, STATIC, TOLD, refuse
from spmd.autodiff.staging.program import COMM, Built, Like, Line, Ref, done, mapped, refs, within
from spmd.errors import JitError, MissingMethodError, caller

__all__ = ["Number", "Program", "Slot", "bared", "checked", "is_slot", "one_line", "slot_of", "slots", "whole_line"]
NOTHING: dict[str, Any] = {}


class _Recorded:
    """What stands for a value of a program while it is written down."""

    __slots__ = ("index", "program", "value")
    __array_priority__ = 900.0

    def __init__(self, program: Program, index: int, value: Any):
        self.program = program
        self.index = index
        self.value: Any = value

    def _no(self, where: str, mend: str = "") -> Exception:
        error = self._refused(where, mend or NO_NUMBER)
        error.reads_value = True
        return error

    def _refused(self, where: str, mend: str) -> JitError:
        """An error that a program cannot go on after, whoever catches it."""
        self.program.failed = error = refuse(where, self, mend)
        return error

    def __bool__(self) -> bool:
        raise self._no("bool(), as `if` calls it")

    def __int__(self) -> int:
        raise self._no("int()")

    def __float__(self) -> float:
        raise self._no("float()")

    def __complex__(self) -> complex:
        raise self._no("complex()")

    def __index__(self) -> int:
        raise self._no("index(), as range(x) and list[x] call it")

    def item(self, *args: Any) -> Any:
        raise self._no("x.item")

    def tolist(self) -> Any:
        raise self._no("x.tolist")

    def __format__(self, spec: str) -> str:
        return repr(self) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise self._no("np.asarray, or a function that calls it", "functions of NumPy on the array itself")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(not _known(x) for x in inputs):
            return NotImplemented
        fun = ufunc if method == "__call__" else getattr(ufunc, method)
        writes = any(type(o) is Slot for o in kwargs.get("out", ())) or method == "at"
        if any(o is not None and type(o) is not Slot for o in kwargs.get("out", ())):
            raise self._refused(f"np.{ufunc.__name__}", "no out=: use the result")
        return self.program.call(fun, inputs, kwargs, writes=writes, fresh=not writes)

    def __array_function__(self, fun: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not all(issubclass(t, _Recorded | np.ndarray) for t in types):
            return NotImplemented
        if fun in STATIC or fun in passives:
            return fun(*bared(args), **bared(kwargs))
        if not slots((args, kwargs)):  # this array came by like=
            return self.program.call(fun, args, kwargs, fresh=True)
        if fun in BY_VALUE and (_moves(fun, args, kwargs)):
            mend = "a function whose result has one shape whatever the values are"
            raise self._refused(f"np.{fun.__name__}", mend)
        if fun is np.where and len(args) == 1:
            raise self._refused("np.where of one argument", "np.where(mask, x, other)")
        if fun is np.reshape and len(args) == 2 and not kwargs and args[1] == args[0].shape:
            return args[0]
        writes = fun in (np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis)
        if (out := kwargs.get("out")) is not None:
            if type(out) is not Slot:
                raise self._refused(f"np.{fun.__name__}", "no out=: use the result")
            writes = True
        prim = primitives.get(fun)
        known = fun in constants or prim is not None
        arrays = 1 if prim is None else len(prim.rules) if prim.variadic is None else len(args)
        if not writes and (not known or slots((args[arrays:], kwargs))):
            return whole_line(fun, args, kwargs)  # whose results may have other shapes then
        return self.program.call(fun, args, kwargs, writes=writes, fresh=fun in PLAIN and not writes)


def _moves(fun: Any, args: Any, kwargs: Any) -> bool:
    """Whether the shape of the result of such a function depends on values here: not where what says where to cut, or
    how often, is no slot."""
    if fun in (np.array_split, np.split, np.delete, np.repeat):
        return any(slots(a) for a in args[1:]) or bool(slots(kwargs))
    if fun is np.insert:
        return bool(slots(args[1:2])) or bool(slots(kwargs))
    return True


def _known(x: Any) -> bool:
    return isinstance(x, _Recorded | np.ndarray | np.generic | bool | int | float | complex | list | tuple) or (
        type(x).__module__.partition(".")[0] == "cupy"
    )


class Number(_Recorded):
    """A number of Python that may be another one each time: as such, it takes the dtype of what it meets."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """What isinstance goes by."""
        return type(self.value)

    @property
    def real(self) -> Any:
        return self.program.call("real", (self,), form="attribute")

    @property
    def imag(self) -> Any:
        return self.program.call("imag", (self,), form="attribute")

    def conjugate(self) -> Any:
        return self.program.call("conjugate", (self,), form="method")

    def is_integer(self) -> bool:
        raise self._no("x.is_integer")

    def __round__(self, digits: int | None = None) -> Any:
        raise self._no("round()")

    def __trunc__(self) -> int:
        raise self._no("math.trunc()")

    def __floor__(self) -> int:
        raise self._no("math.floor()")

    def __ceil__(self) -> int:
        raise self._no("math.ceil()")

    def __spmd_describe__(self) -> str:
        return f"a {type(self.value).__name__}"

    def __repr__(self) -> str:
        return f"Number({self.value!r})"


class Slot(_Recorded):
    """An array of a program while it is written down."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    def __spmd_describe__(self) -> str:
        return f"array {self.dtype}{list(self.shape)}"

    def __repr__(self) -> str:
        return f"Slot({self.value!r})"

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name in TOLD:
            return getattr(self.value, name)
        if name in BARE:
            raise MissingMethodError(lambda: str(refuse(f"x.{name}", self, NO_NUMBER)))
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"an array has no attribute {name!r}")
        if not callable(getattr(np.ndarray, name)):
            return self.program.call(name, (self,), form="attribute")

        def method(*args: Any, **kwargs: Any) -> Any:
            if slots((args, kwargs)) and name not in IN_PLACE:
                return whole_line(getattr(np.ndarray, name), (self, *args), kwargs)
            return self.program.call(name, (self, *args), kwargs, form="method", writes=name in IN_PLACE)

        return method

    def __getitem__(self, index: Any) -> Any:
        if any(s.dtype == bool for s in slots(index) if type(s) is Slot):
            raise self._refused("x[mask]", "np.where(mask, x, other)")
        self._check_bounds(index)
        return self.program.call(operator.getitem, (self, index), form="item")

    def _check_bounds(self, index: Any) -> None:
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, slice) and slots(part):
                raise self._refused(
                    "x[start:stop]",
                    "a Python integer, by an argument with the spec None; or x[start + np.arange(n)], of one length",
                )

    def __setitem__(self, index: Any, value: Any) -> None:
        self._check_bounds(index)
        self.program.call(operator.setitem, (self, index, value), form="put", writes=True)


def _operators() -> None:
    """Operators are NumPy's ufuncs."""
    pairs = "add subtract multiply true_divide:truediv floor_divide:floordiv remainder:mod power:pow matmul "
    pairs += "bitwise_and:and bitwise_or:or bitwise_xor:xor left_shift:lshift right_shift:rshift divmod"

    def binary(ufunc: Any, swapped: bool, as_python: Any = None) -> Any:
        def operate(self: Any, other: Any) -> Any:
            if not _known(other):
                return NotImplemented
            pair = (other, self) if swapped else (self, other)
            # Python's numbers stay such, NumPy's have ways of their own, and so have powers.
            if as_python is not None and (ufunc is np.power or type(self.value) is not np.ndarray):
                return self.program.call(as_python, pair, fresh=True)
            return ufunc(*pair)

        return operate

    for pair in pairs.split():
        name, _, short = pair.partition(":")
        short = short or {"subtract": "sub", "multiply": "mul"}.get(name, name)
        ufunc = getattr(np, name)
        as_python = getattr(operator, f"{short}_" if keyword.iskeyword(short) else short, divmod)
        setattr(_Recorded, f"__{short}__", binary(ufunc, False, as_python))
        setattr(_Recorded, f"__r{short}__", binary(ufunc, True, as_python))
    for short, name in {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}.items():
        setattr(_Recorded, f"__{short}__", binary(getattr(np, name), False))
    _Recorded.__eq__ = binary(np.equal, False)  # type: ignore[method-assign]
    _Recorded.__ne__ = binary(np.not_equal, False)  # type: ignore[method-assign]
    _Recorded.__hash__ = object.__hash__  # type: ignore[method-assign]
    for short, ufunc in {"neg": np.negative, "pos": np.positive, "abs": np.absolute, "invert": np.invert}.items():
        setattr(_Recorded, f"__{short}__", lambda self, ufunc=ufunc: ufunc(self))


_operators()


def is_slot(x: Any) -> bool:
    """Whether x stands for a value of a program."""
    return isinstance(x, _Recorded)


def slots(tree: Any) -> list[Any]:
    """What stands for values in nested tuples, lists, dicts and slices."""
    return within(tree, _Recorded)


def slot_of(x: Any) -> Any:
    """What stands for a value in the program that is written down; anything else as it is."""
    return x.value if isinstance(x, _Recorded) else x


def bared(tree: Any) -> Any:
    """Nested tuples, lists, dicts and slices with the values in the place of what stands for them."""
    return mapped(tree, slot_of)


def checked(check: Callable[..., None], x: Any, *more: Any) -> None:
    """check(x, ...), a function that looks at the values of bare data, and raises: in a program, each time."""
    if isinstance(x, _Recorded):
        x.program.call(check, (x, *more), effect=True)
    else:
        check(x, *more)


def one_line(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] = NOTHING) -> Any:
    """fun(*args, **kwargs), of bare data; in a program one line, however many calls it is."""
    found = slots((args, kwargs))
    return found[0].program.call(fun, args, kwargs) if found else fun(*args, **kwargs)


class _Whole:
    """A function that looks at values. The program after it is for results of the shapes that it had."""

    def __init__(self, fun: Callable[..., Any]):
        self.fun = fun
        self.__name__ = getattr(fun, "__name__", type(fun).__name__).replace("<lambda>", "rule")
        self.kinds: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.fun(*args, **kwargs)
        kinds = _kinds(result, [])
        if self.kinds is None:
            self.kinds = kinds
        elif kinds != self.kinds:
            raise JitError.at(
                f"{self.__name__}, within spmd.jit",
                got=f"a result of {', '.join(kinds)}",
                need=f"one of {', '.join(self.kinds)}, as when the program was written down",
                mend="a function whose result has one shape whatever the values are; or leave spmd.jit out",
            )
        return result


def _kinds(tree: Any, into: list[str]) -> list[str]:
    if isinstance(tree, tuple | list):
        for t in tree:
            _kinds(t, into)
    elif hasattr(tree, "dtype"):
        into.append(f"{tree.dtype}{[*tree.shape]}")
    return into


def whole_line(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] = NOTHING, error: Exception | None = None
) -> Any:
    """fun(*args, **kwargs), of bare data, as one line of a program: for functions that look at values. error: what was
    raised when they did, which is mended by that."""
    found = slots((args, kwargs))
    if not found:
        raise error or AssertionError(fun)
    result, program = one_line(_Whole(fun), args, kwargs), found[0].program
    if error is not None and program.failed is error:
        program.failed = None
    return result


class Program:
    """The lines of a program, in order, and what is known of its values."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.likes: list[Like | None] = []
        self.inputs: list[int] = []
        self.failed: Exception | None = None
        self._constants: dict[int, tuple[Any, Any]] = {}
        self.small: dict[int, Any] = {}
        self.errors = np.geterr()

    def _new(self, kind: Any, value: Any) -> Any:
        flags, dtype = getattr(value, "flags", None), getattr(value, "dtype", None)
        if flags is None or dtype is None:
            self.likes.append(None)
        else:
            array = type(value) is np.ndarray
            self.likes.append(Like(value.shape, dtype, flags.c_contiguous, value.nbytes, array))
        return kind(self, len(self.likes) - 1, value)

    def input(self, value: Any) -> Any:
        """What stands for an argument."""
        x = self._new(Number if type(value) in (float, complex) else Slot, value)
        self.inputs.append(x.index)
        return x

    def call(
        self,
        fun: Any,
        args: Any,
        kwargs: Any = NOTHING,
        *,
        form: str = "call",
        effect: bool = False,
        writes: bool = False,
        fresh: bool = False,
        gives: bool = False,
        comm: Any = None,
    ) -> Any:
        """Call a function on the values, and write that down: what stands for its results. comm: what stands for COMM
        among the arguments. For the rest see `Line`."""
        values = [comm if a is COMM else bared(a) for a in args]
        options = bared(kwargs) if kwargs else kwargs
        try:
            result = done(form, fun, values, options)
        except Exception as error:
            self.failed = error
            raise
        args, kwargs, errors = mapped(tuple(args), self._noted), mapped(kwargs, self._noted), np.geterr()
        parts: list[tuple[tuple[int, ...], int]] = []
        found = self._found(result, (), parts)
        if fun in _LIKE and parts and result.nbytes <= 64 and not refs((args[1:], kwargs)):
            self.small[parts[0][1]] = result
        self.lines.append(
            Line(
                *(form, fun, args, kwargs, refs((args, kwargs)), parts, effect or writes, writes, fresh, gives),
                None if errors == self.errors else errors,
                _place(),
            )
        )
        return found

    def _noted(self, x: Any) -> Any:
        """An argument as a line has it: constants as they are now, whoever writes to them later."""
        if isinstance(x, _Recorded):
            return Ref(x.index)
        return self._constant(x) if type(x) is np.ndarray and writable(x) else x

    def _constant(self, x: np.ndarray) -> np.ndarray:
        """A copy of an array, one for as long as it stays as it is."""
        _, copy = self._constants.get(id(x), (x, None))
        if copy is None or copy.shape != x.shape or not np.array_equal(_bytes(copy), _bytes(x)):
            copy = x.copy(order="K")
            copy.flags.writeable = False
            self._constants[id(x)] = x, copy
        return copy

    def _found(self, result: Any, path: tuple[int, ...], parts: list[tuple[tuple[int, ...], int]]) -> Any:
        """A result with what stands for the values in it."""
        if isinstance(result, tuple | list):
            found = [self._found(r, (*path, k), parts) for k, r in enumerate(result)]
            return type(result)(*found) if hasattr(result, "_fields") else type(result)(found)
        if result is None or isinstance(result, str | np.dtype):
            return result
        number = isinstance(result, bool | int | float | complex) and not hasattr(result, "dtype")
        x = self._new(Number if number else Slot, result)
        parts.append((path, x.index))
        return x

    def check(self) -> None:
        """Raise where the function has gone on after an error that depends on values."""
        if self.failed is None:
            return
        if isinstance(self.failed, JitError):
            raise self.failed
        raise JitError.at(
            "a body, within spmd.jit",
            got=f"a {type(self.failed).__name__} that it catches: {self.failed}",
            need="one way, whatever the values are: with others there may be no such error",
            mend="leave spmd.jit out, or the `try`",
        )

    def needed(self, start: int, inputs: Sequence[int], outputs: Sequence[Any]) -> list[int]:
        """The values that the lines from `start` on, and these outputs, take from lines before, or from arguments that
        are not among these inputs."""
        own = {*inputs}
        found: dict[int, None] = {}
        for line in self.lines[start:]:
            found.update(dict.fromkeys(i for i in line.used if i not in own))
            own.update(i for _, i in line.parts)
        found.update(dict.fromkeys(x.index for x in outputs if isinstance(x, _Recorded) and x.index not in own))
        return [*found]

    def built(self, outputs: Sequence[Any], name: str, *, start: int = 0, stop: int | None = None, inputs: Any = None):
        """Some of the lines as a function of the communicator and the list of inputs (by number), which it takes the
        values out of, to the list of outputs: slots, numbers of values as `Ref`, or anything else as it is."""
        self.check()
        wanted = [Ref(x.index) if isinstance(x, _Recorded) else x for x in outputs]
        lines, inputs = self.lines[start:stop], self.inputs if inputs is None else inputs
        return Built(lines, self.likes, self.small, inputs, wanted, name)


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _place() -> str:
    """The line of the user's that calls."""
    frame = caller(sys._getframe(2))
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "numpy":
        frame = caller(frame.f_back)
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


_LIKE = {np.zeros_like, np.ones_like, np.full_like}
"""Functions that ask for nothing but shape and dtype: what is small of them is a constant."""
