"""Docstrings as Markdown: paragraphs, parameters as lists, labels in bold, indented lines as code."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

__all__ = ["LABELS", "markdown"]

LABELS = ("Forward", "Adjoint", "Cost", "Raises", "Source", "States", "Returns")
_LABEL = re.compile(rf"(?:^|(?<=[.;)] ))(?={'|'.join(LABELS)})(?:{'|'.join(LABELS)})\b")
_PARAMETER = re.compile(r"(?:^|(?<=[.;] ))(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")


def _escaped(text: str) -> str:
    """The text without meaning for Markdown, except in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if i % 2 else re.sub(r"([*_<\[\]$\\~#|])", r"\\\1", p) for i, p in enumerate(parts))


def _paragraphs(docstring: str) -> Iterator[tuple[bool, list[str]]]:
    """Whether it is code, and the lines, of each paragraph; code may have empty lines."""
    lines: list[str] = []
    code = False
    for line in [*docstring.splitlines(), ""]:
        indented = line.startswith("    ")
        if lines and (indented != code if line.strip() else not code):
            yield code, lines
            lines = []
        if line.strip() or (lines and code):
            code = indented if line.strip() else code
            lines.append(line)
    if lines:
        yield code, lines


def _fenced(lines: list[str]) -> str:
    text = "\n".join(line[4:] for line in lines).rstrip()
    return f"```{_language(text)}\n{text}\n```"


def _language(text: str) -> str:
    if text.lstrip().startswith(">>>"):
        return "pycon"
    try:
        ast.parse(text)
    except SyntaxError:
        return "text"
    return "python"


def _items(text: str, parameters: Collection[str]) -> Iterator[str]:
    """The paragraph, cut before parameters and labels."""
    cuts = {0: ""}
    for match in _PARAMETER.finditer(text):
        if all(name.strip("* ") in parameters for name in match[1].split(",")):
            cuts[match.start()] = match[1]
    for match in _LABEL.finditer(text):
        cuts[match.start()] = match[0]
    starts = sorted(cuts)
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        head, piece = cuts[start], text[start:end].strip()
        if not piece:
            continue
        if not head:
            yield _escaped(piece)
        elif head in LABELS:
            yield f"**{head}**{_escaped(piece.removeprefix(head))}"
        else:
            yield f"- **{_escaped(head)}**: {_escaped(piece.removeprefix(head + ': '))}"


def markdown(docstring: str, parameters: Collection[str]) -> str:
    """A docstring as Markdown. parameters: names whose explanations become items of a list."""
    out: list[str] = []
    for code, lines in _paragraphs(docstring):
        if code:
            out.append(_fenced(lines))
        else:
            out.extend(_items(" ".join(line.strip() for line in lines), parameters))
    return "\n\n".join(out)
