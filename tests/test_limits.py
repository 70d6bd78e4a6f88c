"""A core file is read in one sitting, a function in one look: limits on both, and what may exceed them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("spmd", "autodiff", "kernels")
LINES_OF_FILE, LINES_OF_FUNCTION = 500, 60
LEFT_OUT = ("autodiff/rules", "kernels/cpu", "kernels/gpu")
"""Tables of rules and kernels: many short things of one kind in each file."""

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
COMPLEX_FUNCTIONS: dict[str, str] = {}
"""Exceptions, at most five of each kind, each with its reason."""


def files() -> Iterator[tuple[str, str]]:
    """The core files, by their path, with their text."""
    for root in CORE:
        for folder, folders, names in os.walk(ROOT / root):
            folders[:] = [f for f in folders if f != "__pycache__" and not Path(folder, f).is_symlink()]
            for name in names:
                path = str(Path(folder, name).relative_to(ROOT))
                if name.endswith(".py") and not path.startswith(LEFT_OUT):
                    yield path, (ROOT / path).read_text(encoding="utf-8")


def long_functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LINES_OF_FUNCTION:
                yield node.name, lines


def test_files_are_short():
    long = {path: text.count("\n") for path, text in files() if text.count("\n") > LINES_OF_FILE}
    assert long.keys() == LONG_FILES.keys(), long


def test_functions_are_short():
    long = {f"{path}:{name}": lines for path, text in files() for name, lines in long_functions(text)}
    assert long.keys() == LONG_FUNCTIONS.keys(), long
    assert list(long_functions("def f():\n" + "    x = 1\n" * 60)) == [("f", 61)]


def test_functions_are_simple():
    """As the settings of ruff say, but for exceptions that `noqa` marks."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "concise", "--no-cache"]
    done = subprocess.run([*command, *CORE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    marked = [path for path, text in files() if "noqa: C901" in text]
    assert sorted(marked) == sorted(COMPLEX_FUNCTIONS)


def test_exceptions_are_few_and_have_reasons():
    for exceptions in (LONG_FILES, LONG_FUNCTIONS, COMPLEX_FUNCTIONS):
        assert len(exceptions) <= 5
        assert all(len(reason) > 20 for reason in exceptions.values())
