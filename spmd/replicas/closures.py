"""The arrays that a body closes over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from spmd.replicas.compare import compared_part, digest, next_turn
from spmd.replicas.records import ReplicaRecord, Replicas, array_text

__all__ = ["closed_arrays", "note_closure"]


def note_closure(
    axes: tuple[str, ...], replicas: Replicas, where: str, arrays: list[tuple[str, Any]], turns: dict[Any, int]
) -> None:
    """Note the arrays that a body closes over, with their names. They must be equal along `axes`."""
    for name, x in arrays:
        if replicas.declared.overlaps(x):
            continue
        turn = next_turn(turns, (name, x.shape))
        part = compared_part(x, turn)
        replicas.add(axes, ReplicaRecord(where, name, "", array_text(x), turn, digest(part), part), "closure")


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
    arrays: list[tuple[str, np.ndarray]] = []
    seen: set[int] = set()

    def walk(name: str, x: Any) -> None:
        if id(x) in seen:
            return
        if _is_plain_tensor(x):
            seen.add(id(x))
            with contextlib.suppress(TypeError, RuntimeError):  # on a device, or of a dtype that NumPy lacks
                arrays.append((name, np.asarray(x)))
        elif isinstance(x, np.ndarray):
            seen.add(id(x))
            if x.dtype.kind not in "OV" and type(x) is np.ndarray:
                arrays.append((name, x))
        elif isinstance(x, functools.partial | MethodType | FunctionType | list | tuple) or type(x) is dict:
            seen.add(id(x))
            for part_name, part in _parts(name, x):
                walk(part_name, part)

    walk(getattr(f, "__name__", type(f).__name__), f)
    call = getattr(type(f), "__call__", None)  # noqa: B004
    if isinstance(call, FunctionType):  # an object of the user's class
        walk(type(f).__name__, MethodType(call, f))
    return arrays


def _parts(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a method, a partial function or a container refers to, with names."""
    if isinstance(x, functools.partial):
        yield from ((name, x.func), (f"{name}.args", x.args), (f"{name}.keywords", x.keywords))
    elif isinstance(x, MethodType):
        yield name, x.__func__
        of = x.__self__
        for attribute, value in {**vars(type(of)), **getattr(of, "__dict__", {})}.items():
            if isinstance(value, np.ndarray | list | tuple | dict) or _is_plain_tensor(value):
                yield f"{type(of).__name__}.{attribute}", value
    elif isinstance(x, FunctionType):
        for cell_name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that has no value yet
                yield cell_name, cell.cell_contents
        for global_name in _names_in(x.__code__):
            value = x.__globals__.get(global_name)
            if not isinstance(value, FunctionType) or value.__module__ == x.__module__:
                yield global_name, value
        yield from ((f"{name}.__defaults__", x.__defaults__), (f"{name}.__kwdefaults__", x.__kwdefaults__))
    elif isinstance(x, dict):
        yield from ((f"{name}[{k!r}]", item) for k, item in x.items())
    else:
        yield from ((f"{name}[{k}]", item) for k, item in enumerate(x))
