"""Compare the copies of a value on several workers, and report where they differ.

A bare array or number counts as Invariant without a declaration. If a result depends on that, the copies of the workers
are compared: results promised Invariant, arguments and closures of processes, reductions that are the identity on
Invariant values, and Invariant leaves of gradients taken inside a body.

Virtual workers compare their arrays with each other at once. Processes note a digest, and compare the digests with the
message that ends the map.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.errors import ReplicaError, StateError, message
from spmd.kernels import on_device
from spmd.mesh import Mesh, Worker
from spmd.replicas.compare import (
    OTHER,
    ROUNDING,
    SAME,
    WHOLE_COMPARISONS,
    compared_part,
    is_skipped,
    next_turn,
    relation,
    sketch,
    sketches_agree,
)
from spmd.replicas.records import ReplicaRecord, Replicas, Source, array_text, source_of

__all__ = ["report", "verify_replicas", "verify_shared"]

_DECLARE = (
    "data made from a worker's place, from random numbers, files or the clock is Varying: declare it with "
    "spmd.varying(a, {axes}){more}; spmd.debug(replicas=True) finds where values first part"
)
_PASS = (
    "pass the same on every process: seed random numbers alike, or make it on one process and send it to the others; "
    "spmd.from_blocks and spmd.from_callback make a global array of data that differs from process to process"
)
_MENDS = {
    "argument": _PASS,
    "number": _PASS,
    "shape": _PASS,
    "closure": "pass it to the map as an argument, or, if it is meant to differ, declare it in the body with "
    "spmd.varying(a, {axes})",
    "result": _DECLARE.replace("{more}", ", and reduce it before it is returned"),
    "object": "return what is equal on all workers, or give it a spec: P() for one value after a reduction, "
    "P({axes}) for a block per worker, {block} for a number of each",
    "": _DECLARE.replace("{more}", ""),
}
"""The remedy that a message names, by the kind of value."""
_PROCESS_KINDS = ("argument", "number", "shape", "closure", "object")
_NEEDS = {"shape": "one shape, dtype and spec on all processes", "object": "an object that is equal on all workers"}


def verify_replicas(
    worker: Worker, axes: tuple[str, ...], value: Any, where: str, argument: str, source: Source
) -> None:
    """Compare a value with those of the workers along `axes` that pass the same line as often as this one.

    A line that only some workers pass is no error. source: the line. A writable value is copied.
    """
    group, replicas = worker.group(axes), worker.replicas
    if group.size == 1 or on_device(value) or not worker.mesh.checks:
        return
    line = (group.key, id(source.code), source.instruction, where, argument)
    count = next_turn(replicas.counts, (worker.index, *line))
    value = np.asarray(value)
    if max(replicas.run, count) >= WHOLE_COMPARISONS and is_skipped(replicas.run + count, value.nbytes):
        return
    turn = next_turn(worker.mesh.turns, (worker.index, *line, value.shape))
    part = compared_part(value, turn)
    if replicas.distributed:
        record = ReplicaRecord(where, argument, str(source), array_text(value), turn)
        replicas.add_line(group.axes, part, record, count)
        return
    first = replicas.first_value((*line, count), (worker.index, value, part), group.size)
    if first is None:
        return
    other, other_value, other_part = first
    if other_value is value:
        return
    fits = other_value.shape == value.shape and other_value.dtype == value.dtype
    result = relation(other_part, part) if fits else OTHER
    if result != SAME:
        texts = [] if fits else [array_text(other_value), array_text(value)]
        report(worker.mesh, result, where, argument, (other, worker.index), axes, str(source), texts)


def verify_shared(mesh: Mesh, shared: Mapping[int, Mapping[str, Any]], replicas: Replicas) -> None:
    """Compare what all processes noted. shared: by worker and key. replicas: this process's own records.

    Every process finds the same differences, so all ask for sketches of the same values.
    """
    replicas.any_noted = any(shared.values())
    _compare(mesh, shared, replicas.records)
    for x in replicas.arrays:
        x.compared = True


def _compare(mesh: Mesh, shared: Mapping[int, Mapping[str, Any]], records: Mapping[str, ReplicaRecord]) -> None:
    first = shared[0]
    if all(noted == first for noted in shared.values()):
        return
    differences = list(_differences(mesh, shared))
    if not differences:
        return
    keys = sorted({key for _, _, key in differences})
    values = {key: records[key].value for key in keys if key in records}
    own = {key: sketch(value) for key, value in values.items() if value is not None}
    (own_worker,) = mesh.local_workers
    sketches = mesh.transport.share({own_worker: own})
    rounded: set[str] = set()
    for one, other, key in differences:
        where, argument, source = _names(key)
        texts = [shared[w].get(key, ["no such argument"])[0] for w in (one, other)]
        result = OTHER
        if texts[0] == texts[1]:
            result = ROUNDING if sketches_agree(*(sketches[w].get(key) for w in (one, other))) else OTHER
            texts = []
            # Occurrences noted together share a digest and have no sketch: they count as the earlier ones do.
            line = key.rpartition("|")[0]
            result = ROUNDING if line in rounded else result
            rounded |= {line} if result == ROUNDING else set()
        report(mesh, result, where, argument, (one, other), _axes(key), source, texts, _kind(key))


def _axes(key: str) -> tuple[str, ...]:
    return tuple(name for name in key.split("|", 1)[0].split(",") if name)


def _names(key: str) -> list[str]:
    """The function, the argument and the source line in a key, for messages."""
    return key.split("|")[1:4]


def _kind(key: str) -> str:
    """The kind of value in a key: empty for lines of bodies, whose keys end with a number."""
    last = key.rpartition("|")[2]
    return "" if last.isdigit() else last


def _differences(mesh: Mesh, shared: Mapping[int, Mapping[str, Any]]) -> Iterable[tuple[int, int, str]]:
    """Pairs of workers that noted different values, with the key."""
    first: dict[tuple[str, int], int] = {}
    for w in range(mesh.size):
        for key, (text, turn, number) in shared[w].items():
            one = first.setdefault((key, mesh.group(w, _axes(key)).ordered[0]), w)
            other_text, other_turn, other_number = shared[one][key]
            if text != other_text or (turn == other_turn and number != other_number):
                yield one, w, key
    for key, w in {key: w for (key, _), w in first.items() if key.rpartition("|")[2] in ("shape", "number")}.items():
        yield from ((w, other, key) for other in range(mesh.size) if key not in shared[other])


def _warn_at(source: str, text: str) -> None:
    """Warn at a line of the user's code. Python shows the warning once."""
    place, _, _ = source.rpartition(" in ")
    file, _, line = place.rpartition(":")
    if not source:
        user = source_of(sys._getframe(1))
        file, line = user.code.co_filename if user.code else "spmd", str(user).rpartition(" in ")[0].rpartition(":")[2]
    registry = _shown.setdefault(source, {})
    warnings.warn_explicit(text, RuntimeWarning, file or "spmd", int(line or 1), registry=registry)


