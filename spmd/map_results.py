"""What the workers of a map return, joined to one result: structures, dtypes and copies must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.dtypes import dtype_name
from spmd.device import contiguous
from spmd.errors import (
    LayoutError,
    message,
)
from spmd.frontends import frontend
from spmd.layout import Layout, P, Spec
from spmd.mesh import Mesh
from spmd.replicas.compare import (
    OTHER,
    ROUNDING,
    SAME,
    compared_part,
    digest,
    is_skipped,
    next_turn,
    relation,
    sketch,
    sketches_agree,
)
from spmd.replicas.records import object_record, record_relation
from spmd.replicas.verify import report, verify_shared
from spmd.spec_trees import shown
from spmd.transport.handles import Outcome, sealed


def as_block(x: Any) -> Any:
    """What is computed, as a block."""
    return sealed(contiguous(x))


def device_of(mesh: Mesh) -> str:
    return "" if mesh.device == "cpu" else f", {mesh.device}"


class BodyResults(NamedTuple):
    """What one worker's body returned: blocks, or any objects where the spec is None."""

    treedef: Any
    paths: list[str]
    specs: list[Spec | None]
    blocks: list[Any]
    pull: Callable | None = None


class MapResult(NamedTuple):
    """What came of a map: the structure of the results, they, joined, and whether processes compared values."""

    treedef: Any
    joined: list[Any]
    compared: bool


# Joining results


def one_structure(where: str, mesh: Mesh, outcome: Outcome) -> Any:
    """The structure of what the workers held here return."""
    first, mine = next(iter(outcome.results.items()))
    for w, other in outcome.results.items():
        if other.treedef != mine.treedef:
            raise _structures_differ(where, mesh, (first, w), (shown(mine.treedef), shown(other.treedef)))
    return mine.treedef


def _structures_differ(where: str, mesh: Mesh, workers: Sequence[int], structures: Sequence[str]) -> Exception:
    return LayoutError(
        message(
            where,
            argument="result",
            got=" and ".join(f"{s} on {mesh.describe(w)}" for w, s in zip(workers, structures, strict=True)),
            need="one structure on all workers",
            mend="return the same tree everywhere",
        )
    )


def joined_leaves(where: str, mesh: Mesh, outcome: Outcome, check: bool, turns: dict[Any, int]) -> list:
    """Every worker's blocks as PartitionedArrays; objects with the spec None from the first worker here.

    turns: how often each result has been compared.
    """
    results, size = outcome.results, mesh.size
    mine = next(iter(results.values()))
    places = [k for k, spec in enumerate(mine.specs) if spec is not None]
    checked, alone = check and mesh.checks, len(results) < size
    if checked and len(places) < len(mine.specs):
        _objects_agree(where, mesh, outcome)
    if not places and not alone:
        return list(mine.blocks)
    # Blocks on a device are not compared: that would wait for it.
    turn = _turns_of_copies(mesh, outcome, places, turns) if checked and mesh.places is None else {}
    parts = {k: {w: compared_part(r.blocks[k], n) for w, r in results.items()} for k, n in turn.items()}
    if alone:
        told = _told(where, mesh, outcome, checked, places, turn, parts)
    else:
        told = {w: [_Note(r.blocks[k].shape, r.blocks[k].dtype) for k in places] for w, r in results.items()}
    joined = list(mine.blocks)
    for j, k in enumerate(places):
        notes = [told[w][j] for w in range(size)]
        path, spec = mine.paths[k], mine.specs[k]
        assert spec is not None
        _one_dtype(where, path, mesh, [note.dtype for note in notes])
        layout = mesh.joined(tuple([note.shape for note in notes]), spec, where, path)
        if k in turn:
            _copies_agree(where, path, mesh, layout, notes, parts[k])
        joined[k] = PartitionedArray(mesh.shared(layout, lambda w, k=k: results[w].blocks[k]), layout, mesh)
        joined[k].compared = checked
    return joined


class _Note(NamedTuple):
    """What is known of a worker's block. turn, number: of a copy that another process holds, which comparison it is,
    and the digest of what that takes in."""

    shape: tuple[int, ...]
    dtype: Any
    turn: int = 0
    number: int = 0


