"""Operations of PyTorch in a profile: the events of torch's own profiler, on tracks of their own."""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

__all__ = ["TorchOperations"]

_MARK = "spmd.profile: clock"
"""The name of the events by which torch's clock is compared with Python's."""
_MARKS = 8
"""Of these events: a busy system may stop the process within some of them."""


class TorchOperations:
    """torch.profiler, while a profile is open."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Virtual workers run in threads of their own.
        everywhere = import_module("torch._C._profiler")._ExperimentalConfig(profile_all_threads=True)
        self.profiler = torch.profiler.profile(activities=activities, experimental_config=everywhere)
        self.profiler.__enter__()
        self.marks: list[tuple[float, float]] = []
        for _ in range(_MARKS):
            before = perf_counter()
            with torch.profiler.record_function(_MARK):
                pass
            self.marks.append((before, perf_counter()))

    def stop(self, since: float, limit: int) -> tuple[list[dict[str, Any]], int]:
        """The events since a time: kind, name, track, start and end by `perf_counter`, args; and how many the limit
        leaves out."""
        self.profiler.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "torch.json")
            self.profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X" and "ts" in event]
        marks = sorted((float(e["ts"]), float(e.get("dur", 0))) for e in spans if e["name"] == _MARK)
        if len(marks) != _MARKS:
            return [], len(spans)
        origin = self._origin(marks)
        kept = [self._event(event, origin) for event in spans if event.get("cat") in _KINDS]
        kept = [event for event in kept if event["start"] >= since]
        return kept[:limit], max(0, len(kept) - limit)

    def _origin(self, marks: list[tuple[float, float]]) -> float:
        """The time of `perf_counter` at which torch's clock is 0. Each mark, from its start and duration in
        microseconds, bounds it from both sides; the narrowest bounds of all count."""
        low = max(before - ts / 1e6 for (before, _), (ts, _) in zip(self.marks, marks, strict=True))
        high = min(after - (ts + dur) / 1e6 for (_, after), (ts, dur) in zip(self.marks, marks, strict=True))
        return (low + high) / 2

    @staticmethod
    def _event(event: dict[str, Any], origin: float) -> dict[str, Any]:
        kind, start = _KINDS[event["cat"]], origin + float(event["ts"]) / 1e6
        place = f"torch, thread {event['tid']}" if kind == "torch" else f"GPU {event['pid']}, stream {event['tid']}"
        end = start + float(event.get("dur", 0)) / 1e6
        return {"kind": kind, "name": event["name"], "track": place, "start": start, "end": end, "args": {}}


_KINDS = {
    "cpu_op": "torch",
    "user_annotation": "torch",
    "kernel": "device",
    "gpu_memcpy": "device",
    "gpu_memset": "device",
}
"""The categories of torch's events that are kept, and what they are here."""
