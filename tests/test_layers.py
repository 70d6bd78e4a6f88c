"""Imports are absolute and run one way: a file imports only what stands above it in LEVELS, and no file comes back to
itself through what it imports, at any depth, in functions and for types too."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Top to bottom. Files and folders of one level may import each other.
LEVELS = [
    {"errors", "lazy_imports", "settings", "spellings", "tracebacks"},
    {"kernels", "autodiff"},
    {"box_layout", "layout", "layout_arguments", "layout_picture", "layout_rules", "representations", "spec"},
    {"grid"},
    {"spec_trees"},
    {"plan"},
    {"window"},
    {"window_nd"},
    {"state"},
    {"device", "cuda"},
    {"transport"},
    {"transport_choice"},
    {"frontends"},
    {"mesh", "replicas"},
    {"axes"},
    {"ownership"},
    {"operators"},
    {"resharding"},
    {"global_functions"},
    {"array"},
    {"array_functions"},
    {"placement"},
    {"inner_product", "creation"},
    {"scheduler_choice"},
    {"map_arguments"},
    {"map_results"},
    {"mapped_body"},
    {"map_interpreters"},
    {"mapping"},
    {"fourier"},
    {"global_ops"},
    {"array_api"},
    {"loops"},
    {"jit_entry"},
    {"jit_warnings"},
    {"jitted"},
    {"jitted_functions"},
    {"linear"},
    {"data", "fft", "functions", "random", "optim", "solvers"},
    {"training"},
    {"io"},
    {"bench"},
    {"progress_bars", "worker_prints"},
    {"ledger", "debug", "info", "doctor"},
    {"profiling"},
    {"numpy", "plot", "scipy"},
    {"adjoints", "strategies"},
    {"testing", "pytest_plugin"},
    {"__init__"},
    {"bridge"},
    {"__main__"},
]
LEVEL = {part: depth for depth, parts in enumerate(LEVELS) for part in parts}
LEAVES = {"kernels", "autodiff"}
_FIRST = ", ".join(f"spmd.{part}" for part in sorted(LEVELS[0]))


def modules() -> dict[str, Path]:
    """Dotted name → file of every module; those under the links carry their name inside spmd."""
    found = {}
    for folder, folders, files in os.walk(ROOT / "spmd", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            if name.endswith(".py"):
                path = Path(folder, name)
                found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.AST, list[str], bool]]:
    """Every import at or below `node`: where, the dotted names it asks for, and whether only type checkers see it.

    `from spmd import errors` asks for `spmd.errors`; a relative import asks for a name that starts with a dot.
    """
    match node:
        case ast.Import(names=names):
            yield node, [alias.name for alias in names], typing_only
        case ast.ImportFrom(module=module, names=names, level=level):
            base = "." * level + (module or "")
            yield node, [f"{base}.{alias.name}" if base == "spmd" else base for alias in names], typing_only
        case ast.Call(func=ast.Name("__import__") | ast.Name("import_module") | ast.Attribute(attr="import_module")):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield node, [name], typing_only
    if isinstance(node, ast.If) and is_type_checking(node.test):
        for child in node.body:
            yield from imports(child, True)
        for child in node.orelse:
            yield from imports(child, typing_only)
        return
    for child in ast.iter_child_nodes(node):
        yield from imports(child, typing_only)


def part_of(name: str) -> str | None:
    """The part of spmd that a dotted name lies in; None for other libraries. What spmd/__init__ exports is its own."""
    match name.split("."):
        case ["spmd"]:
            return "__init__"
        case ["spmd", part, *_]:
            return part if part in LEVEL else "__init__"
        case _:
            return None


def fault(importer: str, name: str) -> str | None:
    """What is wrong with `importer` (a part of spmd) importing `name` at run time, if anything is."""
    if name.startswith("."):
        return "relative import"
    if name.split(".", 1)[0] in LEAVES:
        return f"the top-level name is another distribution's: import spmd.{name}"
    part = part_of(name)
    if part is None or part == importer:
        return None
    if importer in LEAVES:
        return None if part in LEVELS[0] else f"{importer} may import {_FIRST} and spmd.{importer} only"
    if LEVEL[part] > LEVEL[importer]:
        return f"{part} stands below {importer}"
    return None


def faults(importer: str, source: str, shown: str) -> list[str]:
    return [
        f"{shown}:{node.lineno}: {ast.unparse(node)}  ({wrong})"  # type: ignore[attr-defined]
        for node, names, typing_only in imports(ast.parse(source))
        for name in dict.fromkeys(names)
        if (wrong := fault(importer, name)) and not (typing_only and wrong != "relative import")
    ]


MODULES = modules()


def test_every_part_has_its_level():
    assert MODULES, "no modules found"
    parts = {name.split(".")[1] for name in MODULES}
    assert parts <= LEVEL.keys(), f"no level in LEVELS: {sorted(parts - LEVEL.keys())}"


def test_imports_run_one_way():
    wrong = []
    for name, path in sorted(MODULES.items()):
        shown = str(path.resolve().relative_to(ROOT))
        wrong += faults(name.split(".")[1], path.read_text(encoding="utf-8"), shown)
    assert not wrong, "\n" + "\n".join(wrong)


def imported_files(source: str, files: Collection[str]) -> set[str]:
    """The files among `files`, dotted names, that a source imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                found |= {f"{module}.{alias.name}" if f"{module}.{alias.name}" in files else module for alias in names}
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
    return found & set(files)


