"""The results of a map: checked against out_specs on each worker, and joined to global arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.array import PartitionedArray, as_block, closure_error, joined_copies
from spmd.autodiff import tree
from spmd.autodiff.admission import admit
from spmd.autodiff.allocation import writable
from spmd.autodiff.dtypes import dtype_name
from spmd.autodiff.staging.recorder import is_slot, one_line, slot_of
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import LayoutError, StateError, all_of, axes_of, describe, one_or_all
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.layout import Layout, P, Spec
from spmd.mesh import Mesh, Worker
from spmd.operators.root import Rooted, laid_out
from spmd.operators.varying import outside, vary
from spmd.ownership import owned
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
from spmd.resharding import check_dtype_of_parts
from spmd.spec_trees import Leaf, shown, spread
from spmd.state import State, state_of
from spmd.transport.call import Call
from spmd.transport.handles import Outcome, read_only

_RESULT = "an array of numbers, or a number"
_PASSES_AS_IT_IS = "the out_spec None lets any object pass that is equal on all workers"


class BodyResults(NamedTuple):
    """The results of one worker's body: blocks, or any object where the spec is None. pull: their pullback."""

    treedef: Any
    paths: list[str]
    specs: list[Spec | None]
    blocks: list[Any]
    pull: Callable | None = None


class MapResult(NamedTuple):
    """The results of a map.

    treedef: their structure. joined: global arrays, and objects. compared: whether processes compared values.
    """

    treedef: Any
    joined: list[Any]
    compared: bool


