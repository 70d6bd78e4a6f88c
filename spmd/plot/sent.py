"""What the lines of a program send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.errors import LayoutError, describe
from spmd.ledger import Ledger, Row, short_line
from spmd.plot.canvas import legend_beside, new_axes
from spmd.representations.colours import COLOURS
from spmd.representations.numbers import size_text
from spmd.tracebacks import api_boundary

__all__ = ["ledger"]

_WHERE = "spmd.plot.ledger"
_STYLES: dict[str, dict[str, Any]] = {
    "forward": {"facecolor": COLOURS[4]},
    "backward": {"facecolor": COLOURS[0], "hatch": "////", "edgecolor": "black", "linewidth": 0.0},
}


@api_boundary
def ledger(log: Ledger, most: int = 20, *, title: str | None = None, ax: Any = None) -> Any:
    """Draw what one worker sends, a bar for each line, operator and axes: forward, and backward beside it.

    log: what `with spmd.ledger() as log:` gives. most: how many bars; the last one is the sum of the rest. title: by
    default the messages and bytes in all. ax: the Axes to draw on; by default those of a new figure. Operators that
    send nothing have no bar. At the end of a bar stands its size, and how many messages are sent.
    Returns the Axes. Cost: nothing is sent; any process may call it alone, and sees what its first worker sends.
    Raises LayoutError for what is no ledger, ImportError without Matplotlib: `pip install "spmd[plot]"`.

        >>> total = spmd.map(lambda x: spmd.psum(x, "x"), in_specs=P("x"), out_specs=P())
        >>> with spmd.Mesh(x=2), spmd.ledger() as log:
        ...     y = total(np.arange(4.0))
        >>> [text.get_text() for text in spmd.plot.ledger(log).texts]
        ['16 B, 1 message']
    """
    if not isinstance(log, Ledger) or not isinstance(most, int) or most < 1:
        raise LayoutError.at(
            _WHERE,
            argument="most" if isinstance(log, Ledger) else "log",
            got=repr(most) if isinstance(log, Ledger) else describe(log),
            need="a ledger, and at least one bar",
            mend="with spmd.ledger() as log: ..., then spmd.plot.ledger(log)",
        )
    bars = _bars(log.rows(), most)
    ax = new_axes(_WHERE, ax, 8.0, min(12.0, 1.2 + 0.42 * max(2, len(bars))))
    _draw(ax, bars)
    shown = f"one worker sends {size_text(log.bytes)} in {log.messages} message{'s' * (log.messages != 1)}"
    ax.set_title(shown if title is None else title, fontsize="medium", parse_math=False)
    return ax


Counts = dict[str, tuple[int, int]]
"""By direction, bytes and messages."""


def _bars(rows: Sequence[Row], most: int) -> dict[str, Counts]:
    """The counts by the name of a bar, the largest first."""
    bars: dict[str, Counts] = {}
    for row in rows:
        if row.bytes or row.messages:
            name = f"{short_line(row.line)}\n{row.operator} over {', '.join(row.axes)}"
            _add(bars.setdefault(name, {}), row.direction, row.bytes, row.messages)
    names = sorted(bars, key=lambda name: -sum(nbytes for nbytes, _ in bars[name].values()))
    kept = names if len(names) <= most else names[: most - 1]
    rest: Counts = {}
    for name in names[len(kept) :]:
        for direction, counts in bars[name].items():
            _add(rest, direction, *counts)
    others = {f"{len(names) - len(kept)} others": rest} if rest else {}
    return {name: bars[name] for name in kept} | others


def _add(counts: Counts, direction: str, nbytes: int, messages: int) -> None:
    before = counts.get(direction, (0, 0))
    counts[direction] = before[0] + nbytes, before[1] + messages


def _draw(ax: Any, bars: dict[str, Counts]) -> None:
    from matplotlib.patches import Patch

    present = [d for d in _STYLES if any(d in counts for counts in bars.values())]
    height = 0.8 / max(1, len(present))
    for y, counts in enumerate(bars.values()):
        for k, direction in enumerate(d for d in present if d in counts):
            nbytes, messages = counts[direction]
            middle = y + (k - (len(counts) - 1) / 2) * height
            ax.barh(middle, nbytes, height * 0.9, **_STYLES[direction])
            text = f"{size_text(nbytes)}, {messages} message{'s' * (messages != 1)}"
            place: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            ax.annotate(text, (nbytes, middle), **place, fontsize="x-small")
    ax.set_yticks(range(len(bars)), list(bars), fontsize="x-small", parse_math=False)
    ax.set_ylim(max(1, len(bars)) - 0.4, -0.6)
    largest = max((nbytes for counts in bars.values() for nbytes, _ in counts.values()), default=0)
    ax.set_xlim(0, max(1, largest) * 1.35)  # room for the texts
    step = 1 << max(0, largest // 4).bit_length()  # sizes are read in powers of 2
    ticks = [*range(0, largest + 1, step)] if bars else []
    ax.set_xticks(ticks, [size_text(n) for n in ticks], fontsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    if not bars:
        ax.text(0.5, 0.5, "nothing is sent", transform=ax.transAxes, ha="center", va="center")
    legend_beside(ax, [Patch(label=direction, **_STYLES[direction]) for direction in present])
