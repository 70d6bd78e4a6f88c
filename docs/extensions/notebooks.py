"""Make a notebook of each example, before a build of the site."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

__all__ = ["notebook", "setup", "write_notebooks"]


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text, **code}


def notebook(path: Path) -> dict[str, Any]:
    """The program as a notebook: its docstring, and its code cut between classes and functions.

    The first cell of code says what a script knows of itself: its file, and that nothing follows its name.
    """
    source = path.read_text()
    lines = source.splitlines()
    _first, *body = ast.parse(source).body
    cuts = [body[0].lineno]
    for before, node in itertools.pairwise(body):
        kinds = ast.FunctionDef | ast.ClassDef | ast.If
        if isinstance(node, kinds) or isinstance(before, kinds):
            decorators = getattr(node, "decorator_list", [])
            start = min([node.lineno, *(d.lineno for d in decorators)])
            while lines[start - 2].startswith("#"):
                start -= 1
            cuts.append(start)
    pieces = ["\n".join(lines[a - 1 : b - 1]).strip() for a, b in zip(cuts, [*cuts[1:], len(lines) + 1], strict=True)]
    import_of_future = "from __future__ import annotations"
    pieces[0] = pieces[0].replace(import_of_future, "").strip()
    pieces[-1] = re.sub(r"sys\.exit\((.*)\)", r"\1", pieces[-1])  # which would end the notebook with an error
    file = f"__file__ = 'examples/{path.name}'"
    about = f"# Run this where the folder examples/ lies.\nimport sys\n\n{file}\nsys.argv = [__file__]"
    if import_of_future in source:
        about = f"{import_of_future}\n\n{about}"
    title, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    cells = [_cell("markdown", f"# {' '.join(title.split())}\n\n{rest}", 0)]
    cells += [_cell("code", text, number) for number, text in enumerate([about, *pieces], 1) if text]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write_notebooks(folder: Path, examples: Path) -> None:
    """Write the notebooks of all examples into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(examples.glob("*.py")):
        text = json.dumps(notebook(path), indent=1)
        target = folder / f"{path.stem}.ipynb"
        if not target.exists() or target.read_text() != text:
            target.write_text(text)


def setup(app: Any) -> dict[str, bool]:
    source = Path(app.srcdir)
    app.connect(
        "builder-inited", lambda app: write_notebooks(source / "gallery" / "notebooks", source.parent / "examples")
    )
    return {"parallel_read_safe": True}