class ResultSpecs:
    """The results of a mapped function: matched with out_specs and checked. where: the map, for messages."""

    def __init__(self, where: str, out_specs: Any):
        self.where = where
        self.out_specs = out_specs

    def leaves(self, out) -> tuple[list[Leaf], Any]:
        """The result of a body as leaves with their specs, and its structure."""
        if out is None and self.out_specs is not None:
            raise StateError.at(
                self.where,
                argument="result",
                got="None",
                need=f"what out_specs promise: {self.out_specs}",
                mend="end the body with a return; out_specs=None if it has no result",
            )
        leaves = [
            leaf._replace(value=laid_out(leaf.value, leaf.spec, self.where, leaf.path))
            if type(leaf.value) is Rooted and isinstance(leaf.spec, Layout)
            else leaf
            for leaf in spread(self.where, "result", "out_specs", self.out_specs, out)
        ]
        return leaves, tree.structure(out, none_is_leaf=True)

    def check(self, worker: Worker, out) -> BodyResults:
        """The result of a body as blocks, checked against out_specs."""
        leaves, treedef = self.leaves(out)
        blocks = [self.block(worker, leaf) if leaf.spec is not None else self.as_object(leaf) for leaf in leaves]
        return BodyResults(treedef, [leaf.path for leaf in leaves], [leaf.spec for leaf in leaves], blocks)

    def block(self, worker: Worker, leaf: Leaf):
        """One result as a block: bare, C-contiguous, read-only, and Invariant where out_specs promise it."""
        x, spec = leaf.value, leaf.spec
        assert spec is not None
        if spec.unreduced and worker.tracked and type(x) is not Array:
            self._check_parts(worker, leaf)
        if type(x) is Array:
            x = self.in_promised_state(worker, leaf, x)
            block = self._admit(leaf, as_block(value_of(x)))
        elif is_slot(x):
            block = one_line(np.asarray, (x,))
        elif on_device(x):
            block = x.copy(order="C")  # others may write to it
        elif type(x) in (PartitionedArray, Rooted) or frontend(x) is not None:
            raise self._unsuitable(leaf)
        elif isinstance(x, np.generic | int | float | complex):
            block = read_only(self._admit(leaf, x))
        else:
            bare = self._admit(leaf, x)
            block = owned(bare) if writable(bare) else np.asarray(bare, order="C")
        spec.check(worker.mesh.axes, self.where, leaf.path, block.ndim, unreduced=True)
        if spec.unreduced:
            check_dtype_of_parts(self.where, block.dtype, leaf.path)
        if worker.mesh.places is not None:
            block = worker.mesh.places.moved(block, worker.index)
        copies = tuple(n for n in worker.mesh.axes if n not in spec.varying)
        if not worker.tracked and copies and worker.group(copies).size > 1:
            call = Call("spmd.map, check=False", copies, block.dtype, block.shape, detail=leaf.path, same_shape=True)
            group = worker.group(copies)
            block = worker.comm.broadcast(group, call, block if group.index == 0 else None, 0).wait()
        return block

    def in_promised_state(self, worker: Worker, leaf: Leaf, x: Array) -> Array:
        """A result in the state that its spec promises. Raises if it is Varying where an Invariant one is promised."""
        if x.state is None:
            raise outside(self.where, x, leaf.path)
        return vary(x, self.promised_state(worker, leaf, x.ndim, x.state))

    def promised_state(self, worker: Worker, leaf: Leaf, ndim: int, state: State) -> State:
        """The state that its spec promises for a result in a state. Raises if the result varies over more axes."""
        spec = leaf.spec
        assert spec is not None
        spec.check(worker.mesh.axes, self.where, leaf.path, ndim, unreduced=True)
        extra = [n for n in worker.mesh.axes if n in state.varying and n not in spec.varying]
        if extra:
            axes = one_or_all(extra)
            raise StateError.at(
                self.where,
                argument=leaf.path,
                got=f"{describe(leaf.value)}, promised by out_specs {spec} to be Invariant along {all_of(extra)}",
                need=f"one value along {axes_of(extra)}",
                mend=f"spmd.psum(x, {axes}), spmd.mean(x, {axes}) or spmd.all_gather(x, {axes}, "
                f'to="invariant") make it so; or name {all_of(extra)} in out_specs to keep a block per worker',
            )
        self._check_parts(worker, leaf, state.varying)
        return state_of(state.varying | spec.varying)

    def _check_parts(self, worker: Worker, leaf: Leaf, varying: Collection[str] = ()) -> None:
        """Raise if a result that is promised to be unreduced along some axes is one value along them."""
        assert leaf.spec is not None
        sums = [n for n in worker.mesh.axes if n in leaf.spec.unreduced and n not in varying]
        if sums:
            raise StateError.at(
                self.where,
                argument=leaf.path,
                got=f"{describe(leaf.value)}, promised by out_specs {leaf.spec} to be unreduced along {all_of(sums)}",
                need=f"a part of the sum on each worker along {axes_of(sums)}: the sum of this one value over them "
                "would count it once for each",
                mend=f"leave {all_of(sums)} out of unreduced; spmd.pvary(x, {one_or_all(sums)}) if that sum is meant",
            )

    def as_object(self, leaf: Leaf):
        """A result with the out_spec None, which is passed as it is. An array must be one value."""
        x = leaf.value
        if type(x) is Array and x.tape is None and x.state is not None and not x.state.varying:
            return x.value
        if type(x) in (Array, Rooted):
            raise StateError.at(
                self.where,
                argument=leaf.path,
                got=f"{describe(x)}, with the out_spec None",
                need="an object that is equal on all workers and has no gradient",
                mend="give it a spec: P() for one value, P(axis) for a block per worker",
            )
        return x

    def _admit(self, leaf: Leaf, x: Any) -> Any:
        if on_device(x) or (type(x) is np.ndarray and x.dtype.kind in "fciub"):
            return x
        return admit(x, self.where, leaf.path, need=_RESULT, otherwise=_PASSES_AS_IT_IS)

    def _unsuitable(self, leaf: Leaf) -> Exception:
        """The error for an array of this library or of a frontend that a NumPy body cannot return."""
        x = leaf.value
        if type(x) is PartitionedArray:
            return closure_error(self.where, x, leaf.path)
        if type(x) is Rooted:
            mend = (
                "spmd.replicate(x, axis_name) for one value known to all, spmd.broadcast(x, axis_name) for a block "
                "each; or a Layout in out_specs that gives it to its root"
            )
        else:
            mend = "arrays of NumPy: np.asarray(x) of what has no gradient and no state, or a map of that library; "
            mend += _PASSES_AS_IT_IS
        return StateError.at(self.where, argument=leaf.path, got=describe(x), need=_RESULT, mend=mend)


