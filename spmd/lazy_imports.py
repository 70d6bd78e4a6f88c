"""Names of a module that are imported from other modules on first use. Most programs need few of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from spmd.errors import MissingMethodError, message
from spmd.tracebacks import api_boundary

__all__ = ["absent", "late"]


def late(
    module: str, names: Mapping[str, Collection[str]], parts: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module.

    names: the names that each other module defines. parts: submodules that are available as attributes.
    """
    places = {name: place for place, some in names.items() for name in some}

    @api_boundary
    def found(name: str) -> Any:
        if name in parts:
            return import_module(f"{module}.{name}")
        if name not in places:
            raise absent(module, name)
        value = getattr(import_module(places[name]), name)
        return vars(sys.modules[module]).setdefault(name, value)

    def known() -> list[str]:
        return sorted({*vars(sys.modules[module]), *places, *parts})

    return found, known


def absent(module: str, name: str) -> AttributeError:
    """The error for a name that a module lacks. It says what to write for names of other libraries."""
    if not name.startswith("_"):
        spellings = import_module("spmd.spellings")
        mend = spellings.instead(module, name)
        if mend:
            text = message(f"{module}.{name}", got="a name of another library", need="one of spmd's", mend=mend)
            return MissingMethodError(text, name=name, obj=None)  # obj=None: Python adds no suggestions
    return AttributeError(f"module {module!r} has no attribute {name!r}")