_shown: dict[str, dict] = {}
"""The registries of warnings that Python has shown, by line of the user's code."""


def report(
    mesh: Mesh,
    result: str,
    where: str,
    argument: str | None,
    workers: tuple[int, int],
    axes: Sequence[str],
    source: str = "",
    texts: Sequence[str] = (),
    kind: str = "",
) -> None:
    """Raise for different values; warn of rounding, once per line. result: a relation of `spmd.replicas.compare`."""
    one, other = map(mesh.describe, workers)
    line = f" at {source}" if source else ""
    along = " and ".join(map(repr, axes)) or "all axes"
    if result == ROUNDING:
        text = f"{where}{line}: {argument} differs by rounding between {one} and {other}; it should be the same bits"
        _warn_at(source, text)
        return
    named = "axis_name" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
    block = "torch.tensor([x])" if where.startswith("spt.") else "np.array([x])"
    what = "a value" if kind in _PROCESS_KINDS else "an Invariant array"
    got = f"{what} that differs between {one} and {other}"
    if texts:
        got = f"{texts[0]} on {one} and {texts[1]} on {other}"
    # Not a StateError in a body: that is a TypeError, which torch takes for unsuitable operands of an operator.
    kind_of_error = StateError if kind else ReplicaError
    raise kind_of_error(
        message(
            where + line,
            argument=argument,
            got=got,
            need=_NEEDS.get(kind, "one value on all workers along {along}").format(along=along),
            mend=_MENDS.get(kind, _MENDS[""]).format(axes=named, block=block),
        )
    )
