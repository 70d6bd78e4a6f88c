"""What a module names and others define, imported when it is first asked for: most programs need little of it."""

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
    """The `__getattr__` and the `__dir__` of a module. names: those that each other module defines; parts: its modules
    that are asked for as they are."""
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
    """The error for a name that a module lacks, with what to write where other libraries have it."""
    if not name.startswith("_"):
        spellings = import_module("spmd.spellings")
        mend = spellings.instead(module, name)
        if mend:
            text = message(f"{module}.{name}", got="a name of another library", need="one of spmd's", mend=mend)
            return MissingMethodError(text, name=name, obj=None)  # of no object: Python is to guess nothing more
    return AttributeError(f"module {module!r} has no attribute {name!r}")
