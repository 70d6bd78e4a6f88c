"""Load files that are no modules of a package: examples, and the programs and extensions of the documents."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["load"]


def load(path: Path) -> ModuleType:
    """The file as a module of its own; nothing is added to sys.modules."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
