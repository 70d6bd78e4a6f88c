"""Tables and reports: one content, shown as text, as HTML and by rich.

Nothing here reads arrays or sends messages. HTML sets no colour of text and no background, so that it follows the theme
of a notebook, light or dark; every text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

__all__ = ["Displayed", "Part", "Printed", "Report", "Summarised", "Table"]

_STYLE = "border-collapse: collapse; white-space: pre-wrap; margin: 0"


class Part(Protocol):
    """A part of a report. It also has `__rich__` or `__rich_console__`."""

    def text(self) -> str: ...

    def html(self) -> str: ...


@dataclass(frozen=True)
class Table:
    """Rows of texts below a header.

    header: the names of the columns; none for facts, whose first column names the second. A row that is shorter than
    the others ends with a cell that goes over the columns that are left. right: the columns of numbers, which end
    alike. title: of the table. width: the most characters of a line of text; the widest columns are cut to fit, at the
    front, because names differ at the end. ruled: whether a line stands below the header.
    """

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    right: Sequence[int] = ()
    title: str = ""
    width: int | None = None
    ruled: bool = False

    @property
    def columns(self) -> int:
        """The number of columns."""
        return max((len(row) for row in self._lines), default=0)

    @property
    def _lines(self) -> list[Sequence[str]]:
        return [self.header, *self.rows] if self.header else [*self.rows]

    def text(self) -> str:
        """The table as lines of columns."""
        lengths = self._lengths()
        lines = [self._line(row, lengths) for row in self._lines]
        if self.ruled and self.header:
            lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([self.title, *lines] if self.title else lines)

    def _lengths(self) -> list[int]:
        columns = self.columns
        lengths = [0] * columns
        for row in self._lines:
            for k, cell in enumerate(row if len(row) == columns else row[:-1]):
                lengths[k] = max(lengths[k], len(cell))
        flexible = [k for k in range(columns) if k not in self.right]
        while self.width is not None and flexible and sum(lengths) + 2 * (columns - 1) > self.width:
            lengths[max(flexible, key=lengths.__getitem__)] -= 1
        return lengths

    def _line(self, row: Sequence[str], lengths: Sequence[int]) -> str:
        cells = []
        for k, cell in enumerate(row):
            if k == len(row) - 1 and len(row) < len(lengths):
                cells.append(cell if self.width is None else _cut(cell, self.width))
            else:
                cell = _cut(cell, lengths[k])
                cells.append(cell.rjust(lengths[k]) if k in self.right else cell.ljust(lengths[k]))
        return "  ".join(cells).rstrip()

    def html(self) -> str:
        """The table as an element of HTML."""
        head = "".join(self._cell(k, name, "th", ' scope="col"') for k, name in enumerate(self.header))
        caption = f'<caption style="text-align: left; font-weight: bold">{escape(self.title)}</caption>'
        return (
            f'<div style="overflow-x: auto"><table style="{_STYLE}">{caption if self.title else ""}'
            f"{f'<thead><tr>{head}</tr></thead>' if head else ''}"
            f"<tbody>{''.join(map(self._html_row, self.rows))}</tbody></table></div>"
        )

    def _html_row(self, row: Sequence[str]) -> str:
        columns, cells = self.columns, []
        for k, cell in enumerate(row):
            names_row = not self.header and k == 0 and columns > 1
            span = columns - k if k == len(row) - 1 else 1
            more = f' colspan="{span}"' if span > 1 else ""
            cells.append(self._cell(k, cell, "th" if names_row else "td", more + ' scope="row"' * names_row, span > 1))
        return f"<tr>{''.join(cells)}</tr>"

    def _cell(self, k: int, text: str, tag: str, more: str = "", spans: bool = False) -> str:
        align = "right" if k in self.right and not spans else "left"
        return f'<{tag}{more} style="text-align: {align}; vertical-align: top">{escape(text)}</{tag}>'

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        title = Text(self.title, style="bold") if self.title else None
        made = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(self.header))
        made.padding, made.pad_edge = (0, 1), False
        for k in range(self.columns):
            name, right = Text(self.header[k] if self.header else ""), k in self.right
            made.add_column(
                name,
                justify="right" if right else "left",
                style="" if k or self.header else "bold",
                overflow="fold",
                min_width=len(name),
                no_wrap=right,
            )
        for row in self.rows:
            made.add_row(*map(Text, row))
        return made


@dataclass(frozen=True)
class Report:
    """A heading, if it is not empty, and below it texts, tables and pictures. gap: what stands between them as text."""

    heading: str
    parts: Sequence[Part | str] = ()
    gap: str = "\n\n"

    def text(self) -> str:
        """The report as lines."""
        parts = [part if isinstance(part, str) else part.text() for part in self.parts]
        return self.gap.join([self.heading, *parts] if self.heading else parts)

    __str__ = text

    def html(self) -> str:
        """The report as an element of HTML: the parts lie next to each other as far as there is room."""
        parts = "".join(_paragraph(part) if isinstance(part, str) else part.html() for part in self.parts)
        heading = _paragraph(self.heading, "font-weight: bold; margin: 0 0 0.5em") if self.heading else ""
        flow = "display: flex; flex-wrap: wrap; gap: 1em 1.5em; align-items: flex-start"
        return f'<div>{heading}<div style="{flow}">{parts}</div></div>'

    _repr_html_ = html

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [Text(part) if isinstance(part, str) else part for part in self.parts]
        return Group(*[Text(self.heading, style="bold")][: bool(self.heading)], *parts)


def _paragraph(text: str, style: str = "margin: 0") -> str:
    return f'<p style="white-space: pre-wrap; {style}">{escape(text)}</p>'


def _cut(text: str, length: int) -> str:
    """The last characters of a text."""
    return text if len(text) <= length else "…" + text[len(text) - length + 1 :]


class Displayed:
    """What has a report shows it in notebooks, and where rich prints it. Neither reads arrays nor sends messages."""

    __slots__ = ()

    if TYPE_CHECKING:

        def _report(self) -> Report: ...

    def _repr_html_(self) -> str:
        return self._report().html()

    def __rich__(self) -> Any:
        return self._report()


class Printed(Displayed):
    """`str` gives the report too."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._report().text()


class Summarised(Displayed):
    """`summary` gives the report as text; `str` gives something else."""

    __slots__ = ()

    def summary(self) -> str:
        """What notebooks show, as text: the facts, and a drawing of the blocks. Not collective."""
        return self._report().text()
