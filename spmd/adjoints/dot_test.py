"""A dot test: a map, its arguments, and the line of Python that reproduces it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from spmd.layout import Layout, P
from spmd.mesh import Mesh
from spmd.operators.base import Operator

__all__ = ["DotTest", "default_specs"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DotTest:
    """A map, and the arguments that it is tested on; see `spmd.check_adjoint`."""

    mesh: Mesh
    f: Callable
    shapes: tuple[Shape, ...]
    specs: tuple[P | Layout | None, ...]
    out_specs: Any
    adjoint: Callable | None
    exact: bool
    real: bool
    dtype: np.dtype
    trials: int
    seed: int

    @property
    def operator(self) -> Operator | None:
        return self.f if isinstance(self.f, Operator) else None

    def reproduction(self) -> str:
        """The test as one line of Python, without options that have their defaults."""
        imports: dict[str, set[str]] = {}
        operator = self.operator
        name = _source_text(self.f, "f", imports)
        specs = self.specs if operator is None or self.specs != default_specs(operator, len(self.specs)) else None
        options = {
            "mesh": _mesh_text(self.mesh),
            "in_specs": None if specs is None else _source_text(specs[0] if len(specs) == 1 else specs, "", imports),
            "out_specs": None if self.out_specs is None else _source_text(self.out_specs, "", imports),
            "adjoint": None if self.adjoint is None else _source_text(self.adjoint, "adjoint", imports),
            "exact": None if self.exact == (operator is not None) else repr(self.exact),
            "real": "True" if self.real else None,
            "dtype": None if self.dtype == np.float64 else repr(self.dtype.name),
            "trials": None if self.trials == 3 else repr(self.trials),
            "seed": None if self.seed == 0 else repr(self.seed),
        }
        arguments = [name, *map(repr, self.shapes)]
        arguments += [f"{option}={text}" for option, text in options.items() if text is not None]
        call = f"spmd.check_adjoint({', '.join(arguments)})"
        lines = ["import numpy as np"] * ("np." in call) + ["import spmd"]
        lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
        return "; ".join([*lines, call])


def default_specs(operator: Operator, count: int) -> tuple[Layout | None, ...]:
    """The default layouts of an operator's arguments: its source, or None for a block of the shape on every worker."""
    source = getattr(operator, "src", None)
    return (source if isinstance(source, Layout) else None,) * count


def _mesh_text(mesh: Mesh) -> str:
    if {"transport", "scheduler", "comm"} & set(mesh.axes):
        return f"spmd.make_mesh({tuple(mesh.axes.values())}, {tuple(mesh.axes)})"
    return f"spmd.{mesh!r}"


def _source_text(value: Any, stand_in: str, imports: dict[str, set[str]]) -> str:
    """A value as Python text; adds the imports that it needs. A function that cannot be imported becomes its name."""
    if callable(value) and not isinstance(value, Operator):
        name, module = getattr(value, "__name__", ""), getattr(value, "__module__", None)
        if module and module != "__main__" and getattr(sys.modules.get(module), name, None) is value:
            imports.setdefault(module, set()).add(name)
        return name if name.isidentifier() else stand_in
    for part in _named_objects(value):
        kind = type(part)
        if isinstance(part, P | Layout):
            imports.setdefault("spmd", set()).add(kind.__name__)
        elif callable(part) and not isinstance(part, Operator):
            _source_text(part, "", imports)
        elif kind.__module__ != "__main__" and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind:
            imports.setdefault(kind.__module__, set()).add(kind.__name__)
    return repr(value)


def _named_objects(value: Any) -> Iterator[Any]:
    """The objects that the text of a value names."""
    if isinstance(value, Layout):
        yield value
        if value.spec is not None:
            yield value.spec
    elif isinstance(value, P):
        yield value
    elif isinstance(value, tuple | list | dict):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _named_objects(v)
    elif is_dataclass(value) and not isinstance(value, type):
        yield value
        for f in fields(value):
            yield from _named_objects(getattr(value, f.name))
