"""The type variables of the signatures of public functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, TypeVarTuple

from spmd.autodiff.static_array import AnyArray

__all__ = [
    "Aux",
    "Carry",
    "Container",
    "First",
    "Options",
    "Parameters",
    "Primals",
    "Result",
    "Second",
    "Slices",
    "Stacked",
    "Third",
    "Tree",
]

Parameters = ParamSpec("Parameters")
Primals = TypeVarTuple("Primals")
Result = TypeVar("Result")
Aux = TypeVar("Aux")
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")
Tree = TypeVar("Tree", bound=Any)
"""An array or a tree of arrays, whose type a function keeps."""
Carry = TypeVar("Carry")
"""What a loop hands from step to step."""
Slices = TypeVar("Slices")
Container = TypeVar("Container", bound=Mapping[Any, Any] | list[Any] | tuple[Any, ...])
"""A tree of arrays that is no array."""
Stacked = TypeVar("Stacked", bound=AnyArray | Sequence[AnyArray] | Mapping[Any, AnyArray] | None)
"""An array or a tree of arrays, nothing of which is a number of Python: stacked, each keeps its type."""


class Options(TypedDict, total=False):
    """What `spmd.grad` and `spmd.value_and_grad` take beside what is differentiated."""

    holomorphic: bool
    allow_int: bool
