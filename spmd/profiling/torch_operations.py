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
"""The name of the event by which torch's clock is compared with Python's."""


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
        before = perf_counter()
        with torch.profiler.record_function(_MARK):
            pass
        self.mark = (before + perf_counter()) / 2

    def stop(self, since: float, limit: int) -> tuple[list[dict[str, Any]], int]:
        """The events since a time: kind, name, track, start and end by `perf_counter`, args; and how many the limit
        leaves out."""
        self.profiler.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "torch.json")
            self.profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X" and "ts" in event]
        mark = next((event for event in spans if event["name"] == _MARK), None)
        if mark is None:
            return [], len(spans)
        origin = self.mark - float(mark["ts"]) / 1e6
        kept = [self._event(event, origin) for event in spans if event.get("cat") in _KINDS]
        kept = [event for event in kept if event["start"] >= since]
        return kept[:limit], max(0, len(kept) - limit)

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