def one_structure(where: str, mesh: Mesh, outcome: Outcome) -> Any:
    """The structure of the results, which must be the same on all workers of this process."""
    first, own = next(iter(outcome.results.items()))
    for w, other in outcome.results.items():
        if other.treedef != own.treedef:
            raise _structures_differ(where, mesh, (first, w), (shown(own.treedef), shown(other.treedef)))
    return own.treedef


def _structures_differ(where: str, mesh: Mesh, workers: Sequence[int], structures: Sequence[str]) -> Exception:
    return LayoutError.at(
        where,
        argument="result",
        got=" and ".join(f"{s} on {mesh.describe(w)}" for w, s in zip(workers, structures, strict=True)),
        need="one structure on all workers",
        mend="return the same tree everywhere",
    )


def joined_leaves(where: str, mesh: Mesh, outcome: Outcome, check: bool, turns: dict[Any, int]) -> list:
    """The blocks of all workers as PartitionedArrays; objects with the spec None from the first worker here.

    turns: how many comparisons of each result came before.
    """
    results, size = outcome.results, mesh.size
    own = next(iter(results.values()))
    places = [k for k, spec in enumerate(own.specs) if spec is not None]
    checked, distributed = check and mesh.checks, len(results) < size
    if checked and len(places) < len(own.specs):
        _check_objects_agree(where, mesh, outcome)
    if not places and not distributed:
        return [joined_copies({w: r.blocks[k] for w, r in results.items()}) for k in range(len(own.blocks))]
    # Blocks on a device are not compared: that would wait for it.
    turn = _turns_of_copies(mesh, outcome, places, turns) if checked and mesh.places is None else {}
    parts = {k: {w: compared_part(slot_of(r.blocks[k]), n) for w, r in results.items()} for k, n in turn.items()}
    if distributed:
        summaries = _shared_summaries(where, mesh, outcome, checked, places, turn, parts)
    else:
        summaries = {
            w: [_BlockSummary(r.blocks[k].shape, r.blocks[k].dtype) for k in places] for w, r in results.items()
        }
    joined = [joined_copies({w: r.blocks[k] for w, r in results.items()}) for k in range(len(own.blocks))]
    for j, k in enumerate(places):
        notes = [summaries[w][j] for w in range(size)]
        path, spec = own.paths[k], own.specs[k]
        assert spec is not None
        _check_one_dtype(where, path, mesh, [note.dtype for note in notes])
        layout = mesh.joined(tuple([note.shape for note in notes]), spec, where, path)
        if k in turn:
            _check_copies_agree(where, path, mesh, layout, notes, parts[k])
        joined[k] = PartitionedArray(mesh.shared(layout, lambda w, k=k: results[w].blocks[k]), layout, mesh)
        joined[k].compared = checked
    return joined


class _BlockSummary(NamedTuple):
    """The shape and dtype of a worker's block; for a copy that another process holds, also its comparison.

    turn: the number of the comparison. number: the digest of the part that it covers.
    """

    shape: tuple[int, ...]
    dtype: Any
    turn: int = 0
    number: int = 0


def _shared_summaries(
    where: str,
    mesh: Mesh,
    outcome: Outcome,
    checked: bool,
    places: Sequence[int],
    turn: dict[int, int],
    parts: dict[int, dict[int, np.ndarray]],
) -> dict[int, list[_BlockSummary]]:
    """Exchange summaries of the blocks between processes at the end of a map.

    The same message carries the structures of the results and the records of `Replicas`, which are compared.
    """
    ((worker, own),) = outcome.results.items()
    structure = shown(own.treedef)
    summaries = [
        [
            [*own.blocks[k].shape],
            dtype_name(own.blocks[k].dtype),
            turn.get(k, 0),
            digest(parts[k][worker]) if k in turn else 0,
        ]
        for k in places
    ]
    records = outcome.replicas.shared() if checked else {}
    shared = mesh.transport.share({worker: [structure, summaries, records]})
    for w, (other, *_) in shared.items():
        if other != shared[0][0]:
            raise _structures_differ(where, mesh, (0, w), (shared[0][0], other))
    if checked:
        verify_shared(mesh, {w: others for w, (_, _, others) in shared.items()}, outcome.replicas)
    return {w: [_BlockSummary(tuple(shape), *rest) for shape, *rest in blocks] for w, (_, blocks, _) in shared.items()}


