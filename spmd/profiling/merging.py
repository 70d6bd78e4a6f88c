"""One profile of several processes: their clocks, and their events, which the first of them gets."""

from __future__ import annotations

import json
import platform
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from spmd.mesh import Mesh, Worker
from spmd.transport.call import LEDGERS, Call, Group, Observers

__all__ = ["Merge", "agree", "distributed_mesh", "gathered", "shared"]

_ROUNDS = 8
"""Exchanges of time stamps: each bounds the differences between the clocks."""


class Merge(NamedTuple):
    """What all processes know of each other. number: of this process; size: of all. offset: what is added to this
    process's `perf_counter` to have that of the first process; error: by how much it may be wrong. method: how it was
    found. start: the earliest start of a process, by the clock of the first."""

    number: int
    size: int
    offset: float
    error: float
    method: str
    start: float


def distributed_mesh(meshes: list[Mesh]) -> Mesh | None:
    """The first mesh with the most processes; None where one process had all workers."""
    several = [mesh for mesh in meshes if len(mesh.local_workers) < mesh.size]
    return max(several, key=lambda mesh: mesh.size, default=None)


def agree(mesh: Mesh, start: float) -> Merge:
    """Compare the clocks of all processes. start: when the profile began here."""
    return _on_each(mesh, lambda worker: _clock(worker, start))


def gathered(mesh: Mesh, text: str) -> list[str]:
    """The texts of all processes, at the first of them; elsewhere an empty list."""

    def body(worker: Worker) -> list[str]:
        group, own = _everyone(worker), np.frombuffer(text.encode(), np.uint8)
        blocks = worker.comm.gather(group, _call(group, own), own, 0).wait()
        return [] if blocks is None else [np.asarray(block).tobytes().decode() for block in blocks]

    return _on_each(mesh, body)


def shared(mesh: Mesh, value: Any) -> list[Any]:
    """Small JSON values of all processes."""

    def body(worker: Worker) -> list[Any]:
        group, own = _everyone(worker), np.frombuffer(json.dumps(value).encode(), np.uint8)
        blocks = worker.comm.all_gather(group, _call(group, own), own).wait()
        return [json.loads(np.asarray(block).tobytes()) for block in blocks]

    return _on_each(mesh, body)


def _on_each(mesh: Mesh, body: Any) -> Any:
    """The result of body(worker) for the worker of this process. Nobody observes it."""
    token = LEDGERS.set(Observers())
    try:
        (result,) = mesh.run(body, tracked=False).results.values()
    finally:
        LEDGERS.reset(token)
    return result


def _everyone(worker: Worker) -> Group:
    return worker.group(tuple(worker.mesh.axes))


def _call(group: Group, block: np.ndarray) -> Call:
    call = Call("spmd.profile", group.axes, block.dtype, block.shape)
    call.host = True
    return call


def _clock(worker: Worker, start: float) -> Merge:
    """The clock of this process beside that of the first one.

    What a member has sent before another one receives it bounds the difference of their clocks from one side, and what
    comes back from the other side. The narrowest bounds of all rounds count.
    """
    group = _everyone(worker)
    me, size = group.index, group.size

    def all_of(*numbers: float) -> np.ndarray:
        own = np.array(numbers)
        blocks = worker.comm.all_gather(group, _call(group, own), own).wait()
        return np.array([np.asarray(block) for block in blocks])

    host = np.frombuffer(f"{_boot()}".encode(), np.uint8).astype(np.float64)
    hosts = [np.asarray(b).tobytes() for b in worker.comm.all_gather(group, _call(group, host), host).wait()]
    if len(set(hosts)) == 1:
        return Merge(me, size, 0.0, 0.0, "one host: all processes read one monotonic clock", float(all_of(start).min()))
    lows, highs = np.full(size, -np.inf), np.full(size, np.inf)
    for _ in range(_ROUNDS):
        sent = all_of(perf_counter())[:, 0]
        came = all_of(perf_counter())[:, 0]  # its own stamp was taken after all of `sent` had come
        lows = np.maximum(lows, sent[0] - came)  # offset of k: clock of the first minus clock of k
        highs = np.minimum(highs, came[0] - sent)
    offsets, errors = (lows + highs) / 2, (highs - lows) / 2
    offsets[0] = errors[0] = 0.0
    begin = float((all_of(start)[:, 0] + offsets).min())
    text = f"{_ROUNDS} exchanges of time stamps at the end of the profile"
    return Merge(me, size, float(offsets[me]), float(errors[me]), text, begin)


def _boot() -> str:
    """What processes have in common that read one clock: the host, since it was started."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()
