"""spmd.jit: maps whose bodies run once, and whose programs are done again.

The first call with arguments of some layouts runs the body on arrays that write down what is done with them
(`spmd.autodiff.staging`), forward and back, collectives included; that gives each worker a program of its own. Calls
after it, with arguments that lie alike, run the programs: no tape, no states, no checks of what has been checked.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import apply, tree
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.sanitizers import FINITE, WATCHING
from spmd.autodiff.staging.program import Built, Ref
from spmd.autodiff.staging.recorder import Program, is_slot, slot_of
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import JitError, SpecError, caller, describe, message
from spmd.map_arguments import MapArgument, cotangent_input, settled_cotangent
from spmd.map_results import BodyResults, MapResult, joined_leaves
from spmd.mapping import Mapped, gradients
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.base import bounded
from spmd.placement import mesh_for
from spmd.replicas.verify import verify_shared
from spmd.spec_trees import Leaf
from spmd.state import REPLICAS
from spmd.tracebacks import api_boundary
from spmd.transport.call import LEDGERS
from spmd.transport.handles import Outcome, sealed

__all__ = ["Jitted", "jit"]

_MANY = 64
"""Recordings of one map from which on its user is told."""


@api_boundary
def jit(f: Mapped) -> Jitted:
    """A map whose body's Python runs once: `spmd.jit(spmd.map(f, in_specs, out_specs))`.

    f: a map (`spmd.map`, `mesh.map`), with check=True. The first call with arguments of some layouts and dtypes runs
    the body, and writes down the calls of NumPy, of kernels and of collectives that it comes to; so do the first
    `spmd.value_and_grad` and `spmd.grad` of it, forward and back. Later calls do only these, with the same bits. What
    is left away is the Python of the body, of the library's checks, states and tapes: what small arrays spend most of
    their time on. Memory is let go of as early as the program allows, and written over where nobody sees it.

    As `jax.jit`: the body is a pure function of its arguments. What else it reads (variables outside, Python's random
    numbers, clocks) is read once; what it prints, it prints once. Arrays and floats may be others each time. Integers,
    booleans and arguments with the spec None are part of the program: with others the body runs again.

    Second derivatives from outside run the body, as without spmd.jit; so does every call within `spmd.debug` or a
    ledger, and on a GPU.

    f.text(): the programs so far, as Python. Raises JitError where the body decides by a value (`if`, float(x),
    x[mask]), or takes bare data (spmd.block); the body without spmd.jit may do so.
    """
    if isinstance(f, Jitted):
        return f
    if not isinstance(f, Mapped):
        inner = getattr(f, "__wrapped__", None)
        raise SpecError(
            message(
                "spmd.jit",
                argument="f",
                got=describe(f),
                need="a map: bodies are what is written down",
                mend="spmd.value_and_grad(spmd.jit(f)), and so for grad"
                if isinstance(inner, Mapped)
                else "spmd.jit(spmd.map(f, in_specs, out_specs)); a step of training may be one body",
            )
        )
    if not f.check:
        raise SpecError(
            message(
                "spmd.jit",
                argument="f",
                got=f"{f.where} with check=False, whose body has bare arrays",
                need="arrays that can be followed",
                mend="leave check=False out: what it saves is not done again",
            )
        )
    return Jitted(f.f, f.in_specs, f.out_specs, f.mesh, f.check)


class _Entry:
    """What is done again for arguments that lie alike.

    moving: the leaves of the arguments that may be others each time, None for those that are part of the programs.
    fixed: which ones are that whatever they are, as their specs are None.
    programs: by worker. treedef, layouts: of the results; None in place of a layout stands for an object.
    shapes: of the results' blocks, by worker.
    moved: the leaves that are differentiated. structures: of the arguments that are, with their numbers of leaves.
    back: the programs that go back, and the layouts of the gradients; results beyond the layouts are what they need.
    verifies, verifies_back: whether processes compare values at the end of such a call.
    """

    __slots__ = (
        *("back", "fixed", "layouts", "moved", "moving", "number", "programs", "shapes", "structures"),
        *("treedef", "verifies", "verifies_back"),
    )

    def __init__(self, number: int, moved: Sequence[int] = ()):
        self.number = number
        self.moved = moved
        self.moving: list[Leaf | None] = []
        self.fixed: list[bool] = []
        self.programs: dict[int, Built] = {}
        self.treedef: Any = None
        self.layouts: list[Any] = []
        self.shapes: dict[int, list[Any]] = {}
        self.structures: list[tuple[Any, int]] = []
        self.back: tuple[dict[int, Built], list[Any]] | None = None
        self.verifies = self.verifies_back = False


_WANTED: ContextVar[_Entry | None] = ContextVar("spmd_wanted", default=None)
"""The entry that the map which is called now is to fill."""


class Jitted(Mapped):
    """A map that is done again by its programs; see `spmd.jit`."""

    def __init__(self, f: Callable, in_specs: Any, out_specs: Any, mesh: Mesh | None, check: bool):
        super().__init__(f, in_specs, out_specs, mesh, check)
        self._entries: dict[Any, _Entry] = {}
        self._fixed: dict[Any, list[bool]] = {}
        self._made = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without its programs, which know how the workers of this process are reached: a copy makes its own."""
        return {**super().__getstate__(), "_entries": {}, "_fixed": {}, "_made": 0}

    def __repr__(self) -> str:
        return f"spmd.jit of {super().__repr__()}"

    def text(self) -> str:
        """The programs so far, as Python: those of the first worker that this process holds."""
        texts = []
        for key, entry in self._entries.items():
            steps = [(key[0], entry.programs), ("back", entry.back[0] if entry.back else {})]
            for kind, programs in steps:
                for worker, program in sorted(programs.items())[:1]:
                    texts.append(f"# {kind}, worker {worker}\n{program.text}")
        return "\n".join(texts)

    @api_boundary
    def __call__(self, *args, **kwargs) -> Any:
        flat, treedef = tree.flatten((args, kwargs), none_is_leaf=True)
        mesh = self._mesh(flat)
        if mesh is None:
            return super().__call__(*args, **kwargs)
        entry = self._entry("run", mesh, treedef, flat)
        if entry is None:
            return self._recorded("run", mesh, treedef, flat, (), lambda: super(Jitted, self).__call__(*args, **kwargs))
        results = self._again(entry, mesh, flat)
        return tree.unflatten(entry.treedef, _joined(mesh, results, entry.layouts))

    def __value_and_grad__(
        self, check: Callable[[Any], None], numbers: Sequence[int], args: tuple, kwargs: dict
    ) -> tuple[Any, list] | None:
        flat, treedef = tree.flatten((args, kwargs), none_is_leaf=True)
        mesh, way = self._mesh(flat), super().__value_and_grad__
        if mesh is None:
            return way(check, numbers, args, kwargs)
        kind = ("value and gradients", *numbers)
        entry = self._entry(kind, mesh, treedef, flat)
        if entry is None:
            of = [args[n] for n in numbers]
            return self._recorded(kind, mesh, treedef, flat, of, lambda: way(check, numbers, args, kwargs))
        results = self._again(entry, mesh, flat)
        value, *found = _joined(mesh, results, entry.layouts)
        for k, n in enumerate(entry.moved):
            if found[k].layout is not flat[n].layout:
                found[k] = settled_cotangent(found[k], flat[n])
        rest = iter(found)
        return value, [tree.unflatten(structure, islice(rest, count)) for structure, count in entry.structures]

    def _mesh(self, flat: list) -> Mesh | None:
        """The mesh, if the body need not run: where nobody looks at what it does."""
        if WORKER.get() is not None or LEDGERS.get() or FINITE.get() or WATCHING.get() or REPLICAS.get():
            return None
        if apply.looked_at or Array in map(type, flat):
            return None
        mesh = mesh_for(self.mesh, self.where)
        return mesh if mesh.places is None else None

    # What tells programs from each other

    def _key(self, kind: Any, mesh: Mesh, treedef: Any, flat: list) -> Any:
        """What of a call decides about its programs; None where nothing is known of such arguments."""
        fixed = self._fixed.get(treedef)
        if fixed is None:
            return None
        parts: list[Any] = []
        for x, part in zip(flat, fixed, strict=True):
            if type(x) is PartitionedArray:
                parts += (x.layout, x.dtype)
            elif part or not _moves(x):
                whole = part or x is None or isinstance(x, int)
                parts += (type(x), repr(x) if isinstance(x, float | complex) else x if whole else _as_array(x))
            else:
                parts += (type(x), getattr(x, "shape", None), getattr(x, "dtype", None))
        return (kind, mesh, treedef, *np.geterr().values(), *parts)

    def _entry(self, kind: Any, mesh: Mesh, treedef: Any, flat: list) -> _Entry | None:
        """The programs of such a call, if it is not the first."""
        try:
            return self._entries.get(self._key(kind, mesh, treedef, flat))
        except TypeError:
            self._check_fixed(flat, self._fixed[treedef])
            raise

    def _check_fixed(self, flat: list, fixed: list[bool]) -> None:
        """Raise where an argument is to be part of a program, and cannot be known again."""
        for x, part in zip(flat, fixed, strict=True):
            try:
                hash(x if part else None)
            except TypeError:
                raise JitError(
                    message(
                        f"spmd.jit of {self.where}",
                        argument="with the spec None",
                        got=describe(x),
                        need="an object that can be hashed: it is part of the program",
                        mend="a spec for arrays, P() for one value; a frozen dataclass, a tuple in place of a list",
                    )
                ) from None

    def _keep(self, entry: _Entry, kind: Any, mesh: Mesh, treedef: Any, flat: list) -> None:
        """From now on calls like this one are done by the programs."""
        self._fixed.setdefault(treedef, entry.fixed)
        bounded(self._entries)[self._key(kind, mesh, treedef, flat)] = entry
        self._made += 1
        if self._made == _MANY:
            warnings.warn(
                f"spmd.jit of {self.where} has run its body for {_MANY} kinds of arguments: shapes, or integers and "
                "other arguments that are part of the program, which change from call to call",
                stacklevel=_outside(),
            )

    # The first time

    def _recorded(
        self, kind: Any, mesh: Mesh, treedef: Any, flat: list, of: Sequence[Any], run: Callable[[], Any]
    ) -> Any:
        """A call in which the body runs, and its programs are written down."""
        entry = _Entry(self._made)
        token = _WANTED.set(entry)
        try:
            found = run()
        finally:
            _WANTED.reset(token)
        if entry.programs:  # else another way was taken
            entry.structures = [(to, len(xs)) for xs, to in (tree.flatten(x, none_is_leaf=True) for x in of)]
            self._keep(entry, kind, mesh, treedef, flat)
        return found

    def _done(
        self, mesh: Mesh, kind: tuple, leaves: list[Leaf], body: Callable[[Worker, list], BodyResults], tracked: bool
    ) -> MapResult:
        entry = _WANTED.get()
        if entry is None:
            return super()._done(mesh, kind, leaves, body, tracked)
        self._moving(entry, leaves)
        programs: dict[int, Built] = {}
        shapes: dict[int, list[Any]] = {}

        def recorded(worker: Worker, blocks: list) -> BodyResults:
            program = worker.record()
            made = body(worker, _inputs(program, blocks, entry.moving))
            self._check_objects(made)
            programs[worker.index] = program.built(made.blocks, self._name)
            found = _values(made)
            shapes[worker.index] = [getattr(x, "shape", None) for x in found]
            return made._replace(blocks=found)

        done = super()._done(mesh, ("first", *kind), leaves, recorded, tracked)
        entry.treedef, entry.verifies = done.treedef, done.compared
        entry.layouts, entry.shapes = _layouts(done.joined), shapes
        entry.moved, entry.programs = kind[1:], programs
        return done

    @property
    def _name(self) -> str:
        return getattr(self.f, "__name__", None) or type(self.f).__name__

    def _check_objects(self, made: BodyResults) -> None:
        """Raise where a result with the out_spec None is an object of its own: it would be the same each time."""
        for x, spec, path in zip(made.blocks, made.specs, made.paths, strict=True):
            if spec is None and not (is_slot(x) or _immutable(x)):
                raise JitError(
                    message(
                        f"spmd.jit of {self.where}",
                        argument=path,
                        got=f"{describe(x)}, with the out_spec None",
                        need="a number, a string, a dtype, or tuples of them: it would be this one object each time",
                        mend="a spec for arrays, P() for one value; make objects outside; or leave spmd.jit out",
                    )
                )

    def _moving(self, entry: _Entry, leaves: list[Leaf]) -> None:
        entry.fixed = [leaf.spec is None for leaf in leaves]
        self._check_fixed([leaf.value for leaf in leaves], entry.fixed)
        entry.moving = [
            leaf._replace(value=None) if leaf.spec is not None and _moves(leaf.value) else None for leaf in leaves
        ]

    # From then on

    def _again(self, entry: _Entry, mesh: Mesh, flat: list) -> dict[int, list]:
        """What the programs give of these leaves, by worker."""
        tables: list[Any] = []
        bare: list[tuple[str, MapArgument]] = []
        for leaf, x in zip(entry.moving, flat, strict=True):
            if leaf is None:
                continue
            assert leaf.spec is not None
            if self._laid_out(mesh, x, leaf.spec):
                tables.append(x.blocks)
            else:
                given = self._admitted(mesh, leaf._replace(value=x))
                laid = self._input(mesh, given)
                bare.append((leaf.path, laid))
                tables.append(dict.fromkeys(mesh.local_workers, given.value) if laid.blocks is None else laid.blocks)
        programs = entry.programs

        def body(worker: Worker) -> list:
            w = worker.index
            found = programs[w].run(worker.comm, [t[w] for t in tables])
            if [getattr(x, "shape", None) for x in found[: len(entry.layouts)]] != entry.shapes[w]:
                raise self._other_shapes(found, entry.shapes[w])
            return found

        outcome = self._execute(mesh, ("again", entry.number), body, tracked=True)
        if entry.verifies:
            self._compare(mesh, outcome, bare)
        return outcome.results

    def _compare(self, mesh: Mesh, outcome: Outcome, inputs: Sequence[tuple[str, MapArgument]]) -> None:
        """Processes compare what a program supposed to be one value, as at the end of a map."""
        if not outcome.replicas.distributed:
            return
        self._note_inputs(mesh, outcome, [path for path, _ in inputs], [x for _, x in inputs])
        shared = mesh.transport.share(dict.fromkeys(outcome.results, outcome.replicas.shared()))
        verify_shared(mesh, shared, outcome.replicas)

    def _other_shapes(self, found: list, shapes: list) -> JitError:
        """The error for results of other shapes than a program had. A backstop: what makes such is refused before."""
        k = next(k for k, shape in enumerate(shapes) if getattr(found[k], "shape", None) != shape)
        return JitError(
            message(
                f"spmd.jit of {self.where}",
                argument=f"result number {k}",
                got=describe(found[k]),
                need=f"shape {[*shapes[k]]}, as when the program was written down",
                mend="leave spmd.jit out: in this body the shapes of arrays depend on values",
            )
        )

    # Where something further out differentiates

    def _forward(self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, moved: list[int], once: bool):
        flat = [leaf.value for leaf in leaves]
        if self._mesh(flat) is None:
            return super()._forward(mesh, leaves, rebuild, moved, once)
        kind, structure = ("forward", once, *moved), getattr(rebuild, "args", len(leaves))
        entry = self._entry(kind, mesh, structure, flat)
        if entry is None:
            return self._first_forward(mesh, leaves, rebuild, moved, once, (kind, structure))
        results = self._again(entry, mesh, flat)
        count = len(entry.layouts)
        needed = {w: found[count:] for w, found in results.items()}
        outs = _joined(mesh, results, entry.layouts)
        del results

        def pull(gs: list) -> list:
            nonlocal needed
            if any(type(value) is Array for value in gs):
                return self._derivative(mesh, leaves, rebuild, moved, outs, gs)
            mine = needed
            if once:
                needed = {}
            return self._back(entry, mesh, leaves, outs, gs, mine, once)

        return entry.treedef, outs, pull

    def _back(
        self, entry: _Entry, mesh: Mesh, leaves: list[Leaf], outs: list, gs: list, needed: dict, once: bool
    ) -> list:
        """The gradients, by the programs that go back."""
        assert entry.back is not None
        programs, layouts = entry.back
        tables: list[Any] = [c.blocks for c in _cotangents(mesh, outs, gs)]

        def body(worker: Worker) -> list:
            w = worker.index
            mine = needed[w]
            given = [*mine, *(t[w] for t in tables)]
            if once:
                mine.clear()
            return programs[w].run(worker.comm, given)

        outcome = self._execute(mesh, ("back", entry.number), body, tracked=True)
        results = outcome.results
        if entry.verifies_back:
            self._compare(mesh, outcome, [])
        return [
            settled_cotangent(g, leaves[k].value)
            for g, k in zip(_joined(mesh, results, layouts), entry.moved, strict=True)
        ]

    def _first_forward(
        self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, moved: list[int], once: bool, key: tuple[Any, Any]
    ) -> tuple[Any, list, Callable]:
        """Forward, the body runs on a tape of every worker, and is written down; the first pullback goes on with it."""
        entry = _Entry(self._made, moved)
        self._moving(entry, leaves)
        written: dict[int, tuple[Program, BodyResults]] = {}
        given: dict[int, list[Any]] = {}
        tried: list[bool] = []

        def forward(worker: Worker, blocks: list) -> BodyResults:
            program = worker.record()
            made = self._vjp(worker, _inputs(program, blocks, entry.moving), rebuild, moved, once)
            self._check_objects(made)
            program.check()
            written[worker.index] = program, made
            given[worker.index] = [slot_of(value_of(b)) for b, leaf in zip(blocks, entry.moving, strict=True) if leaf]
            found = _values(made)
            entry.shapes[worker.index] = [getattr(x, "shape", None) for x in found]
            return made._replace(blocks=found, pull=None)

        entry.treedef, outs, entry.verifies = super()._done(mesh, ("first forward", *moved), leaves, forward, True)
        entry.layouts = _layouts(outs)

        def pull(gs: list) -> list:
            if any(type(value) is Array for value in gs):
                return self._derivative(mesh, leaves, rebuild, moved, outs, gs)
            if entry.back is None and tried:  # and failed, with its lines left behind
                return self._first_forward(mesh, leaves, rebuild, moved, once, key)[2](gs)
            if entry.back is None:
                tried.append(True)
                return first_back(gs)

            def again(worker: Worker) -> list:
                return entry.programs[worker.index].run(worker.comm, [*given[worker.index]])

            results = self._execute(mesh, ("again", entry.number), again, tracked=True).results
            needed = {w: found[len(outs) :] for w, found in results.items()}  # the tape has served
            return self._back(entry, mesh, leaves, outs, gs, needed, True)

        def first_back(gs: list) -> list:
            cotangents = _cotangents(mesh, outs, gs)
            back: dict[int, Built] = {}

            def backward(worker: Worker) -> BodyResults:
                program, made = written[worker.index]
                start, count = len(program.lines), len(program.inputs)
                worker.record(program)
                gs: list[Any] = [None] * len(outs)
                for k, c in zip(_arrays(outs), cotangents, strict=True):
                    gs[k] = Array(program.input(c.block(worker).value), c.state)
                assert made.pull is not None
                found = gradients(worker, [leaves[k] for k in moved], made.pull(gs))
                inputs = program.inputs[count:]
                needed = program.needed(start, inputs, found.blocks)
                back[worker.index] = program.built(
                    found.blocks, f"{self._name}, back", start=start, inputs=[*needed, *inputs]
                )
                entry.programs[worker.index] = program.built(
                    [*made.blocks, *map(Ref, needed)], self._name, stop=start, inputs=program.inputs[:count]
                )
                return found._replace(blocks=_values(found))

            outcome = self._execute(mesh, ("first back", *moved), backward, tracked=True)
            found = joined_leaves(self.where, mesh, outcome, self.check, self._turns)
            entry.verifies_back = outcome.replicas.any_noted
            written.clear()
            if once:
                given.clear()
            entry.back = back, _layouts(found)
            kind, structure = key
            self._keep(entry, kind, mesh, structure, [leaf.value for leaf in leaves])
            return [settled_cotangent(g, leaves[k].value) for g, k in zip(found, moved, strict=True)]

        return entry.treedef, outs, pull


