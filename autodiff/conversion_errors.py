"""Which function converts an Array to bare data or a number, and its replacement. Imported only for the error."""

from __future__ import annotations

import ast
import importlib
import itertools
import linecache
import re
import sys
from dis import opname
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from spmd.autodiff.primitive import overrides, refusals

__all__ = ["find_converter"]

_SCIPY_RULES = {"scipy.fft": "fourier_scipy", "scipy.special": "special"}
"""The modules of SciPy with overrides, and the module of rules that has them."""


def find_converter(frame: FrameType | None) -> tuple[str, str] | None:
    """The function that converts, as users write it, and the mend; None if unknown.

    frame: of the caller of the conversion. The outermost public function of NumPy or SciPy before the user's code is
    the one that the user called. C functions have no frame: they are read from the text of the line.
    """
    function, outermost = None, None
    while frame is not None and _root(frame) in ("numpy", "scipy"):
        function = _public_function(frame) or function
        outermost, frame = frame, frame.f_back
    if outermost is not None:
        special = _from_class(outermost, function)
        if special is not None and function is not None and function[0].startswith("numpy") and special[0] in _NAMED:
            return _as_written(*function), _mend(*function) or special[1]
        if special is not None:
            return special
    elif frame is not None and _root(frame) != "spmd":
        return _from_line(frame)
    if function is None:
        return None
    return _as_written(*function), _mend(*function)


def _as_written(module: str, name: str) -> str:
    return f"{re.sub('^numpy', 'np', module)}.{name}"


_SPARSE = (
    "A.toarray() @ x of a small matrix; spmd.custom_vjp around lambda x: A @ x, with A.T @ g as its derivative, of a "
    "large one"
)
_CLASS_ERRORS = {
    "scipy.sparse": ("scipy.sparse, as A @ x calls it", _SPARSE),
    "numpy.ma": ("np.ma", "np.where(mask, other, x) in place of a masked array"),
    "numpy.matrixlib": ("np.matrix", "x as it is: an array of two dimensions"),
    "numpy.polynomial": ("np.polynomial", "np.polyval(c[::-1], t), of the coefficients in the opposite order"),
}
"""Parts of NumPy and SciPy with classes of their own: what converts, and the mend."""
_NAMED = ("np.matrix", "np.polynomial")
"""Parts whose functions have their own names in errors."""


def _from_class(frame: FrameType, function: tuple[str, str] | None) -> tuple[str, str] | None:
    """`find_converter` for methods of NumPy's and SciPy's classes."""
    owner = frame.f_locals.get("self")
    if frame.f_code.co_qualname.startswith("AxisConcatenator."):
        name = "c_" if type(owner).__name__ == "CClass" else "r_"
        return f"np.{name}", f"spmd.numpy.{name}[...]"
    if function is not None and function[0].startswith("scipy") and not _is_class(*function):
        return None
    module = frame.f_globals["__name__"]
    return next((entry for part, entry in _CLASS_ERRORS.items() if f"{module}.".startswith(f"{part}.")), None)


def _is_class(module: str, name: str) -> bool:
    return isinstance(getattr(sys.modules[module], name, None), type)


def _root(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _public_function(frame: FrameType) -> tuple[str, str] | None:
    """The public module and name of the function, class or method that runs in a frame."""
    name = re.sub(r"\.(__|<).*", "", frame.f_code.co_qualname)
    first = name.partition(".")[0]
    for module in itertools.accumulate(frame.f_globals["__name__"].split("."), "{}.{}".format):
        if "._" in module or first not in getattr(sys.modules.get(module), "__all__", ()):
            continue
        f = getattr(sys.modules[module], first)
        if isinstance(f, ModuleType):
            continue
        code = getattr(getattr(f, "_implementation", f), "__code__", frame.f_code)
        if module != "numpy" or code is frame.f_code:  # other parts of NumPy have functions of the same names
            return module, name
    return None


def _from_line(frame: FrameType) -> tuple[str, str] | None:
    """`find_converter` for the current instruction of the user's code."""
    opcode = opname[frame.f_code.co_code[frame.f_lasti]]
    if opcode == "STORE_SUBSCR":
        return "b[i] = x", "b = spmd.at(b)[i].set(x)"
    if opcode == "BINARY_SUBSCR":
        return "b[i]", "spmd.numpy.take(b, i, axis=0), for an i of integers"
    callee = _callee(frame) if opcode.startswith("CALL") else None
    if callee is None:
        return None
    value = _value(callee, frame)
    if value is not None:
        return _from_c_function(value)
    if not isinstance(callee, ast.Attribute):
        return None
    name, owner = callee.attr, _value(callee.value, frame)
    if isinstance(owner, np.random.Generator | np.random.RandomState):
        return f"rng.{name}", f"a draw that does not depend on it: loc + scale * rng.{name}(size=n)"
    if name in np.__all__ and hasattr(np.ndarray, name):
        return f"ndarray.{name}", f"np.{name}(...)"
    return ("dtype.type", "x.astype(dtype)") if name == "type" else None


def _callee(frame: FrameType) -> ast.expr | None:
    """The function that a frame calls, as an expression."""
    row, last, start, stop = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if row is None or last is None:
        return None
    lines = [linecache.getline(frame.f_code.co_filename, k).encode() for k in range(row, last + 1)]
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    try:
        call = ast.parse(b"".join(lines).strip(), mode="eval").body
    except SyntaxError:
        return None
    return call.func if isinstance(call, ast.Call) else None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of a name, or of a name in a module; None for anything that would have to be computed."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None


_AS_NUMPY = {"fabs": "abs", "pow": "power", "fsum": "sum", "dist": "linalg.norm", "phase": "angle", "fmod": "fmod"}
"""Functions of Python's math and cmath that NumPy calls otherwise, and by no name of the standard."""


def _from_c_function(f: Any) -> tuple[str, str] | None:
    """`find_converter` for a C function."""
    name = getattr(f, "__name__", "")
    if isinstance(f, type) and issubclass(f, np.generic):
        return f"np.{name}", f"x.astype(np.{name})"
    if getattr(f, "__module__", "") in ("math", "cmath"):
        if name in ("erf", "erfc", "gamma", "lgamma"):
            return f"{f.__module__}.{name}", f"spmd.scipy.special.{'gammaln' if name == 'lgamma' else name}(x)"
        numpy_name = _AS_NUMPY.get(name, name)
        return (f"{f.__module__}.{name}", f"np.{numpy_name}(x)") if hasattr(np, numpy_name.partition(".")[0]) else None
    return (f"np.{name}", _mend("numpy", name)) if name in np.__all__ and getattr(np, name) is f else None


def _mend(module: str, name: str) -> str:
    """What to write in place of a public function; empty if unknown."""
    f = getattr(sys.modules[module], name, None)
    if module == "numpy":
        if name in overrides:
            return f"spmd.numpy.{name}(...)" + ", or np.stack([a, b])" * (name in ("array", "asarray", "asanyarray"))
        importlib.import_module("spmd.autodiff.rules.refused")
        return refusals.get(f, "") if callable(f) else ""
    if module in _SCIPY_RULES:
        functions = importlib.import_module(f"spmd.autodiff.rules.{_SCIPY_RULES[module]}").functions
        if functions.get(name, f) is not f:
            return refusals.get(f) or f"spmd.{module}.{name}(...)"
    return f"spmd.custom_vjp around {module}.{name}, with its derivative" if module.startswith("scipy") else ""
