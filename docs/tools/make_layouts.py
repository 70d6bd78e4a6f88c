"""Write the table of layouts in docs/explanation/global.md, of the rules with which functions are registered:
`python docs/tools/make_layouts.py`."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np

import spmd.global_ops.all  # noqa: F401
from spmd.autodiff.indexing import At
from spmd.autodiff.primitive import name_of
from spmd.layout_rules import RULES, Rule

PAGE = Path(__file__).parents[1] / "explanation" / "global.md"
COMMAND = "python docs/tools/make_layouts.py"
VERSION = f"NumPy {'.'.join(np.__version__.split('.')[:2])}"
START, END = f"<!-- {VERSION}, by {COMMAND} -->", "<!-- end of the table -->"

_NAMES = {np.ufunc: "ufuncs", operator.getitem: "`x[...]`", At: "`x.at[i].set(v)`, `.add(v)`, ...", None: "others"}


def table() -> str:
    """The table: a row for each rule."""
    rows = [f"| {', '.join(map(_name, _functions(rule)))} | {rule.value} |" for rule in Rule]
    return "\n".join([START, "", "| function | layout of the result |", "|---|---|", *rows, "", END])


def _functions(rule: Rule) -> list[Any]:
    return [f for f, other in RULES.items() if other is rule]


def _name(function: Any) -> str:
    return _NAMES.get(function) or f"`{name_of(function).removeprefix('np.')}`"


def text(page: str) -> str:
    """The page with its table written anew."""
    before, _, rest = page.partition("<!-- NumPy ")
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(text(PAGE.read_text()))
