"""When workers run, send and wait: a trace of `spmd.profile`, or another file of Chrome's format."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from spmd.errors import LayoutError, describe
from spmd.plot.canvas import apart, legend_beside, new_axes, size_in_points
from spmd.representations.colours import COLOURS
from spmd.tracebacks import api_boundary

__all__ = ["Event", "events_of", "timeline", "tracks_of"]

_WHERE = "spmd.plot.timeline"
_MAP, _STEP, _STAGE = "map", "step", "stage"


class Event(NamedTuple):
    """A span of a track, in milliseconds from the first event."""

    kind: str
    name: str
    start: float
    length: float
    wait: float
    args: Mapping[str, Any] = MappingProxyType({})


@api_boundary
def timeline(trace: Any, *, title: str | None = None, ax: Any = None) -> Any:
    """Draw a profile over time: a row for each worker, a colour for each function, hatched where the worker waits.

    trace: what `spmd.profile` gives, after its block; or the file that it wrote; or any file of the Chrome trace
    format. title: above the picture. ax: the Axes to draw on; by default those of a new figure. Maps are the light
    bars behind. The functions that take the most time have colours of their own, the others share one. Waiting is
    drawn at the start of a call. Returns the Axes. Cost: reads the file; any process that has the file may call it
    alone.
    Raises LayoutError for what is no trace, ImportError without Matplotlib: `pip install "spmd[plot]"`.

        >>> span = {"ph": "X", "cat": "collective", "pid": 0, "ts": 0, "dur": 500, "args": {"wait_us": 200}}
        >>> events = [{**span, "name": name, "tid": k} for k, name in enumerate(["spmd.psum", "spmd.shift"])]
        >>> ax = spmd.plot.timeline({"traceEvents": events})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['spmd.psum', 'spmd.shift', 'waiting']
    """
    tracks = tracks_of(events_of(trace, _WHERE))
    rows = len(tracks)
    ax = new_axes(_WHERE, ax, 9.0, min(12.0, 1.4 + 0.32 * max(2, rows)))
    colours = _colours(tracks)
    waits = any(event.wait for events in tracks.values() for event in events)
    for y, events in enumerate(tracks.values()):
        _draw_track(ax, y, events, colours)
    kept = apart(range(rows), [11 / size_in_points(ax)[1] * rows] * rows)
    ax.set_yticks([*kept], [[*tracks][k] for k in kept], fontsize="small", parse_math=False)
    ax.set_ylim(max(1, rows) - 0.5, -0.5)
    ax.set_xlim(left=0.0)
    ax.set_xlabel("milliseconds")
    ax.set_title("" if title is None else title, fontsize="medium", parse_math=False)
    _legend(ax, tracks, colours, waits)
    return ax


def events_of(trace: Any, where: str) -> list[dict[str, Any]]:
    """The events of a trace."""
    source = trace if isinstance(trace, Mapping | Sequence | os.PathLike) else getattr(trace, "path", None)
    if isinstance(source, str | os.PathLike):
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"))
        except ValueError:
            source = None
    if isinstance(source, Mapping):
        source = source.get("traceEvents")
    if not isinstance(source, Sequence) or not all(isinstance(e, Mapping) for e in source):
        raise LayoutError.at(
            where,
            argument="trace",
            got=repr(str(trace)) if isinstance(trace, str | os.PathLike) else describe(trace),
            need="a profile that has written a file, or such a file",
            mend=f'with spmd.profile("trace.json"): ..., then {where}("trace.json")',
        )
    return [dict(e) for e in source]


def tracks_of(events: Sequence[dict[str, Any]]) -> dict[str, list[Event]]:
    """The spans by the name of their track, in the order of processes and threads."""
    named = {}
    processes: dict[Any, str] = {}
    spans = defaultdict(list)
    first = min((e["ts"] for e in events if e.get("ph") == "X"), default=0.0)
    for e in events:
        place = e.get("pid", 0), e.get("tid", 0)
        if e.get("ph") == "M" and e.get("name") == "thread_name":
            named[place] = str(e["args"]["name"])
        elif e.get("ph") == "M" and e.get("name") == "process_name":
            processes[place[0]] = str(e["args"]["name"]).split(",")[0]
        elif e.get("ph") == "X":
            args = e.get("args") or {}
            start, length, wait = (t / 1e3 for t in (e["ts"] - first, e.get("dur", 0.0), args.get("wait_us", 0.0)))
            spans[place].append(Event(str(e.get("cat", "")), str(e.get("name", "")), start, length, wait, args))
    tracks: dict[str, list[Event]] = {}
    for place in sorted(spans, key=lambda p: (str(type(p[0])), p)):
        name = named.get(place, f"{place[0]}.{place[1]}")
        if name in tracks:  # the same track of another process
            name = f"{processes.get(place[0], place[0])}: {name}"
        tracks[name] = spans[place]
    return tracks


def _colours(tracks: Mapping[str, list[Event]]) -> dict[str, str]:
    """A colour for each of the functions that take the most time, and a hundredth of all at least."""
    total: dict[str, float] = defaultdict(float)
    for events in tracks.values():
        for event in events:
            if event.kind not in (_MAP, _STEP):
                total[event.name] += event.length
    least = sum(total.values()) / 100
    names = sorted((n for n in total if total[n] >= least), key=lambda name: (-total[name], name))
    return dict(zip(names, COLOURS, strict=False))


_OTHERS, _BEHIND = "0.55", "0.88"
_WAITING: dict[str, Any] = {"facecolor": "none", "edgecolor": "black", "hatch": "////", "linewidth": 0.0}


def _draw_track(ax: Any, y: int, events: Sequence[Event], colours: Mapping[str, str]) -> None:
    bars: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    waits = []
    for event in events:
        behind = event.kind in (_MAP, _STEP)
        colour = _BEHIND if behind else colours.get(event.name, _OTHERS)
        height = 0.8 if behind else 0.68 if event.kind == _STAGE else 0.56  # a stage is behind what it calls
        bars[height, colour].append((event.start, event.length))
        if event.wait and not behind:
            waits.append((event.start, min(event.wait, event.length)))
    for (height, colour), spans in sorted(bars.items(), key=lambda bar: -bar[0][0]):
        ax.broken_barh(spans, (y - height / 2, height), facecolor=colour, linewidth=0)
    if waits:
        ax.broken_barh(waits, (y - 0.28, 0.56), **_WAITING)


def _legend(ax: Any, tracks: Mapping[str, list[Event]], colours: Mapping[str, str], waits: bool) -> None:
    from matplotlib.patches import Patch

    events = [event for events in tracks.values() for event in events]
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    if any(e.kind not in (_MAP, _STEP) and e.name not in colours for e in events):
        handles.append(Patch(facecolor=_OTHERS, label="others"))
    if any(e.kind in (_MAP, _STEP) for e in events):
        handles.append(Patch(facecolor=_BEHIND, label="maps and steps"))
    if waits:
        handles.append(Patch(**{**_WAITING, "linewidth": 0.5}, label="waiting"))
    legend_beside(ax, handles)
