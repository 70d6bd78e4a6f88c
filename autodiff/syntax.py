"""Python's operators on an Array, and the methods and attributes of NumPy's arrays."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import numpy as np

from spmd.autodiff import tracer
from spmd.autodiff.primitive import Primitive, handlers
from spmd.autodiff.tracer import OPERANDS, SEQUENCES, Array, apply_binary, apply_unary, compute, value_of, wrap

__all__ = ["define_operators"]


def _define(symbol: str, run: Callable, reflect: bool) -> None:
    """Give Array an operator, and its reflection, for whatever NumPy takes as an operand."""

    def forward(self, other):
        if type(other) not in OPERANDS and (other := _operand(other)) is NotImplemented:
            return NotImplemented
        return run(self, other)

    def reflected(self, other):
        if type(other) not in OPERANDS and (other := _operand(other)) is NotImplemented:
            return NotImplemented
        return run(other, self)

    setattr(Array, f"__{symbol}__", forward)
    if reflect:
        setattr(Array, f"__r{symbol}__", reflected)


def _operand(x):
    """What an operator takes of x: lists become arrays; what is no number is left to its own operators."""
    if type(x) in SEQUENCES:
        return np.asarray(x)
    return x if isinstance(x, int | float | complex) or hasattr(x, "dtype") else NotImplemented


def _recorded(symbol: str, ufunc) -> Primitive:
    """An operator with the rules of its ufunc. It computes by Python's operator, so that numbers stay numbers."""
    entry = handlers[ufunc].primitive  # type: ignore[attr-defined]
    return Primitive(getattr(operator, symbol), entry.name, entry.rules)


def _constant(symbol: str) -> Callable:
    """An operator without derivative."""
    fun = getattr(operator, f"__{symbol}__")

    def run(x, y):
        state = x.state if type(x) is Array else y.state
        if type(x) is type(y) is Array and x.state is not y.state:
            state = tracer.mixing.join([Array(value_of(x), x.state), Array(value_of(y), y.state)])[1]
        return wrap(fun(value_of(x), value_of(y)), state)

    return run


def define_operators() -> None:
    """Give Array Python's operators, once the rules of their ufuncs are there."""
    for symbol, ufunc in {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "truediv": np.true_divide,
        "mod": np.remainder,
        "pow": np.power,
        "matmul": np.matmul,
    }.items():
        _define(symbol, functools.partial(apply_binary, _recorded(symbol, ufunc)), reflect=True)
    for symbol in "floordiv and or xor lshift rshift".split():
        _define(symbol, _constant(symbol), reflect=True)
    for symbol in "lt le gt ge eq ne".split():
        _define(symbol, _constant(symbol), reflect=False)
    for symbol, ufunc in {"neg": np.negative, "abs": np.absolute}.items():
        prim = _recorded(symbol, ufunc)
        setattr(Array, f"__{symbol}__", lambda self, prim=prim: apply_unary(prim, self))
    Array.__invert__ = lambda self: compute(operator.invert, (self,), {})  # type: ignore[attr-defined]


def _method(fun):
    def method(self, *args, **kwargs):
        return fun(self, *args, **kwargs)

    method.__name__ = fun.__name__
    method.__doc__ = f"As np.{fun.__name__}(x, ...)."
    return method


for _each in (
    "all any argmax argmin argsort clip conj cumprod cumsum diagonal dot max mean min nonzero prod ravel repeat "
    "round searchsorted sort squeeze std sum swapaxes take trace var"
).split():
    setattr(Array, _each, _method(getattr(np, _each)))
Array.conjugate = Array.conj  # type: ignore[attr-defined]