def _arrays(outs: list) -> list[int]:
    """Which results are arrays that a cotangent may come of."""
    return [k for k, x in enumerate(outs) if type(x) is PartitionedArray and kind_of_dtype(x.dtype) in ("f", "c")]


def _cotangents(mesh: Mesh, outs: list, gs: list) -> list[MapArgument]:
    """The cotangents of the results that are arrays, laid out as they are; zeros where none came."""
    found = []
    for k in _arrays(outs):
        g = gs[k]
        if g is None:
            blocks = {w: np.zeros_like(b) for w, b in outs[k].blocks.items()}
            g = PartitionedArray(blocks, outs[k].layout, mesh)
        cotangent = cotangent_input(mesh, outs[k], g)
        assert cotangent is not None
        assert cotangent.blocks is not None
        found.append(cotangent)
    return found


def _inputs(program: Program, blocks: list, moving: list[Leaf | None]) -> list:
    """The blocks of a worker with what stands for them in a program; as they are where they are part of it."""
    return [
        b if leaf is None else Array(program.input(b.value), b.state) if type(b) is Array else program.input(b)
        for b, leaf in zip(blocks, moving, strict=True)
    ]


def _values(made: BodyResults) -> list:
    """The results in the place of what stands for them."""
    return [slot_of(b) if spec is None else sealed(slot_of(b)) for b, spec in zip(made.blocks, made.specs, strict=True)]