def _told(
    where: str,
    mesh: Mesh,
    outcome: Outcome,
    checked: bool,
    places: Sequence[int],
    turn: dict[int, int],
    parts: dict[int, dict[int, np.ndarray]],
) -> dict[int, list[_Note]]:
    """What processes tell each other of their blocks at the end of a map. They compare the structures of their results,
    and what they noted, by the same message."""
    ((me, own),) = outcome.results.items()
    structure = shown(own.treedef)
    notes = [
        [
            [*own.blocks[k].shape],
            dtype_name(own.blocks[k].dtype),
            turn.get(k, 0),
            digest(parts[k][me]) if k in turn else 0,
        ]
        for k in places
    ]
    shared = mesh.transport.share({me: [structure, notes, outcome.replicas.shared() if checked else {}]})
    for w, (other, *_) in shared.items():
        if other != shared[0][0]:
            raise _structures_differ(where, mesh, (0, w), (shared[0][0], other))
    if checked:
        verify_shared(mesh, {w: records for w, (_, _, records) in shared.items()}, outcome.replicas)
    return {w: [_Note(tuple(shape), *rest) for shape, *rest in found] for w, (_, found, _) in shared.items()}


def _turns_of_copies(mesh: Mesh, outcome: Outcome, places: Sequence[int], turns: dict[Any, int]) -> dict[int, int]:
    """By place, the results of which copies are compared now, and how often they were before."""
    results = list(outcome.results.values())
    first, alone = results[0], len(results) < mesh.size
    own: dict[int, bool] = {}  # by spec: whether every worker has a block that is no copy
    found = {}
    for k in places:
        spec, block = first.specs[k], first.blocks[k]
        varies = own.get(id(spec))
        if varies is None:
            assert spec is not None
            varies = isinstance(spec, P) and all(n == 1 or name in spec.varying for name, n in mesh.axes.items())
            own[id(spec)] = varies
        if not varies and (alone or not isinstance(spec, P) or any(r.blocks[k] is not block for r in results)):
            turn = next_turn(turns, (first.paths[k], block.shape))
            if not is_skipped(turn, block.nbytes):
                found[k] = turn
    return found


def _one_dtype(where: str, path: str, mesh: Mesh, dtypes: list[Any]) -> None:
    for w, dtype in enumerate(dtypes):
        if dtype != dtypes[0]:
            raise LayoutError(
                message(
                    where,
                    argument=path,
                    got=f"{dtypes[0]} on {mesh.describe(0)} and {dtype} on {mesh.describe(w)}",
                    need="one dtype on all workers",
                    mend="x.astype(...) before returning it",
                )
            )


def _copies_agree(
    where: str, path: str, mesh: Mesh, layout: Layout, notes: list[_Note], parts: dict[int, np.ndarray]
) -> None:
    """What is typed Invariant must be equal by value. parts: what is compared of the blocks held here."""
    pairs = [(owner, w) for w, owner in enumerate(layout.owners) if owner != w]
    if len(parts) == mesh.size:
        judged = [relation(parts[owner], parts[w]) for owner, w in pairs]
    else:
        pairs = [
            (owner, w)
            for owner, w in pairs
            if notes[owner].turn == notes[w].turn and notes[owner].number != notes[w].number
        ]
        if not pairs:
            return
        sketches = mesh.transport.share({w: sketch(p) for w, p in parts.items()})
        judged = [ROUNDING if sketches_agree(sketches[owner], sketches[w]) else OTHER for owner, w in pairs]
    axes = [n for n in mesh.axes if layout.spec is not None and n not in layout.spec.varying]
    for pair, found in zip(pairs, judged, strict=True):
        if found != SAME:
            report(mesh, found, where, path, pair, axes, kind="result")


def _bare(x: Any) -> Any:
    """An object as it is compared: of an array of another library its data."""
    other = frontend(x)
    return x if other is None else other.data(x)


def _objects_agree(where: str, mesh: Mesh, outcome: Outcome) -> None:
    """Results with the out_spec None are equal on all workers: those held here are compared, and noted for others."""
    results = outcome.results
    first, mine = next(iter(results.items()))
    for k, spec in enumerate(mine.specs):
        if spec is not None:
            continue
        record = object_record(where, mine.paths[k], _bare(mine.blocks[k]))
        for w, other in results.items():
            if other.blocks[k] is mine.blocks[k]:
                continue
            theirs = object_record(where, mine.paths[k], _bare(other.blocks[k]))
            if record is not None and theirs is not None:
                judged = record_relation(record, theirs)
                if judged != SAME:
                    texts = [record.text, theirs.text] if record.text != theirs.text else []
                    report(mesh, judged, where, mine.paths[k], (first, w), tuple(mesh.axes), texts=texts, kind="object")
        if outcome.replicas.distributed and record is not None:
            outcome.replicas.add(tuple(mesh.axes), record, "object")
