"""`spmd.profile`: record a program, write the trace, print the table."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from types import TracebackType
from typing import Any

from spmd.errors import MeshError, SpecError, describe
from spmd.mesh import WORKER
from spmd.profiling import merging
from spmd.profiling.kernels import observe_kernels, release_kernels
from spmd.profiling.recording import Recorder
from spmd.profiling.table import ProfileRow, merged_rows, rows_of, table
from spmd.profiling.torch_operations import TorchOperations
from spmd.profiling.trace import left_out, text_of_events
from spmd.representations.tables import Printed, Report
from spmd.tracebacks import api_boundary
from spmd.transport.call import LEDGERS, begin_observing
from spmd.transport.processes.job import job_world

__all__ = ["LIMIT", "Profile", "profile"]

LIMIT = 100_000
"""Events that a profile keeps of each worker, by default: about 30 MB in the file."""


@api_boundary
def profile(path: str | os.PathLike[str] | None = None, *, limit: int = LIMIT, torch: bool = False) -> Profile:
    """Record where the time goes: `with spmd.profile("trace.json") as profile:`.

    Inside the block, maps, collectives, kernels and steps are recorded, of all workers of all processes. At its end the
    main process writes one file in the Chrome Trace Event Format, which https://ui.perfetto.dev and chrome://tracing
    open: a track per worker. `print(profile)` shows a table by line and axis, and `profile.rows()` gives its rows, on
    every process. docs/how_to/profile.md shows how to read them.

    path: of the file; None: only the table. limit: events to keep of each worker. What comes later is counted in the
    table, and the file and the table say how much that was. torch: whether to record the operations of PyTorch too, by
    torch.profiler.

    All processes enter and leave the block together, outside of bodies. If the block raises, nothing is sent any more:
    each process writes what it has, the others than the first to a file of their own (`trace.process3.json`).

    Raises MeshError inside a body, SpecError for a wrong limit, OSError if the file cannot be written.

        >>> total = spmd.map(lambda x: spmd.psum(x, "x"), in_specs=P("x"), out_specs=P())
        >>> with spmd.Mesh(x=2), spmd.profile() as profile:
        ...     y = total(np.arange(4.0))
        >>> [(row.name, row.axes, row.times, row.bytes) for row in profile.rows() if row.kind == "collective"]
        [('psum', ('x',), 1.0, 16.0)]
    """
    if type(limit) is not int or limit < 1:
        raise SpecError.at(
            "spmd.profile",
            argument="limit",
            got=describe(limit),
            need="a number of events per worker, at least 1",
            mend=f"leave limit out: it is {LIMIT}",
        )
    if WORKER.get() is not None:
        raise MeshError.at(
            "spmd.profile",
            got="a profile that is opened inside a body",
            need="one around maps: it records all workers",
            mend='with spmd.profile("trace.json"): around the call of the map',
        )
    return Profile(path, limit, torch)


class Profile(Printed):
    """A profile: see `spmd.profile`.

    path: of the file that was written here, or None. seconds: the duration of the block. notes: sentences about the
    file: how clocks were compared, what was left out.
    """

    def __init__(self, path: str | os.PathLike[str] | None, limit: int, torch: bool):
        self.path: Path | None = None
        self.seconds = 0.0
        self.notes: list[str] = []
        self._wanted = None if path is None else Path(path)
        self._limit, self._with_torch = limit, torch
        self._torch: TorchOperations | None = None
        self._recorder: Recorder | None = None
        self._rows: list[ProfileRow] = []
        self._token: Any = None

    def __enter__(self) -> Profile:
        number, _ = _place_in_job()
        if self._wanted is not None and number == 0:
            self._wanted.write_text("")  # an error comes before the program has run
        if self._with_torch:
            self._torch = TorchOperations()
        observe_kernels()
        self._recorder = Recorder(self._limit)
        self._token = begin_observing(self._recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        assert recorder is not None
        LEDGERS.reset(self._token)
        release_kernels()
        recorder.close()
        self.seconds = recorder.end - recorder.start
        others, count = ([], 0) if self._torch is None else self._torch.stop(recorder.start, self._limit)
        lost = left_out(recorder)
        if count:
            lost.append({"track": "operations of torch", "events": count, "after_seconds": 0.0})
        self._torch = None
        mesh = merging.distributed_mesh([t.mesh for t in recorder.tracks.values() if t.mesh is not None])
        if mesh is None or error is not None:
            self._write_alone(recorder, others, lost, error)
            return
        try:
            self._write_merged(mesh, recorder, others, lost)
        except BaseException as failure:
            self._write_alone(recorder, others, lost, failure)
            raise

    def step(self) -> None:
        """End a step of the program, and begin the next: a span of the program's track, and the step of later maps."""
        recorder = self._recorder
        if recorder is not None:
            recorder.next_step()

    def rows(self) -> list[ProfileRow]:
        """The rows of the table: `ProfileRow` says what they hold. Empty inside the block."""
        return list(self._rows)

    def _report(self) -> Report:
        head = f"{self.seconds:.3f} s" + (f", {self.path}" if self.path is not None else "")
        return Report("", [*table(self._rows), head, *self.notes], gap="\n")

    def _write_alone(
        self, recorder: Recorder, others: list[dict[str, Any]], lost: list[Any], error: BaseException | None
    ) -> None:
        """Write what this process has recorded."""
        number, size = _place_in_job()
        self._rows = merged_rows([rows_of(recorder, others)])
        self.notes = [_lost_note({**entry, "process": number}) for entry in lost]
        about: dict[str, Any] = {"clock": "one process", "processes": 1, "left_out": lost}
        if error is not None:
            about["ended_by"] = type(error).__name__
            self.notes.append(f"the block ended by {type(error).__name__}; this is what was recorded before")
        if size > 1:
            about |= {"process": number, "of": size, "merged": False}
        path = self._wanted
        if path is not None and number:
            if error is None:
                return  # no map over several processes: the first one writes its own
            path = path.with_suffix(f".process{number}{path.suffix}")
        if path is not None:
            text = text_of_events(recorder, number, _process_name(number, size), recorder.start, others)
            self._write(path, [text], about)

    def _write_merged(self, mesh: Any, recorder: Recorder, others: list[dict[str, Any]], lost: list[Any]) -> None:
        """Send what this process has recorded to the first one, which writes the file."""
        clock = merging.agree(mesh, recorder.start)
        shared = merging.shared(mesh, [rows_of(recorder, others), lost])
        self._rows = merged_rows([rows for rows, _ in shared])
        all_lost = [{**entry, "process": k} for k, (_, entries) in enumerate(shared) for entry in entries]
        self.notes = [*map(_lost_note, all_lost), f"clocks: {clock.method}, within {clock.error * 1e6:.0f} us"]
        wanted = [path for path in merging.shared(mesh, self._wanted is not None) if path]
        if not wanted:
            return
        origin = clock.start - clock.offset
        text = text_of_events(recorder, clock.number, _process_name(clock.number, clock.size), origin, others)
        about = {"clock": clock.method, "clock_error_us": round(clock.error * 1e6, 3), "processes": clock.size}
        parts = merging.gathered(mesh, text)
        if clock.number == 0 and self._wanted is not None:
            self._write(self._wanted, parts, {**about, "left_out": all_lost})

    def _write(self, path: Path, parts: list[str], about: dict[str, Any]) -> None:
        """Write the file. about: what it says of itself."""
        about = {"producer": "spmd.profile", "limit_per_worker": self._limit, **about}
        text = ",\n".join(part for part in parts if part)
        whole = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},\n"traceEvents":[\n{text}\n]}}\n'
        path.write_text(whole, encoding="utf-8")
        self.path = path


def _place_in_job() -> tuple[int, int]:
    """The number of this process in its job, and how many there are."""
    world = job_world()
    return (0, 1) if world is None else (world.rank, world.size)


def _process_name(number: int, size: int) -> str:
    return f"process {number} of {size}, {platform.node()}, pid {os.getpid()}"


def _lost_note(entry: dict[str, Any]) -> str:
    return (
        f"{entry['events']} events of {entry['track']} (process {entry['process']}) are not in the file: limit reached "
        f"after {entry['after_seconds']:.3f} s"
    )
