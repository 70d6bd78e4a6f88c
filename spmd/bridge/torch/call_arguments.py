"""Arguments of functions of torch: the tensors among them, and one of them by position or name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["argument", "map_tensors", "tensors_in"]


def argument(args: Any, kwargs: dict, position: int, name: str, default: Any = None) -> Any:
    """An argument that is given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def tensors_in(args: Any, kwargs: dict) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a function, also in tuples, lists and dicts."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, torch.Tensor):
            yield a
        elif type(a) in (tuple, list):
            yield from tensors_in(a, {})
        elif type(a) is dict:
            yield from tensors_in((), a)


def map_tensors(function: Callable[[torch.Tensor], Any], a: Any) -> Any:
    """An argument or result with function(x) in place of each tensor x, also in tuples, lists and dicts."""
    if isinstance(a, torch.Tensor):
        return function(a)
    if type(a) in (tuple, list):
        return type(a)(map_tensors(function, b) for b in a)
    if type(a) is dict:
        return {k: map_tensors(function, b) for k, b in a.items()}
    return a
