"""Write the pages of the reference from signatures and docstrings, before a build of the site."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docstrings import markdown
from public_names import PAGES, SPMD_GROUPS, docstring_of, names_of

from spmd.__main__ import parser
from spmd.settings import SETTINGS

__all__ = ["setup", "write_pages"]


def _signature(thing: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(thing)
    except (TypeError, ValueError):
        return None


def _without_types(signature: inspect.Signature) -> str:
    """The names and defaults of a signature; a default that has no name is `...`."""
    parameters = []
    for p in signature.parameters.values():
        default = ... if type(p.default) is object else p.default
        if callable(default) and default is not inspect.Parameter.empty:
            default = ...
        parameters.append(p.replace(annotation=inspect.Parameter.empty, default=default))
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return text.replace("Ellipsis", "...")


def _entry(kind: str, name: str, thing: Any, fence: str = "::::") -> str:
    """The entry of a function, class, method or value: a directive of Sphinx."""
    signature = None if kind in ("data", "attribute", "property") else _signature(thing)
    parameters = list(signature.parameters) if signature else []
    parameters += [member for member in dir(thing) if kind == "class" and not member.startswith("_")]
    body = markdown(docstring_of(name.rpartition(".")[2], thing), parameters)
    shown = _without_types(signature) if signature else ""
    if kind == "method":
        shown = shown.replace("(self, ", "(").replace("(self)", "()")
    members = "\n\n".join(_members(name, thing)) if kind == "class" else ""
    return f"{fence}{{py:{kind}}} {name}{shown}\n\n{body}\n\n{members}\n{fence}"


def _members(name: str, cls: type) -> Iterator[str]:
    """The entries of what a class defines itself and documents."""
    for member, value in vars(cls).items():
        if member.startswith("_") or not value.__doc__:
            continue
        if isinstance(value, property):
            yield _entry("property", f"{name}.{member}", value, ":::")
        elif isinstance(value, classmethod | staticmethod):
            yield _entry("staticmethod", f"{name}.{member}", getattr(cls, member), ":::")
        elif inspect.isfunction(value):
            yield _entry("method", f"{name}.{member}", value, ":::")


def _kind(thing: Any) -> str:
    return "class" if inspect.isclass(thing) else "function" if callable(thing) else "data"


def _page(title: str, introduction: str, imports: str, prefix: str, names: dict[str, Any]) -> str:
    entries = "\n\n".join(_entry(_kind(thing), f"{prefix}.{name}", thing) for name, thing in names.items())
    return f"# {title}\n\n{introduction} Examples assume {imports}.\n\n{entries}\n"


def write_pages(folder: Path) -> None:
    """Write all pages into `folder`."""
    folder.mkdir(exist_ok=True)
    numpy_imports = "`import numpy as np, spmd` and `from spmd import P`"
    torch_imports = "`import torch, spmd`, `import spmd.bridge.torch as spt` and `from spmd import P`"
    every = names_of("spmd")
    pages = {}
    for title, text in SPMD_GROUPS.items():
        file = title.lower().replace(",", "").replace(" ", "_")
        names = {name: every[name] for name in text.split() if name in every}
        pages[file] = _page(title, "Names of `spmd`.", numpy_imports, "spmd", names)
    for page in PAGES:
        if page.torch and find_spec("torch") is None:
            continue
        imports = torch_imports if page.torch else numpy_imports
        pages[page.file] = _page(page.title, page.introduction, imports, page.alias, names_of(page.module))
    pages["commands"], pages["settings"] = commands_page(), settings_page()
    for file, text in pages.items():
        path = folder / f"{file}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    contents = "\n".join(pages)
    index = f"# Every public name\n\n```{{toctree}}\n:maxdepth: 1\n\n{contents}\n```\n"
    if not (folder / "index.md").exists() or (folder / "index.md").read_text() != index:
        (folder / "index.md").write_text(index)


def settings_page() -> str:
    """The environment variables."""
    lines = ["# Environment variables", "", "A text that means nothing is an error when a mesh is made.", ""]
    lines += ["| variable | texts | if it is not set | what it sets |", "| --- | --- | --- | --- |"]
    for name, spec in SETTINGS.items():
        default = {True: "1", False: "0", None: ""}.get(spec.default, f"{spec.default:g}" if spec.default else "")
        lines.append(f"| `{name}` | {spec.need} | {default} | {spec.purpose} |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """The commands of `python -m spmd`, as their help prints them."""
    os.environ["COLUMNS"] = "100"
    whole = parser()
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    lines = ["# Commands", "", "Each runs alone, and under mpiexec and torchrun.", ""]
    for name, command in commands.choices.items():
        about = next(action.help for action in commands._choices_actions if action.dest == name)
        lines += [
            f"## python -m spmd {name}",
            "",
            f"{about}.",
            "",
            "```text",
            command.format_help().rstrip(),
            "```",
            "",
        ]
    return "\n".join(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "reference" / "api"))
    return {"parallel_read_safe": True}
