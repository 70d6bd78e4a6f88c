"""Names of a module that are imported from other modules on first use. Most programs need few of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from spmd.errors import MissingMethodError, message
from spmd.tracebacks import api_boundary

__all__ = ["lazy_attributes", "missing_name_error"]


def lazy_attributes(
    module: str, names: Mapping[str, Collection[str]], parts: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module.

    names: the names that each other module defines. parts: submodules that are available as attributes. The names that
    `dir` gives are those of `__all__` and the parts: what editors complete.
    """
    module_of = {name: source for source, group in names.items() for name in group}

    @api_boundary
    def module_getattr(name: str) -> Any:
        if name in parts:
            return import_module(f"{module}.{name}")
        if name not in module_of:
            raise missing_name_error(module, name)
        value = getattr(import_module(module_of[name]), name)
        return vars(sys.modules[module]).setdefault(name, value)

    def module_dir() -> list[str]:
        return sorted({*getattr(sys.modules[module], "__all__", ()), *module_of, *parts})

    return module_getattr, module_dir


def missing_name_error(module: str, name: str) -> AttributeError:
    """The error for a name that a module lacks. It says what to write for names of other libraries."""
    if not name.startswith("_"):
        spellings = import_module("spmd.spellings")
        mend = spellings.instead(module, name)
        if mend:
            text = message(f"{module}.{name}", got="a name of another library", need="one of spmd's", mend=mend)
            return MissingMethodError(text, name=name, obj=None)  # obj=None: Python adds no suggestions
    return AttributeError(f"module {module!r} has no attribute {name!r}")
