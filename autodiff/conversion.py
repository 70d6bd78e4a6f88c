"""Who asked an Array for its bare data or a number, and what takes traced arrays instead. Loaded for the error."""

from __future__ import annotations

import importlib
import itertools
import linecache
import re
import sys
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from spmd.autodiff.primitive import refusals

__all__ = ["asked"]

_TWINS = {"scipy.fft": "fourier_scipy", "scipy.special": "special"}
"""The modules of SciPy that have twins, and which rules hold them."""


def asked(frame: FrameType | None) -> tuple[str, str] | None:
    """The public function of NumPy or SciPy that asked, as users write it, and the mend for it; None if unknown.

    frame: where the conversion was asked for. The outermost public function on the way to the user's code is the one
    that the user called. A function of C has no frame: it stands in the text of the line that called it.
    """
    found = None
    while frame is not None and _root(frame) in ("numpy", "scipy"):
        found = _running(frame) or found
        frame = frame.f_back
    if found is None and frame is not None and _root(frame) != "spmd":
        found = _called(frame)
    if found is None:
        return None
    module, name = found
    return f"{re.sub('^numpy', 'np', module)}.{name}", _mend(module, name)


def _root(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _running(frame: FrameType) -> tuple[str, str] | None:
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


def _called(frame: FrameType) -> tuple[str, str] | None:
    """The function of NumPy that a frame calls just now, if the text of the line names it."""
    row, last, start, stop = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if row is None or start is None:
        return None
    line = linecache.getline(frame.f_code.co_filename, row).encode()
    text = (line[start:stop] if row == last else line[start:]).decode()
    first, *rest = (re.match(r"[\w.]*", text) or [""])[0].split(".")
    value: Any = {**frame.f_globals, **frame.f_locals}.get(first)
    for name in rest:
        value = getattr(value, name, None) if isinstance(value, ModuleType) else None
    name = getattr(value, "__name__", None)
    return ("numpy", name) if name in np.__all__ and getattr(np, name) is value else None


def _mend(module: str, name: str) -> str:
    """What to write in place of a public function; nothing where the error says it anyway."""
    f = getattr(sys.modules[module], name, None)
    if module == "numpy":
        from spmd.autodiff.namespace import twins

        if name in twins:
            return "" if name in ("array", "asarray", "asanyarray") else f"spmd.numpy.{name}(...)"
        importlib.import_module("spmd.autodiff.rules.refused")
        return refusals.get(f, "") if callable(f) else ""
    if module in _TWINS:
        functions = importlib.import_module(f"spmd.autodiff.rules.{_TWINS[module]}").functions
        if functions.get(name, f) is not f:
            return refusals.get(f) or f"spmd.{module}.{name}(...)"
    return f"spmd.custom_vjp around {module}.{name}, with its derivative" if module.startswith("scipy") else ""
