"""The type variables of the signatures of public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ParamSpec, TypedDict, TypeVar, TypeVarTuple

__all__ = ["Aux", "Container", "First", "Options", "Parameters", "Primals", "Result", "Second", "Third", "Tree"]

Parameters = ParamSpec("Parameters")
Primals = TypeVarTuple("Primals")
Result = TypeVar("Result")
Aux = TypeVar("Aux")
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")
Tree = TypeVar("Tree", bound=Any)
"""An array or a tree of arrays, whose type a function keeps."""
Container = TypeVar("Container", bound=Mapping[Any, Any] | list[Any] | tuple[Any, ...])
"""A tree of arrays that is no array."""


class Options(TypedDict, total=False):
    """What `spmd.grad` and `spmd.value_and_grad` take beside what is differentiated."""

    holomorphic: bool
    allow_int: bool