def _layouts(joined: list) -> list[Any]:
    return [x.layout if type(x) is PartitionedArray else None for x in joined]


def _joined(mesh: Mesh, results: dict[int, list], layouts: list[Any]) -> list:
    """The results of programs: arrays of these layouts, and objects."""
    joined, first = [], next(iter(results.values()))
    for k, layout in enumerate(layouts):
        if layout is None:
            joined.append(first[k])
        else:
            blocks = mesh.shared(layout, lambda w, k=k: sealed(results[w][k]))
            joined.append(PartitionedArray(blocks, layout, mesh))
    return joined


def _immutable(x: Any) -> bool:
    if isinstance(x, tuple):
        return all(map(_immutable, x))
    return x is None or isinstance(x, bool | int | float | complex | str | bytes | np.generic | np.dtype | type)


def _moves(x: Any) -> bool:
    """Whether an argument with a spec may be another one each time: an array, or a number that is no count."""
    return isinstance(x, float | complex) or hasattr(x, "dtype")


def _as_array(x: Any) -> Any:
    """What programs ask of an object that comes as an array, and has no dtype itself; of any other, which is refused,
    what tells it from the rest."""
    try:
        found = np.asarray(x)
    except Exception:
        return id(x)
    return found.shape, found.dtype


def _outside() -> int:
    """How many frames up the user's code is, for a warning."""
    frame, count = sys._getframe(1), 1
    user = caller(frame)
    while frame is not None and frame is not user:
        frame, count = frame.f_back, count + 1
    return count
