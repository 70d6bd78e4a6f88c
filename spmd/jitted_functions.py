"""spmd.jit of functions of global arrays: one program per worker for all that a function does.

The first call with arguments of given layouts runs the function on global arrays whose blocks are stand-ins
(`spmd.autodiff.staging.together`). All that is done with them, the maps behind NumPy's functions, relayouts, tapes of
gradients, becomes lines of the programs of the workers, in order. Later calls replay the programs, as those of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.signatures import Parameters, Result
from spmd.autodiff.staging.program import Ref
from spmd.autodiff.staging.recorder import is_slot, slot_of
from spmd.autodiff.staging.together import Together, at_worker, recorded_by
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import innermost, lower, on
from spmd.autodiff.transforms import joint, pullback_of, value_and_grad
from spmd.errors import JitError, MeshError, SpecError, describe
from spmd.jit_entry import JitEntry, is_immutable, is_variable, join_results, layouts_of, shapes_of
from spmd.jitted import Jitted
from spmd.layout import P
from spmd.map_arguments import cotangent_input, cotangent_layout
from spmd.mapping import Mapped
from spmd.mesh import Mesh, Worker, current_mesh
from spmd.spec_trees import Leaf
from spmd.tracebacks import api_boundary
from spmd.transport.handles import read_only

__all__ = ["JittedFunction", "jit"]


class JittedFunction(Jitted[Parameters, Result]):
    """A function of global arrays that replays its recorded programs; see `spmd.jit`."""

    _has_specs = False

    def __init__(self, f: Callable):
        super().__init__(f, None, None, None, True)
        self.where = self.arguments.where = self._name

    def __repr__(self) -> str:
        return f"spmd.jit of {self.where}"

    @api_boundary
    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        flat, treedef = tree.flatten((args, kwargs), none_is_leaf=True)
        mesh = self._replay_mesh(flat)
        if mesh is not None:
            return self._replayed("run", self.f, mesh, treedef, flat)
        tape = innermost(flat)
        below = [] if tape is None else [lower(x, tape) for x in flat]
        mesh = None if tape is None else self._replay_mesh(below)
        if tape is None or mesh is None:
            return self.f(*args, **kwargs)
        of = [k for k, x in enumerate(flat) if on(x, tape)]
        vjp = _FunctionVjp(self, mesh, treedef, below, of, tape.once)
        out_tree, outs = vjp.forward()
        return tree.unflatten(out_tree, joint(self.where, tape, [flat[k] for k in of], outs, vjp.pull))

    def __value_and_grad__(
        self, check: Callable[[Any], None], argnums: Sequence[int], args: tuple, kwargs: dict
    ) -> tuple[Any, list] | None:
        """What `spmd.value_and_grad` of this function calls first: the value and the gradients, by one program.

        None where there is none: an argument is traced from outside, or is not differentiable."""
        flat, treedef = tree.flatten((args, kwargs), none_is_leaf=True)
        mesh = self._replay_mesh(flat)
        selected = [x for n in argnums for x in tree.leaves(args[n])]
        if mesh is None or not all(map(_is_floating, selected)):
            return None
        numbers = tuple(argnums)
        both = value_and_grad(self.f, numbers)
        value, grads = self._replayed(("value and gradients", *numbers), both, mesh, treedef, flat)
        return value, list(grads)

    def _mesh_of(self, flat: list) -> Mesh:
        """The mesh of the first global array; without one that of the enclosing `with mesh:`."""
        for x in flat:
            if type(x) is PartitionedArray:
                return x.mesh
        mesh = current_mesh()
        if mesh is None:
            raise MeshError.at(
                f"spmd.jit of {self.where}",
                got="no global array among the arguments, and no enclosing `with mesh:`",
                need="a mesh whose workers run the program",
                mend="spmd.put(x, spec, mesh) for an argument; or with spmd.Mesh(x=4): ...",
            )
        return mesh

    def _which_static(self, treedef: Any, flat: list) -> list[bool]:
        return [type(x) is not PartitionedArray and not is_variable(x) for x in flat]

    _static_argument = "that is no array"
    _mend_of_static = "a frozen dataclass; spmd.tree.register(cls) for one that holds arrays"

    # Recording

    def _replayed(self, kind: Any, function: Callable, mesh: Mesh, treedef: Any, flat: list) -> Any:
        """function(*args, **kwargs) by programs, which the first call with such arguments records."""
        entry = self._entry(kind, mesh, treedef, flat)
        if entry is None:
            entry = JitEntry(self._recordings.count)
            results = self._recorded(entry, function, mesh, treedef, flat)
            self._keep(entry, kind, mesh, treedef, flat)
        else:
            results = self._replay(entry, mesh, flat)
        return tree.unflatten(entry.treedef, _given_away(join_results(mesh, results, entry.layouts)))

    def _recorded(self, entry: JitEntry, function: Callable, mesh: Mesh, treedef: Any, flat: list) -> dict[int, list]:
        """Run a function on stand-ins, and build the programs: the results by worker."""
        programs = Together(mesh, mesh.local_workers)
        args, kwargs = tree.unflatten(treedef, self._stand_ins(entry, programs, treedef, flat))
        with recorded_by(programs):
            out = function(*args, **kwargs)
        entry.treedef, outs = self._results(out, mesh)
        entry.layouts = layouts_of(outs)
        results = {}
        for w, program in programs.programs.items():
            blocks = _own_blocks(outs, w)
            entry.programs[w] = program.built(blocks, self._name)
            results[w] = [slot_of(b) for b in blocks]
            entry.shapes[w] = shapes_of(results[w])
        programs.check()
        return results

    def _stand_ins(self, entry: JitEntry, programs: Together, treedef: Any, flat: list) -> list:
        """What stands for the arguments while the function is recorded."""
        mesh = programs.mesh
        leaves, _ = self.arguments.bind(mesh, *tree.unflatten(treedef, flat))
        leaves = [leaf._replace(spec=_spec_of(leaf.value)) for leaf in leaves]
        self._classify(entry, leaves)
        # Bare data must be equal on all processes: it is compared at the end of each call.
        entry.verifies = len(mesh.local_workers) < mesh.size and any(type(leaf.spec) is P for leaf in leaves)
        return [self._stand_in(programs, leaf) for leaf in leaves]

    def _stand_in(self, programs: Together, leaf: Leaf) -> Any:
        """What stands for an argument while the function is recorded: for blocks those of a global array."""
        if leaf.spec is None:
            return leaf.value
        mesh, x = programs.mesh, leaf.value
        if type(x) is PartitionedArray and x.mesh != mesh:
            raise MeshError.at(
                f"spmd.jit of {self.where}",
                argument=leaf.path,
                got=f"an array on {x.mesh}",
                need=f"arrays on one mesh, {mesh}, as the first is",
                mend="spmd.put(x.numpy(), spec, mesh)",
            )
        laid = self.arguments.lay_out(mesh, self.arguments.admit(mesh, leaf))
        inputs = {
            w: program.input(laid.value if laid.blocks is None else laid.blocks[w])
            for w, program in programs.programs.items()
        }
        if type(leaf.value) is not PartitionedArray:
            return programs.joined(inputs)
        array = PartitionedArray(inputs, leaf.value.layout, mesh)
        array.compared = leaf.value.compared
        return array

    def _results(self, out: Any, mesh: Mesh) -> tuple[Any, list]:
        """The structure of a result, and its leaves, which programs can return."""
        paths, outs, structure = tree.flatten_with_path(out, none_is_leaf=True)
        return structure, [self._result(x, f"result{path}", mesh) for x, path in zip(outs, paths, strict=True)]

    def _result(self, x: Any, path: str, mesh: Mesh) -> Any:
        """A result, which programs can return: a global array, bare data, or an object that does not change."""
        if type(x) is PartitionedArray and x.mesh != mesh:
            raise JitError.at(
                f"spmd.jit of {self.where}",
                argument=path,
                got=f"an array on {x.mesh}",
                need=f"arrays on one mesh, {mesh}",
                mend="a function with spmd.jit for each mesh",
            )
        if type(x) is PartitionedArray or is_slot(x) or is_immutable(x):
            return x
        if type(x) is np.ndarray:
            return read_only(x.copy())
        traced = type(x) is Array
        raise JitError.at(
            f"spmd.jit of {self.where}",
            argument=path,
            got=describe(x),
            need="a result of the arguments alone"
            if traced
            else "arrays, numbers, strings, dtypes, or pytrees of them: it would be this one object each time",
            mend="pass the traced array that the function uses as an argument"
            if traced
            else "make objects outside; spmd.tree.register(cls) for a class that holds arrays",
        )


class _FunctionVjp:
    """A jitted function with its pullback: a program forward, and a program back.

    flat: the arguments. of: the differentiated ones, by position. once: whether the pullback serves one time.

    The first forward run is recorded, and the first pullback continues its recording, which is then split in two.
    """

    def __init__(self, jitted: JittedFunction, mesh: Mesh, treedef: Any, flat: list, of: list[int], once: bool):
        self.jitted, self.mesh, self.treedef, self.flat, self.of, self.once = jitted, mesh, treedef, flat, of, once
        self.kind = ("forward", once, *of)
        self.entry: Any = jitted._entry(self.kind, mesh, treedef, flat)
        self.outs: list[Any] = []
        self.saved: dict[int, list] | None = None
        """By worker the values of the forward run that the way back needs."""
        self.recording: tuple[Together, list, list[int], Callable] | None = None

    def forward(self) -> tuple[Any, list]:
        """The structure of the results, and the results."""
        if self.entry is None:
            self.entry = self._record()
        else:
            self._replay()
        return self.entry.treedef, self.outs

    def _replay(self) -> None:
        entry = self.entry
        results, count = self.jitted._replay(entry, self.mesh, self.flat), len(entry.layouts)
        self.saved = {w: values[count:] for w, values in results.items()}
        self.outs = _given_away(join_results(self.mesh, results, entry.layouts))

    def _traced(self, values: list, once: bool) -> tuple[Any, list, list[int], Callable]:
        """Run the function on a tape: the structure of its results, they, the positions of those that depend on the
        differentiated arguments, and the pullback of these."""

        def part(*moving: Any) -> tuple[list, tuple[Any, list, list[int]]]:
            full = list(values)
            for k, x in zip(self.of, moving, strict=True):
                full[k] = x
            args, kwargs = tree.unflatten(self.treedef, full)
            leaves, structure = tree.flatten(self.jitted.f(*args, **kwargs), none_is_leaf=True)
            places = [k for k, x in enumerate(leaves) if type(x) is Array]
            return [leaves[k] for k in places], (structure, leaves, places)

        moving = [values[k] for k in self.of]
        _, pullback, (structure, leaves, places) = pullback_of(part, moving, has_aux=True, once=once)
        return structure, leaves, places, pullback

    def _record(self) -> JitEntry:
        jitted, mesh, programs = self.jitted, self.mesh, Together(self.mesh, self.mesh.local_workers)
        entry = JitEntry(jitted._recordings.count, self.of)
        values = jitted._stand_ins(entry, programs, self.treedef, self.flat)
        with recorded_by(programs):
            structure, leaves, places, pullback = self._traced(values, self.once)
        entry.treedef, (_, outs) = structure, jitted._results(leaves, mesh)
        programs.check()
        entry.layouts = layouts_of(outs)
        results = {w: [slot_of(b) for b in _own_blocks(outs, w)] for w in programs.programs}
        entry.shapes = {w: shapes_of(values) for w, values in results.items()}
        self.outs = _given_away(join_results(mesh, results, entry.layouts))
        self.recording = programs, outs, places, pullback
        return entry

    def pull(self, gs: list) -> list:
        """The gradients of the differentiated arguments, given the cotangents of all results."""
        if any(type(g) is Array for g in gs):
            return self._unjitted(gs)
        if self.entry.back is not None:
            return self._back(gs)
        if self.recording is None:  # the first pullback failed
            return self._unjitted(gs)
        recording, self.recording = self.recording, None
        return self._first_back(gs, *recording)

    def _unjitted(self, gs: list) -> list:
        """The pullback by the function itself, which can be differentiated again."""
        _, leaves, places, pullback = self._traced(self.flat, False)
        return pullback([np.zeros_like(value_of(leaves[k])) if gs[k] is None else gs[k] for k in places])

    def _cotangents(self, gs: list, places: Sequence[int]) -> list[dict[int, Any]]:
        """The blocks of cotangents, laid out as the results are, by worker; zeros for missing ones."""
        tables = []
        for k in places:
            out, g = self.outs[k], gs[k]
            g = np.zeros_like(out) if g is None else g
            if type(out) is PartitionedArray:
                cotangent = cotangent_input(self.mesh, out, g)
                assert cotangent is not None
                assert cotangent.blocks is not None
                tables.append(cotangent.blocks)
            else:
                tables.append(dict.fromkeys(self.mesh.local_workers, np.asarray(g)))
        return tables

    def _first_back(self, gs: list, programs: Together, outs: list, places: list[int], pullback: Callable) -> list:
        entry, jitted, members = self.entry, self.jitted, programs.programs
        ends = {w: (len(p.lines), len(p.inputs)) for w, p in members.items()}
        cotangents = []
        for k, table in zip(places, self._cotangents(gs, places), strict=True):
            inputs = {w: p.input(table[w]) for w, p in members.items()}
            if type(outs[k]) is PartitionedArray:
                cotangents.append(PartitionedArray(inputs, cotangent_layout(outs[k].layout), self.mesh))
            else:
                cotangents.append(programs.joined(inputs))
        with recorded_by(programs):
            grads = pullback(cotangents)
        _, grads = jitted._results(list(grads), self.mesh)
        programs.check()
        back, results = {}, {}
        for w, p in members.items():
            start, count = ends[w]
            blocks, inputs = _own_blocks(grads, w), p.inputs[count:]
            needed = p.needed(start, inputs, blocks)
            back[w] = p.built(blocks, f"{jitted._name}, back", start=start, inputs=[*needed, *inputs])
            entry.programs[w] = p.built(
                [*_own_blocks(outs, w), *map(Ref, needed)], jitted._name, stop=start, inputs=p.inputs[:count]
            )
            results[w] = [slot_of(b) for b in blocks]
        entry.back, entry.places = (back, layouts_of(grads)), places
        jitted._keep(entry, self.kind, self.mesh, self.treedef, self.flat)
        return self._joined(results)

    def _joined(self, results: dict[int, list]) -> list:
        return _given_away(join_results(self.mesh, results, self.entry.back[1]))

    def _back(self, gs: list) -> list:
        """Replay the programs that go back."""
        if self.saved is None:
            self._replay()
        saved, entry = self.saved, self.entry
        assert saved is not None
        if self.once:
            self.saved = None
        tables = self._cotangents(gs, entry.places)

        def body(worker: Worker) -> list:
            w = worker.index
            return entry.back[0][w].run(worker.comm, [*saved[w], *(t[w] for t in tables)])

        return self._joined(self.jitted.execute(self.mesh, ("back", entry.number), body, tracked=True).results)


def _is_floating(x: Any) -> bool:
    return isinstance(x, float | complex) or kind_of_dtype(getattr(x, "dtype", None)) in ("f", "c")


def _own_blocks(outs: list, worker: int) -> list:
    """The results of a worker's program."""
    return [x.blocks[worker] if type(x) is PartitionedArray else at_worker(x, worker) for x in outs]