def circles(edges: Mapping[str, Collection[str]]) -> list[tuple[str, ...]]:
    """The groups of nodes from each of which a way leads to all others of the group."""

    def reach(start: str) -> set[str]:
        seen, stack = set(), [start]
        while stack:
            for node in edges[stack.pop()]:
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
        return seen

    reached = {node: reach(node) for node in edges}
    return sorted({tuple(sorted(m for m in reached[n] if n in reached[m])) for n in edges if n in reached[n]})


def test_no_file_imports_itself_through_others():
    files = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}
    edges = {name: imported_files(path.read_text(encoding="utf-8"), files) - {name} for name, path in files.items()}
    assert not circles(edges), "\n".join(" <-> ".join(group) for group in circles(edges))


def test_circles_are_found():
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [("b", "c")]
    assert imported_files("def f():\n    from spmd import mesh", {"spmd", "spmd.mesh"}) == {"spmd.mesh"}
    assert imported_files("if TYPE_CHECKING:\n    from spmd.mesh import Mesh", {"spmd.mesh"}) == {"spmd.mesh"}


@pytest.mark.parametrize(
    ("importer", "source", "wrong"),
    [
        ("mesh", "import spmd.transport.local.transport", False),
        ("mesh", "from spmd import errors, layout", False),
        ("mesh", "from spmd import errors, mapping", True),
        ("mesh", "import numpy, spmd.array", True),
        ("mesh", "def f():\n    from spmd.operators.base import Operator", True),
        ("mesh", "import importlib\nimportlib.import_module('spmd.mapping')", True),
        ("mesh", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from spmd.array import inner", False),
        ("mesh", "if TYPE_CHECKING:\n    pass\nelse:\n    from spmd.array import inner", True),
        ("mesh", "if TYPE_CHECKING:\n    from .array import inner", True),
        ("mesh", "from . import errors", True),
        ("mesh", "from spmd.kernels import of", False),
        ("mesh", "from kernels import of", True),
        ("mesh", "import autodiff.tape", True),
        ("mesh", "import spmd", True),
        ("mesh", "from spmd import P", True),
        ("transport", "from spmd.transport.base import Transport", False),
        ("functions", "import spmd.optim", False),
        ("numpy", "import numpy as np", False),
        ("kernels", "from spmd.errors import message\nimport spmd.kernels.cpu", False),
        ("kernels", "from spmd.autodiff.tape import Tape", True),
        ("kernels", "from spmd import layout", True),
        ("kernels", "import spmd", True),
        ("autodiff", "from spmd.kernels import of", True),
        ("errors", "from spmd.layout import P", True),
        ("__init__", "from spmd.bridge import torch", True),
        ("__main__", "import spmd", False),
    ],
)
def test_the_rule_itself(importer, source, wrong):
    assert bool(faults(importer, source, "file.py")) is wrong
