"""The arrays that a body closes over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from spmd.replicas.compare import compared_part, digest, next_turn
from spmd.replicas.records import Record, Replicas, array_text

__all__ = ["closed_arrays", "note_closure"]


def note_closure(axes: tuple[str, ...], replicas: Replicas, where: str, f: Callable, turns: dict[Any, int]) -> None:
    """Note the arrays that a body closes over, which must be equal along `axes`."""
    for name, x in closed_arrays(f):
        if any(x is a or np.may_share_memory(x, a) for a in replicas.declared):
            continue
        turn = next_turn(turns, (name, x.shape))
        part = compared_part(x, turn)
        replicas.add(axes, Record(where, name, "", array_text(x), turn, digest(part), part), "closure")


@lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function and the functions inside it use."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names_in(c)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _is_plain_tensor(x: Any) -> bool:
    """Whether x is a torch tensor of data. Parameters are compared where they are differentiated."""
    return type(x).__module__ == "torch" and type(x).__name__ == "Tensor" and not x.requires_grad


def closed_arrays(f: Callable) -> list[tuple[str, np.ndarray]]:
    """The arrays that a function closes over, with their names.

    They are those of its cells, globals, defaults and partial arguments, also inside lists, tuples and dicts, and those
    of the functions of its module that it uses.
    """
    found: list[tuple[str, np.ndarray]] = []
    seen: set[int] = set()

    def walk(name: str, x: Any) -> None:
        if id(x) in seen:
            return
        if _is_plain_tensor(x):
            seen.add(id(x))
            with contextlib.suppress(TypeError, RuntimeError):  # on a device, or of a dtype that NumPy lacks
                found.append((name, np.asarray(x)))
        elif isinstance(x, np.ndarray):
            seen.add(id(x))
            if x.dtype.kind not in "OV" and type(x) is np.ndarray:
                found.append((name, x))
        elif isinstance(x, functools.partial):
            seen.add(id(x))
            walk(name, x.func)
            walk(f"{name}.args", x.args)
            walk(f"{name}.keywords", x.keywords)
        elif isinstance(x, MethodType):
            seen.add(id(x))
            walk(name, x.__func__)
            attributes(x.__self__)
        elif isinstance(x, FunctionType):
            seen.add(id(x))
            for cell_name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # a cell that has no value yet
                    walk(cell_name, cell.cell_contents)
            for global_name in _names_in(x.__code__):
                y = x.__globals__.get(global_name)
                if not isinstance(y, FunctionType) or y.__module__ == x.__module__:
                    walk(global_name, y)
            walk(f"{name}.__defaults__", x.__defaults__)
            walk(f"{name}.__kwdefaults__", x.__kwdefaults__)
        elif isinstance(x, list | tuple):
            seen.add(id(x))
            for k, item in enumerate(x):
                walk(f"{name}[{k}]", item)
        elif type(x) is dict:
            seen.add(id(x))
            for k, item in x.items():
                walk(f"{name}[{k!r}]", item)

    def attributes(x: Any) -> None:
        """Arrays among the attributes of the object that a method is bound to."""
        seen.add(id(x))
        for attribute, value in {**vars(type(x)), **getattr(x, "__dict__", {})}.items():
            if isinstance(value, np.ndarray | list | tuple | dict) or _is_plain_tensor(value):
                walk(f"{type(x).__name__}.{attribute}", value)

    walk(getattr(f, "__name__", type(f).__name__), f)
    call = getattr(type(f), "__call__", None)  # noqa: B004
    if isinstance(call, FunctionType):  # an object of the user's class
        walk(type(f).__name__, MethodType(call, f))
    return found
