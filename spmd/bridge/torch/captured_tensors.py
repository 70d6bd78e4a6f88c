"""The tensors that a function captures: those that its code reaches, but not through arguments."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from spmd.errors import StateError

__all__ = ["captured_leaves", "lone_capture", "reachable_tensors"]

_LIBRARIES = ("torch", "numpy", "builtins", "spmd", "typing", "abc", "functools", "collections", "types")
_MAX_OBJECTS = 200_000


def reachable_tensors(f: Callable) -> set[int]:
    """The ids of the tensors that f can reach through its closure, its defaults and the globals that its code names,
    directly or through other objects. Libraries are not searched."""
    tensors: set[int] = set()
    seen: set[int] = set()
    queue: deque[Any] = deque([f])  # breadth first
    while queue and len(seen) < _MAX_OBJECTS:
        x = queue.popleft()
        if id(x) in seen or _is(x, str | bytes | int | float | complex | bool | types.CodeType):
            continue
        seen.add(id(x))
        if _is(x, torch.Tensor):
            tensors.add(id(x))
        else:
            queue.extend(_referents(x))
    return tensors


def _referents(x: Any) -> Iterable[Any]:
    if _is(x, types.FunctionType):
        held = [x.__closure__, x.__defaults__, x.__kwdefaults__, x.__dict__]
        if not _is_user_module(x.__module__ or ""):  # a wrapper of a library may hold a function of the user's
            return held
        names = _names_in(x.__code__)
        global_values = [x.__globals__[n] for n in names if n in x.__globals__]
        # The code reaches an attribute of a module by its name alone.
        modules = [m for m in global_values if _is(m, types.ModuleType) and _is_user_module(m.__name__)]
        return [*global_values, *(vars(m).get(n) for m in modules for n in names), *held]
    if _is(x, types.ModuleType):
        return ()
    if _is(x, type):
        return vars(x).values() if _is_user_module(x.__module__) else ()
    return [r for r in gc.get_referents(x) if not _is(r, type) or _is_user_module(r.__module__)]


def _names_in(code: types.CodeType) -> set[str]:
    """The names that code, and the functions that it makes, look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if _is(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _is(x: Any, kinds: Any) -> bool:
    """isinstance by the type alone: to look into a weak proxy whose object is gone is an error."""
    return issubclass(type(x), kinds)


def _is_user_module(module: str) -> bool:
    return module.split(".", 1)[0] not in _LIBRARIES


def captured_leaves(call: Any, run: Any) -> tuple[list[torch.Tensor], bool]:
    """The leaves of the workers' graphs that f captures: they are neither arguments nor created by f. And whether f
    captures leaves that some workers use, and others do not.

    A leaf in the graphs of several threads is captured. If this process runs only one worker, f is searched instead.

    Raises StateError if f captures a tensor with a history: all workers would run its graph.
    """
    leaves: dict[int, torch.Tensor] = {}
    workers: dict[int, set[int]] = {}  # by leaf, those whose graphs hold it
    visited: dict[Any, int] = {}  # by node, the worker whose graph holds it
    for index, outputs in run.outputs.items():
        inputs = {id(x) for x in (*run.inputs[index], *(run.contexts[index].extra_leaves or []))}

        def add(leaf: torch.Tensor, index: int = index, inputs: set[int] = inputs) -> None:
            if id(leaf) not in inputs:
                leaves[id(leaf)] = leaf
                workers.setdefault(id(leaf), set()).add(index)

        stack = [x.grad_fn for x in outputs if x is not None and x.grad_fn is not None]
        for x in outputs:
            if x is not None and x.grad_fn is None:
                add(x)
        while stack:
            node = stack.pop()
            other = visited.get(node)
            if other == index:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                add(variable)
                continue
            if other is not None:
                raise StateError.at(
                    call.where,
                    argument="f",
                    got=f"a function that closes over a tensor with a history: {node.name()} is in the graphs of "
                    f"{call.mesh.describe(other)} and {call.mesh.describe(index)}",
                    need="a tensor computed outside as an argument",
                    mend="pass it to the map, with a spec in in_specs (P() for a replicated one); parameters, "
                    "which have no history, may be closed over",
                )
            visited[node] = index
            stack.extend(n for n, _ in node.next_functions if n is not None)
    of_some = {key for key, found in workers.items() if len(found) < len(run.outputs)}
    reachable = reachable_tensors(call.mapped.f) if leaves and (of_some or len(run.outputs) == 1) else set()
    captured = [x for key, x in leaves.items() if len(workers[key]) > 1 or key in reachable]
    return captured, bool(of_some & reachable)


def lone_capture(call: Any) -> StateError:
    """The error of a backward from outside for a captured leaf that some workers use and others do not."""
    return StateError.at(
        call.where,
        argument="f",
        got="a function that closes over a leaf, such as a parameter, which some workers use alone",
        need="leaves that all workers use, for a backward outside of the map: each has one gradient",
        mend="make the module and call backward in the body, where the worker that runs a function of spt.remote or "
        "spt.at_root alone has its gradients; or pass parameters as arguments of the map and of that function",
    )
