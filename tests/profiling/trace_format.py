"""A validator of files in the Chrome Trace Event Format, after its documentation.

Only the kinds of events that profiles have are allowed: complete, counter, metadata and asynchronous ones.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

__all__ = ["collectives", "read_trace"]

_FIELDS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "b": {"name", "cat", "ph", "ts", "id", "pid", "tid", "args"},
    "e": {"name", "cat", "ph", "ts", "id", "pid", "tid", "args"},
}
_METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def read_trace(path: str | Path) -> dict[str, Any]:
    """The file, which is valid."""
    trace = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_constant)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    assert isinstance(events, list)
    assert events
    for event in events:
        _check_event(event)
    _check_names(events)
    _check_asynchronous(events)
    _check_nesting(events)
    return trace


def collectives(trace: dict[str, Any], **where: Any) -> list[dict[str, Any]]:
    """The events of collectives. where: values of their fields, pid=1 for example."""
    found = [e for e in trace["traceEvents"] if e.get("cat") == "collective" and e["ph"] == "X"]
    return [e for e in found if all(e[k] == v for k, v in where.items())]


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def _check_event(event: Any) -> None:
    assert isinstance(event, dict)
    assert event.get("ph") in _FIELDS, event
    assert set(event) == _FIELDS[event["ph"]], event
    assert type(event["name"]) is str
    assert event["name"]
    assert type(event["args"]) is dict
    for number in ("pid", "tid"):
        assert type(event[number]) is int
        assert event[number] >= 0
    for time in ("ts", "dur"):
        if time in event:
            assert type(event[time]) in (int, float)
            assert math.isfinite(event[time])
            assert event[time] >= 0, event
    if event["ph"] == "C":
        assert event["args"]
        assert all(type(value) in (int, float) for value in event["args"].values())
    if event["ph"] == "M":
        field, kind = _METADATA[event["name"]]
        assert type(event["args"][field]) is kind


def _check_names(events: list[dict[str, Any]]) -> None:
    """Each process and each thread with events has one name, and no two threads of a process have the same."""
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xbe"}
    named = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert threads <= set(named)
    assert len(named) == len(set(named))
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert len(names) == len(set(names))
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert sorted(processes) == sorted({e["pid"] for e in events})


def _check_asynchronous(events: list[dict[str, Any]]) -> None:
    """Each beginning has one end, later, of the same category, id and name."""
    open_ones: dict[Any, float] = {}
    for event in (e for e in events if e["ph"] in "be"):
        key = event["cat"], event["id"], event["name"], event["pid"]
        if event["ph"] == "b":
            assert key not in open_ones
            open_ones[key] = event["ts"]
        else:
            assert open_ones.pop(key) <= event["ts"]
    assert not open_ones


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Complete events of one thread lie inside each other or apart, up to the rounding of times."""
    by_thread: dict[Any, list[Any]] = {}
    for event in events:
        if event["ph"] == "X" and not event["cat"].startswith(("torch", "device")):
            by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
    for spans in by_thread.values():
        ends: list[float] = []
        for start, duration, name in sorted(spans):
            while ends and ends[-1] <= start + 0.01:
                ends.pop()
            assert not ends or start - duration <= ends[-1] + 0.01, name
            ends.append(start - duration)
