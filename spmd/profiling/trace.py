"""A profile as a file in the Chrome Trace Event Format, which Perfetto and chrome://tracing open.

The format: Google, Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), the
JSON object format. A process of the file is a process of the job, a thread of it is a worker.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from spmd.profiling.recording import END, Name, Recorder, Track
from spmd.transport.observing import Phase, Sent

__all__ = ["left_out", "text_of_events", "track_name"]

_PROGRAM = 0
"""The thread of the program around the maps."""
_FIRST_OTHER = 1000
"""The first thread of tracks that are no workers': of torch, and of streams of GPUs."""


def track_name(track: Track) -> str:
    """The name of a track: the worker and its place on the mesh."""
    if track.mesh is None or track.worker is None:
        return "program"
    return track.mesh.describe(track.worker)


def text_of_events(recorder: Recorder, process: int, name: str, origin: float, others: list[dict[str, Any]]) -> str:
    """The events of this process as JSON, without the brackets of the list.

    process: its number in the file; name: its name there. origin: the time of `perf_counter` that is 0 in the file.
    others: events of other sources, each with its track under "track" and times in seconds.
    """
    numbers = itertools.count(1)
    events = _events(recorder, process, name, origin, others, numbers)
    return ",\n".join(json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in events)


def left_out(recorder: Recorder) -> list[dict[str, Any]]:
    """What the limit has left out, by track."""
    return [
        {"track": track_name(t), "events": t.left_out, "after_seconds": round(t.full_at - recorder.start, 6)}
        for t in recorder.tracks.values()
        if t.left_out
    ]


def _events(
    recorder: Recorder,
    process: int,
    name: str,
    origin: float,
    others: list[dict[str, Any]],
    numbers: Iterator[int],
) -> Iterator[dict[str, Any]]:
    """All events of this process."""

    def micros(seconds: float) -> float:
        return round((seconds - origin) * 1e6, 3)

    yield _metadata(process, _PROGRAM, "process_name", name=name)
    yield _metadata(process, _PROGRAM, "process_sort_index", sort_index=process)
    threads = _Threads(process)
    for track in recorder.tracks.values():
        yield from threads.named(track_name(track), _PROGRAM if track.worker is None else 1 + track.worker)
        place = threads.place
        for what, phases in _grouped(track):
            if isinstance(what, Name):
                yield _span(what, *phases[0], place, micros)
            else:
                yield from _collective(what, phases, place, micros, numbers)
    for when, nbytes in recorder.memory:
        args = {"bytes": nbytes}
        yield {"ph": "C", "name": "memory in use", "pid": process, "tid": 0, "ts": micros(when), "args": args}
    for event in others:
        yield from threads.named(event["track"], _FIRST_OTHER)
        head = {"ph": "X", "name": event["name"], "cat": event["kind"], **threads.place}
        duration = _duration(event["end"] - event["start"])
        yield {**head, "ts": micros(event["start"]), "dur": duration, "args": event["args"]}


class _Threads:
    """The threads of a process of the file, by the names of their tracks. place: where events of the last one go."""

    def __init__(self, process: int):
        self.process = process
        self.numbers: dict[str, int] = {}
        self.place: dict[str, int] = {}

    def named(self, name: str, wanted: int) -> Iterator[dict[str, Any]]:
        """Go to the thread of a name; a new one has the number that is wanted, or the next one beyond all workers'."""
        number = self.numbers.get(name)
        if number is None:
            taken = self.numbers.values()
            number = wanted if wanted not in taken else max(_FIRST_OTHER, *taken) + 1
            self.numbers[name] = number
            yield _metadata(self.process, number, "thread_name", name=name)
            yield _metadata(self.process, number, "thread_sort_index", sort_index=number)
        self.place = {"pid": self.process, "tid": number}


def _metadata(process: int, thread: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _duration(seconds: float) -> float:
    return max(0.0, round(seconds * 1e6, 3))


def _grouped(track: Track) -> Iterator[tuple[Name | Sent, list[Phase]]]:
    """The events of a track, each with its phases."""
    last: Any = None
    phases: list[Phase] = []
    for what, start, end, waited in track.each():
        if what is END:
            phases.append((start, end, waited))
            continue
        if last is not None:
            yield last, phases
        last, phases = what, [(start, end, waited)]
    if last is not None:
        yield last, phases


def _span(name: Name, start: float, end: float, waited: float, place: dict[str, int], micros: Any) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if name.kind == "map":
        args = {"step": name.number, "wait_us": _duration(waited)}
    elif name.kind == "stage":
        args = {"action": name.name[0], "stage": name.name[1], "microbatch": name.number}
    head = {"ph": "X", "name": name.text, "cat": name.kind, **place}
    return {**head, "ts": micros(start), "dur": _duration(end - start), "args": args}


def _collective(
    sent: Sent, phases: Sequence[Phase], place: dict[str, int], micros: Any, numbers: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """A complete event for each phase. Where others run between two phases, an asynchronous event shows that the
    collective is under way."""
    origin = sent.origin
    described = {
        "operator": origin.operator,
        "direction": origin.direction,
        "axes": list(origin.axes),
        "verbs": list(sent.verbs),
        "line": origin.line,
    }
    for k, (start, end, waited) in enumerate(phases):
        amount = {"messages": 0, "bytes": 0} if k else {"messages": sent.messages, "bytes": sent.nbytes}
        duration, wait = _duration(end - start), _duration(waited)
        times = {"wait_us": wait, "move_us": max(0.0, round(duration - wait, 3))}
        phase = {} if len(phases) == 1 else {"phase": "end" if k else "start"}
        head = {"ph": "X", "name": sent.name, "cat": "collective", **place}
        yield {**head, "ts": micros(start), "dur": duration, "args": {**described, **amount, **times, **phase}}
    if len(phases) > 1:
        head = {"name": sent.name, "cat": "under way", "id": f"{place['pid']}.{next(numbers)}", **place}
        yield {"ph": "b", **head, "ts": micros(phases[0][0]), "args": {"line": origin.line}}
        yield {"ph": "e", **head, "ts": micros(phases[-1][1]), "args": {}}
