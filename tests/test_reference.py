"""The reference: every public name is on one page, and its docstring ends with an example that runs."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spmd

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS / "extensions"))
docstrings = importlib.import_module("docstrings")
public_names = importlib.import_module("public_names")
sys.path.remove(str(DOCS / "extensions"))

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def cases(torch: bool) -> list[Any]:
    """A page and a name of each example."""
    pages = [page for page in public_names.PAGES if page.torch == torch]
    if torch and importlib.util.find_spec("torch") is None:
        return []
    found = [] if torch else [("spmd", name) for name in public_names.names_of("spmd")]
    found += [(page.module, name) for page in pages for name in public_names.names_of(page.module)]
    return [pytest.param(module, name, id=f"{module}.{name}") for module, name in found]


def run(module: str, name: str) -> None:
    thing = public_names.names_of(module)[name]
    names = {"np": np, "spmd": spmd, "P": spmd.P}
    if "torch" in module:
        names |= {"torch": importlib.import_module("torch"), "spt": importlib.import_module("spmd.bridge.torch")}
    test = doctest.DocTestParser().get_doctest(public_names.docstring_of(name, thing), names, name, None, 0)
    assert any(e.want for e in test.examples), f"{module}.{name} has no example that shows something"
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=said.append)
    assert not result.failed, "".join(said)


@pytest.mark.parametrize(("module", "name"), cases(torch=False))
def test_the_example_runs(module, name):
    run(module, name)


@pytest.mark.torch
@pytest.mark.parametrize(("module", "name"), cases(torch=True))
def test_the_example_for_torch_runs(module, name):
    run(module, name)


def test_each_public_name_of_spmd_is_in_one_group():
    grouped = Counter(" ".join(public_names.SPMD_GROUPS.values()).split())
    assert not {name for name, n in grouped.items() if n > 1}
    assert set(grouped) == set(spmd.__all__) | {"PartitionedArray"}


def test_docstrings_become_markdown():
    text = "Sum.\n\nx: (N, *m). dim: an axis.\nForward: y_i = x * 2. Cost: none. As `np.sum`."
    text += "\n\n    >>> 1 + 1\n    2\n\n    ==> a"
    assert docstrings.markdown(text, ["x", "dim"]) == (
        "Sum.\n\n- **x**: (N, \\*m).\n\n- **dim**: an axis.\n\n**Forward**: y\\_i = x \\* 2.\n\n**Cost**: none.\n\n"
        "As `np.sum`.\n\n```pycon\n>>> 1 + 1\n2\n\n==> a\n```"
    )


def test_an_example_after_the_first_line_alone_is_code():
    assert docstrings.markdown("Sum.\n\n>>> 1 + 1\n2", []) == "Sum.\n\n```pycon\n>>> 1 + 1\n2\n```"


def test_lines_with_dashes_are_points_of_a_parameter():
    text = "Sum.\n\nmethod: how.\n- a: one,\n  two.\n- b: three."
    assert docstrings.markdown(text, ["method"]) == "Sum.\n\n- **method**: how.\n\n  - a: one, two.\n\n  - b: three."


@pytest.mark.torch
def test_each_function_for_tensors_has_an_example_for_tensors():
    examples = pytest.importorskip("spmd.bridge.torch.function_examples").EXAMPLES
    assert set(examples) == set(public_names.names_of("spmd.bridge.torch.functions"))
