"""The table of a profile: the time and the bytes of each line of a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from spmd.ledger import short_line
from spmd.profiling.recording import Recorder
from spmd.representations.tables import Table

__all__ = ["ProfileRow", "merged_rows", "rows_of", "table"]


class ProfileRow(NamedTuple):
    """One line of a program and one operator, or one map, stage of a pipeline, kernel or step. Numbers are means over
    the workers that have it.

    kind: "collective", "map", "stage", "kernel", "step", "torch" or "device". name: the function as users write it.
    line: `file.py:12 in f`, and axes, operator and direction: of collectives. times: how often. seconds: that it takes;
    waiting: of these the ones in which the worker waits for others; moving: the others. messages, bytes: that the
    worker sends. rate: bytes for each second of moving. share: of the seconds of all maps.
    """

    kind: str
    name: str
    line: str
    operator: str
    axes: tuple[str, ...]
    direction: str
    workers: int
    times: float
    seconds: float
    waiting: float
    moving: float
    messages: float
    bytes: float
    rate: float
    share: float


_KEYS = 6
"""The fields of a row that tell it from others."""
Sums = tuple[Any, ...]
"""The key of a row, then workers, times, seconds, waiting, messages and bytes, summed over workers."""


def rows_of(recorder: Recorder, others: Iterable[dict[str, Any]]) -> list[Sums]:
    """The sums of this process. others: events of other sources."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for track in recorder.tracks.values():
        workers: set[Any] = set()
        for key, total in track.totals.items():
            origin = total.origin
            if origin is None:
                name = (key[0], total.name, "", "", (), "")
            else:
                name = ("collective", total.name, origin.line, origin.operator, origin.axes, origin.direction)
            counts = sums.setdefault(name, [0.0] * 6)
            new = (name not in workers, total.times, total.seconds, total.waited, total.messages, total.nbytes)
            workers.add(name)
            sums[name] = [a + b for a, b in zip(counts, new, strict=True)]
    for event in others:
        name = (event["kind"], event["name"], "", "", (), "")
        counts = sums.setdefault(name, [1.0, 0, 0, 0, 0, 0])
        counts[1] += 1
        counts[2] += event["end"] - event["start"]
    return [(*name, *counts) for name, counts in sums.items()]


def merged_rows(parts: Iterable[Sequence[Sums]]) -> list[ProfileRow]:
    """The rows of all processes: collectives first, then the rest, each by seconds."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for part in parts:
        for kind, name, line, operator, axes, direction, *counts in part:
            key = (kind, name, line, operator, tuple(axes), direction)
            before = sums.get(key, [0] * len(counts))
            sums[key] = [a + b for a, b in zip(before, counts, strict=True)]
    mapped = sum(counts[2] for key, counts in sums.items() if key[0] == "map")
    rows = []
    for key, (workers, times, seconds, waiting, messages, nbytes) in sums.items():
        moving = max(0.0, seconds - waiting)
        share = seconds / mapped if mapped and key[0] != "step" else 0.0
        means = [x / workers for x in (times, seconds, waiting, moving, messages, nbytes)]
        rows.append(ProfileRow._make((*key, int(workers), *means, nbytes / moving if moving else 0.0, share)))
    return sorted(rows, key=lambda row: (_ORDER.index(row.kind), -row.seconds))


_ORDER = ("collective", "map", "stage", "kernel", "torch", "device", "step")


_SHOWN = 20
"""Operations of torch in the table."""


def table(rows: Sequence[ProfileRow]) -> list[Table | str]:
    """The rows as a table: collectives by line and axis, then maps and kernels; below it what is said of the rest."""
    head = ("line", "function", "axes", "direction", "times", "seconds", "waiting", "moving", "MB", "MB/s", "share")
    cells: list[tuple[str, ...]] = []
    operations = [row for row in rows if row.kind in ("torch", "device")]
    for row in rows:
        if row.kind == "step" or row in operations[_SHOWN:]:
            continue
        what = short_line(row.line) if row.kind == "collective" else row.kind
        sent = row.kind == "collective"
        cells.append(
            (
                *(what, row.name, " ".join(row.axes), row.direction, f"{row.times:g}", f"{row.seconds:.4f}"),
                *(f"{row.waiting:.4f}" if row.kind in ("collective", "map") else "", f"{row.moving:.4f}"),
                *(
                    f"{row.bytes / 1e6:.3f}" if sent else "",
                    f"{row.rate / 1e6:.0f}" if sent else "",
                    f"{row.share:.1%}",
                ),
            )
        )
    parts: list[Table | str] = [Table(cells, head, right=range(4, len(head)))]
    if len(operations) > _SHOWN:
        parts.append(f"and {len(operations) - _SHOWN} more operations of torch, of less time")
    steps = [row for row in rows if row.kind == "step"]
    if steps:
        seconds = sum(row.seconds for row in steps)
        parts.append(f"{len(steps)} steps of {seconds / len(steps):.4f} s")
    return parts