def _turns_of_copies(mesh: Mesh, outcome: Outcome, places: Sequence[int], turns: dict[Any, int]) -> dict[int, int]:
    """The results whose copies are compared now, with the number of the comparison."""
    results = list(outcome.results.values())
    first, distributed = results[0], len(results) < mesh.size
    own: dict[int, bool] = {}  # by spec: whether every worker has its own block
    turn_of = {}
    for k in places:
        spec, block = first.specs[k], first.blocks[k]
        varies = own.get(id(spec))
        if varies is None:
            assert spec is not None
            varies = isinstance(spec, P) and all(n == 1 or name in spec.varying for name, n in mesh.axes.items())
            own[id(spec)] = varies
        if not varies and (distributed or not isinstance(spec, P) or any(r.blocks[k] is not block for r in results)):
            turn = next_turn(turns, (first.paths[k], block.shape))
            if not is_skipped(turn, block.nbytes):
                turn_of[k] = turn
    return turn_of


def _check_one_dtype(where: str, path: str, mesh: Mesh, dtypes: list[Any]) -> None:
    for w, dtype in enumerate(dtypes):
        if dtype != dtypes[0]:
            raise LayoutError.at(
                where,
                argument=path,
                got=f"{dtypes[0]} on {mesh.describe(0)} and {dtype} on {mesh.describe(w)}",
                need="one dtype on all workers",
                mend="x.astype(...) before returning it",
            )


def _check_copies_agree(
    where: str, path: str, mesh: Mesh, layout: Layout, notes: list[_BlockSummary], parts: dict[int, np.ndarray]
) -> None:
    """Raise if copies of an Invariant result differ. parts: the compared parts of the blocks in this process."""
    pairs = [(owner, w) for w, owner in enumerate(layout.owners) if owner != w]
    if len(parts) == mesh.size:
        relations = [relation(parts[owner], parts[w]) for owner, w in pairs]
    else:
        pairs = [
            (owner, w)
            for owner, w in pairs
            if notes[owner].turn == notes[w].turn and notes[owner].number != notes[w].number
        ]
        if not pairs:
            return
        sketches = mesh.transport.share({w: sketch(p) for w, p in parts.items()})
        relations = [ROUNDING if sketches_agree(sketches[owner], sketches[w]) else OTHER for owner, w in pairs]
    axes = [n for n in mesh.axes if layout.spec is not None and n not in layout.spec.varying]
    for pair, result in zip(pairs, relations, strict=True):
        if result != SAME:
            report(mesh, result, where, path, pair, axes, kind="result")


def _bare(x: Any) -> Any:
    """An object for comparison: of an array of another library, its data."""
    other = frontend(x)
    return x if other is None else other.data(x)


def _check_objects_agree(where: str, mesh: Mesh, outcome: Outcome) -> None:
    """Raise if results with the out_spec None differ on workers of this process; note them for other processes."""
    results = outcome.results
    first, own = next(iter(results.items()))
    for k, spec in enumerate(own.specs):
        if spec is not None:
            continue
        record = object_record(where, own.paths[k], _bare(own.blocks[k]))
        for w, other in results.items():
            if other.blocks[k] is own.blocks[k]:
                continue
            other_record = object_record(where, own.paths[k], _bare(other.blocks[k]))
            if record is not None and other_record is not None:
                result = record_relation(record, other_record)
                if result != SAME:
                    texts = [record.text, other_record.text] if record.text != other_record.text else []
                    report(mesh, result, where, own.paths[k], (first, w), tuple(mesh.axes), texts=texts, kind="object")
        if outcome.replicas.distributed and record is not None:
            outcome.replicas.add(tuple(mesh.axes), record, "object")