def _spec_of(x: Any) -> Any:
    """The layout of a global array; copies for other arrays and for numbers; None: x is part of the program."""
    return x.layout if type(x) is PartitionedArray else P() if is_variable(x) else None


def _given_away(results: list) -> list:
    """Results as the caller's own: bare arrays may be written to."""
    return [x.copy() if type(x) is np.ndarray and not x.flags.writeable else x for x in results]


@api_boundary
def jit(f: Callable[Parameters, Result]) -> Jitted[Parameters, Result]:
    """A map, or a function of global arrays, whose Python runs once: `spmd.jit(spmd.map(f, in_specs, out_specs))`.

    f: a map (`spmd.map`, `mesh.map`) with check=True, or a function of global arrays, bare data and numbers. The first
    call with arguments of given layouts and dtypes runs the body, or the function, and records its calls of NumPy, of
    kernels and of collectives, in one program per worker. The first `spmd.value_and_grad` or `spmd.grad` of it does
    the same, forward and back. Later calls replay the recorded program, with the same bits. They skip the Python of
    the body and of the library's checks, states and tapes, which takes most of the time on small arrays. A program
    frees memory as early as it can, and reuses buffers that nobody else sees.

    As in `jax.jit`, f is a pure function of its arguments. It reads anything else (variables outside, Python's random
    numbers, clocks) once, and prints once. Arrays and floats may change from call to call. Integers, booleans,
    arguments of maps with the spec None, and arguments of functions that are no arrays are part of the program: f runs
    again for other ones. A function runs on the mesh of its first global array, or that of the enclosing `with mesh:`.
    A map or function that is recorded in three calls in a row warns, with the argument that changes.

    Second derivatives from outside run the body, as without spmd.jit. So does every call inside `spmd.debug` or a
    ledger, and every call on a GPU.

    f.text(): the programs so far, as Python. Raises JitError if f decides by a value (`if`, float(x), x[mask]) or takes
    bare data (spmd.block, x.numpy()), MeshError for arrays on several meshes. Without spmd.jit f may do all that.

        >>> runs = []
        >>> def norm(x):
        ...     runs.append(spmd.worker_index("x"))
        ...     return np.sqrt(spmd.psum(np.sum(x**2), "x"))
        >>> with spmd.Mesh(x=2):
        ...     f = spmd.jit(spmd.map(norm, P("x"), P()))
        ...     [f(np.array([3.0, 4.0]) * k).item() for k in (1, 2, 3)], sorted(runs)
        ([5.0, 10.0, 15.0], [0, 1])
    """
    if isinstance(f, Jitted):
        return f
    if not callable(f):
        raise SpecError.at(
            "spmd.jit",
            argument="f",
            got=describe(f),
            need="a map, or a function of global arrays",
            mend="spmd.jit(f), and the arguments where it is called: spmd.jit(f)(x)",
        )
    if not isinstance(f, Mapped):
        return JittedFunction(f)
    if not f.check:
        raise f.unchecked_error("spmd.jit", "f")
    return Jitted(f.f, f.in_specs, f.out_specs, f.mesh, f.check)
