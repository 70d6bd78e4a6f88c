"""The type variables of the transformations' signatures: arguments that are differentiated, the others, and results."""

from __future__ import annotations

from typing import ParamSpec, TypedDict, TypeVar, TypeVarTuple

__all__ = ["Aux", "First", "Options", "Parameters", "Primals", "Result", "Second", "Third"]

Parameters = ParamSpec("Parameters")
Primals = TypeVarTuple("Primals")
Result = TypeVar("Result")
Aux = TypeVar("Aux")
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")


class Options(TypedDict, total=False):
    """What `spmd.grad` and `spmd.value_and_grad` take beside what is differentiated."""

    holomorphic: bool
    allow_int: bool
