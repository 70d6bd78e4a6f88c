"""Docstrings as Markdown: paragraphs, parameters as lists, labels in bold, indented lines as code."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from textwrap import dedent

__all__ = ["LABELS", "markdown"]

LABELS = ("Forward", "Adjoint", "Cost", "Raises", "Source", "States", "Returns")
_LABEL = re.compile(rf"(?:^|(?<=[.;)] ))(?={'|'.join(LABELS)})(?:{'|'.join(LABELS)})\b")
_ASIDE = re.compile(r"(?<=[.;)] )(?=(?:As|Arguments as in) `?(?:jax|np|torch)\.|Gives |Linear[ .])")
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
        indented = line.startswith(("    ", ">>>")) or (bool(lines) and lines[0].startswith(">>>"))
        if lines and (indented != code if line.strip() else not code):
            yield code, lines
            lines = []
        if line.strip() or (lines and code):
            code = indented if line.strip() else code
            lines.append(line)
    if lines:
        yield code, lines


def _fenced(lines: list[str]) -> str:
    text = dedent("\n".join(lines)).rstrip()
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
    """The paragraph, cut before parameters, labels, and the functions of other libraries that are named at its end."""
    cuts = {0: ""}
    for match in _PARAMETER.finditer(text):
        if all(name.strip("* ") in parameters for name in match[1].split(",")):
            cuts[match.start()] = match[1]
    cuts |= {match.start(): match[0] for match in _LABEL.finditer(text)}
    cuts |= {match.start(): "" for match in _ASIDE.finditer(text)}
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


def _points(lines: list[str]) -> list[str]:
    """The text of a paragraph before its first line with a dash, and that of each point of the list that follows."""
    texts = [""]
    for line in lines:
        if line.startswith("- "):
            texts.append("")
        texts[-1] += " " + line.removeprefix("- ").strip()
    return [text.strip() for text in texts]


def markdown(docstring: str, parameters: Collection[str]) -> str:
    """A docstring as Markdown. parameters: names whose explanations become items of a list."""
    out: list[str] = []
    for code, lines in _paragraphs(docstring):
        if code:
            out.append(_fenced(lines))
        else:
            first, *points = _points(lines)
            out.extend(_items(first, parameters))
            out.extend(f"  - {_escaped(point)}" for point in points)
    return "\n\n".join(out)
