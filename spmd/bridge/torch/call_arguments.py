"""Arguments of functions of torch: the tensors among them, and one of them by position or name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["argument", "tensors_in"]


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
