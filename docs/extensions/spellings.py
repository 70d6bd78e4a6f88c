"""`:::{spellings}`: tables of names, keywords and values of other libraries, and of what to write here instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from spmd.spellings import INSTEAD, KEYWORDS, UNKNOWN_KEYWORDS, VALUES

__all__ = ["Spellings", "keywords_text", "names_text", "setup", "values_text"]

_MODULES = {"spmd.bridge.torch": "spt"}
"""Modules by the names that programs give them."""


def _code(text: str) -> str:
    """A text in backticks, in a cell of a table."""
    return f"`{text}`".replace("|", r"\|")


def _table(heads: tuple[str, str], rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> str:
    lines = [" | ".join(heads), "---|---"]
    return "\n".join(f"| {line} |" for line in [*lines, *(" | ".join(row) for row in rows)])


def _by_mend(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Rows: the names that have one mend, and the mend."""
    mends: dict[str, list[str]] = {}
    for name, mend in names.items():
        mends.setdefault(mend, []).append(name)
    for mend, found in mends.items():
        yield ", ".join(map(_code, found)), _mend(mend)


def _mend(text: str) -> str:
    """A mend as Markdown: code if it is an expression, words with a head of code otherwise."""
    head, colon, words = text.partition(": ")
    try:
        compile(text, "<mend>", "eval")
    except SyntaxError:
        return f"{_code(head)}: {words}" if colon and head.startswith(("spmd.", "spt.")) else text.replace("|", r"\|")
    return _code(text)


def names_text() -> str:
    """The names of each module that belong to other libraries."""
    parts = []
    for module, names in INSTEAD.items():
        alias = _MODULES.get(module, module)
        parts += [f"### In {_code(alias)}", _table((f"not in {_code(alias)}", "write"), _by_mend(names))]
    return "\n\n".join(parts)


def keywords_text() -> str:
    """The keywords of one meaning, and those without any here."""
    same = [(_code(line.split()[0]), ", ".join(map(_code, line.split()[1:]))) for line in KEYWORDS]
    return "\n\n".join(
        [_table(("here", "elsewhere"), same), _table(("no function has", "instead"), _by_mend(UNKNOWN_KEYWORDS))]
    )


def values_text() -> str:
    """The values of options."""
    return _table(("here", "elsewhere"), [(_code(k), ", ".join(map(_code, v.split()))) for k, v in VALUES.items()])


class Spellings(SphinxDirective):
    """The tables. Without an option those of names; with `keywords` or `values` those."""

    option_spec = {"keywords": directives.flag, "values": directives.flag}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        makers = {"keywords": keywords_text, "values": values_text}
        make = next((maker for option, maker in makers.items() if option in self.options), names_text)
        return self.parse_text_to_nodes(make(), allow_section_headings=True)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("spellings", Spellings)
    return {"parallel_read_safe": True}
