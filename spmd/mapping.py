"""spmd.map: a function on blocks becomes a function on global arrays, differentiable from outside.

A call takes four steps: arguments are laid out by in_specs (`_input`), every worker runs the body on its blocks
(`_execute`), its results are checked against out_specs (`_results`), and the blocks are joined to `PartitionedArray`s
(`_joined`). Where an argument is traced, every worker keeps a tape of its own between the forward
and the backward run, and the outer tape records one node for the whole map. `value_and_grad` and `grad` of a map itself
need no outer tape: every worker goes forward and back in one run (`__value_and_grad__`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from spmd import device as devices
from spmd.array import GIVEN_AWAY, PartitionedArray, closed_over, donated, owned, relayout
from spmd.autodiff import tracer, transforms, tree
from spmd.autodiff.admission import admit
from spmd.autodiff.dtypes import dtype_name, kind_of_dtype
from spmd.autodiff.primitive import primitive
from spmd.autodiff.program import is_slot, one_line
from spmd.autodiff.rooms import writable
from spmd.autodiff.tape import suspended
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.watch import FINITE
from spmd.device import contiguous, on_device
from spmd.errors import (
    LayoutError,
    MeshError,
    SpecError,
    StateError,
    all_of,
    axes_of,
    describe,
    message,
    nearest,
    one_or_all,
)
from spmd.frontends import frontend
from spmd.layout import Layout, P, Spec
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.base import Join, bounded, outside, sealed, vary
from spmd.operators.root import Rooted, laid_out
from spmd.placing import cut, mesh_for, put
from spmd.replicas import (
    OTHER,
    ROUNDING,
    SAME,
    Record,
    Replicas,
    alike,
    compared,
    digest,
    next_turn,
    note_closure,
    object_record,
    relation,
    report,
    rests,
    settle,
    sketch,
    taken,
)
from spmd.scheduling import Trial
from spmd.specs import Leaf, shown, spec_leaves, spread
from spmd.state import State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.base import ONE_BY_ONE, Call, Outcome

__all__ = ["Mapped", "map"]

_NUMBERS = (bool, int, float, complex)
_MISSING: Any = object()
_RESULT = "an array of numbers, or a number"
_AS_IT_IS = "the out_spec None lets any object pass that is equal on all workers"


@overload
def map(
    f: None = None, in_specs: Any = ..., out_specs: Any = ..., *, mesh: Mesh | None = ..., check: bool = ...
) -> Callable[[Callable], Mapped]: ...


@overload
def map(
    f: Callable, in_specs: Any = ..., out_specs: Any = ..., *, mesh: Mesh | None = ..., check: bool = ...
) -> Mapped: ...


@api_boundary
def map(
    f: Callable | None = None,
    in_specs: Any = _MISSING,
    out_specs: Any = _MISSING,
    *,
    mesh: Mesh | None = None,
    check: bool = True,
) -> Any:
    """A function on global arrays that runs `f` on the block of every worker.

    f: the body: plain NumPy on this worker's blocks, and collectives (`spmd.psum(x, "data")`). A pure function of its
    arguments.
    in_specs: for each argument how it is laid out on the mesh: `P("x", None)` splits dimension 0 over axis x,
    `P()` gives every worker a copy, None passes the argument as it is; a `Layout` gives the blocks it says, uneven
    ones or those of a grid on some of the workers. A tuple, one entry per positional argument, or a dict by name, or
    one spec for all; each entry may stand for a whole pytree (a prefix).
    out_specs: the same for the result. Along axes that a spec does not name the result must be Invariant. A Rooted
    result leaves by a layout that gives all of it to its root.
    mesh: by default that of the enclosing `with mesh:`, looked up at the call.
    check: bodies see arrays that carry their state, and what is promised Invariant is verified. With check=False and
    nothing differentiated a body sees bare read-only arrays, and a result promised Invariant is worker 0's. On a GPU
    they are CuPy's, which take no constants of the host: `np.asarray(c, like=x)` moves one beside x.

    The mapped function takes NumPy arrays, Python numbers and `PartitionedArray`s, and gives `PartitionedArray`s. It
    can be differentiated from outside; a gradient has the layout of its argument. Without f it is a decorator:
    `@spmd.map(in_specs=..., out_specs=...)`. As `jax.shard_map`.

    Raises SpecError, LayoutError or StateError that name the argument or result by its path; MeshError without mesh.
    """
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        if specs is _MISSING:
            raise SpecError(
                message(
                    "spmd.map",
                    argument=name,
                    got="nothing",
                    need="a spec, or a pytree of specs",
                    mend=f'{name}=P() for replicated, P("x") for split over axis x',
                )
            )
    if f is not None and not callable(f):
        raise SpecError(
            message(
                "spmd.map",
                argument="f",
                got=describe(f),
                need="a function",
                mend="spmd.map(f, in_specs, out_specs); as a decorator @spmd.map(in_specs=..., out_specs=...)",
            )
        )
    if f is None:
        return lambda body: Mapped(body, in_specs, out_specs, mesh, check)
    return Mapped(f, in_specs, out_specs, mesh, check)


@api_boundary
def _on_mesh(
    self: Mesh, f: Callable | None = None, in_specs: Any = _MISSING, out_specs: Any = _MISSING, *, check: bool = True
):
    """`spmd.map` on this mesh."""
    return map(f, in_specs, out_specs, mesh=self, check=check)


Mesh.map = _on_mesh  # type: ignore[method-assign]


class Mapped:
    """A body with its specs; see `spmd.map`."""

    def __init__(self, f: Callable, in_specs: Any, out_specs: Any, mesh: Mesh | None, check: bool):
        self.f = f
        self.in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
        self.out_specs = out_specs
        self.mesh = mesh
        self.check = check
        self._names = _parameter_names(f)
        self._trials: dict[Any, Trial] = {}
        self._turns: dict[Any, int] = {}
        self._as_specified: dict[tuple[int, int], tuple[bool, Layout, Spec]] = {}
        functools.update_wrapper(self, f, updated=())  # not what f keeps: that of a map would be taken for this one's
        self.where = f"spmd.map of {getattr(f, '__name__', None) or type(f).__name__}"
        for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
            for path, spec in spec_leaves(specs):
                if spec is not None and not isinstance(spec, Spec):
                    raise SpecError(
                        message(
                            self.where,
                            argument=name + path,
                            got=describe(spec),
                            need="P(...), a Layout, None, or a pytree of them",
                            mend='P("x") splits dimension 0 over axis x; P() replicates',
                        )
                    )

    def __getstate__(self) -> dict[str, Any]:
        """Without what is known by the ids of this process."""
        return {**self.__dict__, "_as_specified": {}}

    def __repr__(self) -> str:
        return f"{self.where} ({self.in_specs} -> {self.out_specs})"

    @api_boundary
    def __call__(self, *args, **kwargs) -> Any:
        if WORKER.get() is not None:
            raise MeshError(
                message(
                    self.where,
                    got="a map that is called inside a body",
                    need="maps that are called from outside",
                    mend="call the function itself: in a body it already has its blocks; in the handler of a signal "
                    "that interrupts a body, contextvars.Context().run(f, x)",
                )
            )
        mesh = mesh_for(self.mesh, self.where)
        leaves, rebuild = self._arguments(mesh, args, kwargs)
        tape = transforms.innermost([leaf.value for leaf in leaves if leaf.spec is not None])
        if tape is None:
            return self._run(mesh, leaves, rebuild)
        return self._differentiated(mesh, leaves, rebuild, tape)

    # Arguments

    def _arguments(self, mesh: Mesh, args: tuple, kwargs: dict) -> tuple[list[Leaf], Callable[[Sequence], tuple]]:
        """The arguments as leaves with their specs, and what makes (args, kwargs) of new leaves."""
        named = self._named(args, kwargs)
        leaves: list[Leaf] = []
        for name, spec, value in named:
            leaves += spread(self.where, name, "in_specs", spec, value)
        for k, leaf in enumerate(leaves):
            if leaf.spec is not None and leaf.value is not None and not self._laid_out(mesh, leaf.value, leaf.spec):
                leaves[k] = self._admitted(mesh, leaf)
        if not kwargs and [id(x.value) for x in leaves] == [id(a) for a in args]:
            return leaves, _positional
        _, treedef = tree.flatten((args, kwargs), none_is_leaf=True)
        return leaves, functools.partial(tree.unflatten, treedef)

    def _named(self, args: tuple, kwargs: dict) -> list[tuple[str, Any, Any]]:
        """(name in f's signature, spec, value) for each argument, positional ones first, keywords by sorted name."""
        specs = self.in_specs
        names = self._names
        if not kwargs and type(specs) is tuple and len(specs) == len(args) <= len(names):
            return list(zip(names, specs, args, strict=False))
        positional = [names[k] if k < len(names) else f"args[{k}]" for k in range(len(args))]
        keywords = sorted(kwargs)
        if isinstance(specs, dict):
            missing = [n for n in (*positional, *keywords) if n not in specs]
            if missing:
                raise self._no_spec(missing[0], f"specs for {', '.join(repr(n) for n in specs)}")
            if len(specs) > len(positional) + len(keywords):
                self._no_surplus({*positional, *keywords})
            chosen = [specs[n] for n in (*positional, *keywords)]
        elif isinstance(specs, tuple):
            places = [*range(len(args)), *(names.index(n) if n in names else len(specs) for n in keywords)]
            if len(args) > len(specs):
                raise SpecError(
                    message(
                        self.where,
                        argument="in_specs",
                        got=f"{len(specs)} spec{'s' * (len(specs) != 1)} for {len(args)} arguments",
                        need="one entry per argument",
                        mend="give each argument a spec, None for one that is passed as it is",
                    )
                )
            if len(specs) > len(args) + len(kwargs):
                self._no_surplus(set())
            for n, k in zip((*positional, *keywords), places, strict=True):
                if k >= len(specs):
                    raise self._no_spec(n, f"{len(specs)} spec{'s' * (len(specs) != 1)}, all for positional arguments")
            chosen = [specs[k] for k in places]
        else:
            chosen = [specs] * (len(args) + len(kwargs))
        values = [*args, *(kwargs[n] for n in keywords)]
        return list(zip((*positional, *keywords), chosen, values, strict=True))

    def _no_spec(self, name: str, got: str) -> SpecError:
        return SpecError(
            message(
                self.where,
                argument=f"in_specs, for {name!r}",
                got=got,
                need="a spec for every argument",
                mend=f"in_specs as a dict by name: {{{name!r}: P(), ...}}",
            )
        )

    def _no_surplus(self, given: set[str]) -> None:
        """Raise where in_specs hold specs for arguments that f does not have."""
        specs = self.in_specs
        try:
            parameters = inspect.signature(self.f, follow_wrapped=False).parameters
        except (TypeError, ValueError):
            return
        kinds = {p.kind for p in parameters.values()}
        if isinstance(specs, dict):
            unknown = [n for n in specs if n not in given and n not in parameters]
            if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
                close = nearest(str(unknown[0]), parameters, 1)
                raise SpecError(
                    message(
                        self.where,
                        argument="in_specs",
                        got=f"a spec for {unknown[0]!r}",
                        need=f"names of arguments: {', '.join(repr(n) for n in parameters)}",
                        mend=f"write {close[0]!r}"
                        if close
                        else "a dict is by name; for one argument that is itself a dict write in_specs=({...},)",
                    )
                )
        elif inspect.Parameter.VAR_POSITIONAL not in kinds:
            places = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            if len(specs) > len(places):
                raise SpecError(
                    message(
                        self.where,
                        argument="in_specs",
                        got=f"{len(specs)} specs for {len(places)} argument{'s' * (len(places) != 1)}",
                        need="one entry per argument",
                        mend="leave out the rest; for one argument that is itself a tuple write in_specs=((P(), ...),)",
                    )
                )

    def _laid_out(self, mesh: Mesh, x: Any, spec: Spec) -> bool:
        """Whether an argument lies on this mesh as its spec says. So do most, and the same each time: what has been
        found of a layout and a spec, these two objects, is kept."""
        if type(x) is not PartitionedArray or x.mesh is not mesh or x.blocks is GIVEN_AWAY:
            return False
        layout = x.layout
        known = self._as_specified.get((id(layout), id(spec)))
        if known is None:
            fits = (
                layout.spec is not None
                and isinstance(spec, P)
                and set(spec.axes) <= set(mesh.axes)
                and len(spec.dims) <= len(layout.shape)
                and layout == mesh.layout(layout.shape, spec)
            )
            known = bounded(self._as_specified)[id(layout), id(spec)] = fits, layout, spec  # which thus keep their ids
        return known[0]

    def _admitted(self, mesh: Mesh, leaf: Leaf) -> Leaf:
        """An argument as an array, or a number. Raises where it is neither, or does not fit its spec."""
        x: Any = value_of(leaf.value)
        assert leaf.spec is not None
        if isinstance(x, PartitionedArray) and x.blocks is GIVEN_AWAY:
            raise donated(self.where, leaf.path)
        x = devices.home(self.where, leaf.path, x, mesh.device)
        if type(x) not in _NUMBERS and not on_device(x):
            need, otherwise = "an array, a number, or a PartitionedArray", "the spec None to pass it as it is"
            x = admit(x, self.where, leaf.path, error=SpecError, need=need, otherwise=otherwise)
        if type(leaf.value) is not Array:
            leaf = leaf._replace(value=x)
        assert leaf.spec is not None
        shape = getattr(x, "shape", ())
        leaf.spec.check(mesh.axes, self.where, leaf.path, len(shape))
        mesh.layout(shape, leaf.spec, self.where, leaf.path)
        if isinstance(x, PartitionedArray) and x.mesh != mesh:
            raise MeshError(
                message(
                    self.where,
                    argument=leaf.path,
                    got=f"an array on {x.mesh} ({x.mesh.transport.name}{_device_of(x.mesh)})",
                    need=f"an array on {mesh} ({mesh.transport.name}{_device_of(mesh)})",
                    mend="spmd.put(x.numpy(), spec, mesh), or x.numpy()",
                )
            )
        return leaf

    def _input(self, mesh: Mesh, leaf: Leaf) -> _Input:
        """An argument laid out by its spec."""
        x, spec = leaf.value, leaf.spec
        if spec is None:
            return _Input(x)
        if type(x) in _NUMBERS and isinstance(spec, P):
            return _Input(x, number=True)
        if self._laid_out(mesh, x, spec):
            return _Input(x, x.blocks, spec)
        if not isinstance(x, PartitionedArray):
            data = x if hasattr(x, "dtype") else np.asarray(x)
            return _Input(x, cut(data, mesh.layout(data.shape, spec), mesh), spec)
        return _Input(x, relayout(x, mesh.layout(x.shape, spec)).blocks, spec)

    # Running

    def _run(self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable):
        """The map of arguments that are not traced."""

        def body(worker: Worker, blocks: list):
            args, kwargs = rebuild(blocks)
            return self._results(worker, self.f(*args, **kwargs))

        done = self._done(mesh, ("run",), leaves, body, self.check)
        return tree.unflatten(done.treedef, done.joined)

    def _execute(self, mesh: Mesh, key: Any, body: Callable[[Worker], Any], *, tracked: bool) -> Outcome:
        """Run on all workers, with the scheduler that suits this map on these shapes."""
        number = next_turn(self._turns, key)
        if mesh.scheduler == "threads" or mesh.transport.name != "local":
            with suspended():
                return mesh.run(body, tracked=tracked, number=number)
        trial = self._trials.get((mesh, key))
        if trial is None:
            trial = self._trials[mesh, key] = Trial()
        scheduler = trial.next if mesh.scheduler == "auto" else "lockstep"
        in_turns = scheduler == "lockstep"
        with suspended():
            how = ONE_BY_ONE if in_turns and trial.quiet else scheduler
            outcome = mesh.run(body, tracked=tracked, scheduler=how, number=number)
        if in_turns:
            trial.quiet = outcome.switches == 0
        if mesh.scheduler == "auto" and trial.chosen is None:
            trial.learn(scheduler, outcome, mesh)
            if trial.chosen is not None:
                mesh.chosen[f"{key[0]} of {self.where}"] = trial.chosen
        return outcome

    def _note_inputs(self, mesh: Mesh, outcome: Outcome, paths: Sequence[str], inputs: Sequence[_Input]) -> None:
        """Note what this process, one of several, passed of its own, for the comparison at the end of the map: bare
        arguments, and arrays that the body closes over."""
        if not (outcome.replicas.alone and self.check and mesh.checks):
            return
        for path, x in zip(paths, inputs, strict=True):
            x.note(mesh, outcome.replicas, self.where, path, self._turns)
        note_closure(mesh, outcome.replicas, self.where, self.f, self._turns)

    def _returned(self, out) -> tuple[list[Leaf], Any]:
        """What a body returned, as leaves with their specs, and its structure."""
        if out is None and self.out_specs is not None:
            raise StateError(
                message(
                    self.where,
                    argument="result",
                    got="None",
                    need=f"what out_specs promise: {self.out_specs}",
                    mend="end the body with a return; out_specs=None if it has no result",
                )
            )
        leaves = [
            leaf._replace(value=laid_out(leaf.value, leaf.spec, self.where, leaf.path))
            if type(leaf.value) is Rooted and isinstance(leaf.spec, Layout)
            else leaf
            for leaf in spread(self.where, "result", "out_specs", self.out_specs, out)
        ]
        return leaves, tree.structure(out, none_is_leaf=True)

    def _results(self, worker: Worker, out) -> _Results:
        """What a body returned, leaf by leaf, checked against out_specs."""
        leaves, treedef = self._returned(out)
        blocks = [self._result(worker, leaf) if leaf.spec is not None else self._object(leaf) for leaf in leaves]
        return _Results(treedef, [leaf.path for leaf in leaves], [leaf.spec for leaf in leaves], blocks)

    def _result(self, worker: Worker, leaf: Leaf):
        """One result as a block: bare, C-contiguous, read-only, Invariant where it was promised to be."""
        x, spec = leaf.value, leaf.spec
        assert spec is not None
        if type(x) is Array:
            x = self._stated(worker, leaf, x)
            block = self._admitted_result(leaf, _block(value_of(x)))
        elif is_slot(x):
            block = one_line(np.asarray, (x,))
        elif on_device(x):
            block = x.copy(order="C")  # whoever has it may write to it
        elif type(x) in (PartitionedArray, Rooted) or frontend(x) is not None:
            raise self._bad_result(leaf)
        elif isinstance(x, np.generic | int | float | complex):
            block = sealed(self._admitted_result(leaf, x))
        else:
            bare = self._admitted_result(leaf, x)
            block = owned(bare) if writable(bare) else np.asarray(bare, order="C")
        spec.check(worker.mesh.axes, self.where, leaf.path, block.ndim)
        if worker.mesh.places is not None:
            block = worker.mesh.places.moved(block, worker.index)
        copies = tuple(n for n in worker.mesh.axes if n not in spec.varying)
        if not worker.tracked and copies and worker.group(copies).size > 1:
            call = Call("spmd.map, check=False", copies, block.dtype, block.shape, detail=leaf.path, alike=True)
            group = worker.group(copies)
            block = worker.comm.broadcast(group, call, block if group.index == 0 else None, 0).wait()
        return block

    def _stated(self, worker: Worker, leaf: Leaf, x: Array) -> Array:
        """A result in the state that its spec says, or an error where it is promised more."""
        if x.state is None:
            raise outside(self.where, x, leaf.path)
        return vary(x, self._promised(worker, leaf, x.ndim, x.state))

    def _promised(self, worker: Worker, leaf: Leaf, ndim: int, state: State) -> State:
        """The state of a result as its spec says, given the one it has, or an error where it is promised more."""
        spec = leaf.spec
        assert spec is not None
        spec.check(worker.mesh.axes, self.where, leaf.path, ndim)
        extra = [n for n in worker.mesh.axes if n in state.varying and n not in spec.varying]
        if extra:
            axes = one_or_all(extra)
            raise StateError(
                message(
                    self.where,
                    argument=leaf.path,
                    got=f"{describe(leaf.value)}, promised by out_specs {spec} to be Invariant along {all_of(extra)}",
                    need=f"one value along {axes_of(extra)}",
                    mend=f"spmd.psum(x, {axes}), spmd.mean(x, {axes}) or spmd.all_gather(x, {axes}, "
                    f'to="invariant") make it so; or name {all_of(extra)} in out_specs to keep a block per worker',
                )
            )
        return state_of(state.varying | spec.varying)

    def _object(self, leaf: Leaf):
        """A result with the out_spec None, which passes as it is; of arrays, those that are one value."""
        x = leaf.value
        if type(x) is Array and x.tape is None and x.state is not None and not x.state.varying:
            return x.value
        if type(x) in (Array, Rooted):
            raise StateError(
                message(
                    self.where,
                    argument=leaf.path,
                    got=f"{describe(x)}, with the out_spec None",
                    need="an object that is equal on all workers and has no gradient",
                    mend="give it a spec: P() for one value, P(axis) for a block per worker",
                )
            )
        return x

    def _admitted_result(self, leaf: Leaf, x: Any) -> Any:
        if on_device(x) or (type(x) is np.ndarray and x.dtype.kind in "fciub"):
            return x
        return admit(x, self.where, leaf.path, need=_RESULT, otherwise=_AS_IT_IS)

    def _bad_result(self, leaf: Leaf) -> Exception:
        """The error for an array of this library, or of a frontend, that a body of NumPy cannot give."""
        x = leaf.value
        if type(x) is PartitionedArray:
            return closed_over(self.where, x, leaf.path)
        if type(x) is Rooted:
            mend = (
                "spmd.replicate(x, axis_name) for one value known to all, spmd.broadcast(x, axis_name) for a block "
                "each; or a Layout in out_specs that gives it to its root"
            )
        else:
            mend = "arrays of NumPy: np.asarray(x) of what has no gradient and no state, or a map of that library; "
            mend += _AS_IT_IS
        return StateError(message(self.where, argument=leaf.path, got=describe(x), need=_RESULT, mend=mend))

    # Differentiation from outside

    def _differentiated(self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, tape):
        """The map of arguments of which some are traced: one node on the innermost tape."""
        moved = [k for k, x in enumerate(leaves) if x.spec is not None and _on(x.value, tape)]
        lowered = [x._replace(value=transforms.lower(x.value, tape)) for x in leaves]
        if transforms.innermost([x.value for x in lowered]) is None:
            out_tree, outs, pull = self._forward(mesh, lowered, rebuild, moved, tape.once)
        else:
            # An outer tape watches too: run on what lies below, and differentiate the derivative as a map of its own.
            args, kwargs = rebuild([x.value for x in lowered])
            outs, out_tree = tree.flatten(self(*args, **kwargs), none_is_leaf=True)
            pull = functools.partial(self._derivative, mesh, lowered, rebuild, moved, outs)
        parents = [leaves[k].value for k in moved]
        return tree.unflatten(out_tree, transforms.joint(self.where, tape, parents, outs, pull))

    def _forward(self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, moved: list[int], once: bool):
        """Run forward, every worker on a tape of its own; the results and a pullback that runs the tapes back."""
        inputs = [self._input(mesh, leaf) for leaf in leaves]

        def body(worker: Worker):
            blocks = [x.block(worker) for x in inputs]
            return self._vjp(worker, blocks, rebuild, moved, once)

        kind = (*(x.kind for x in inputs), *moved)
        outcome = self._execute(mesh, ("forward", *kind), body, tracked=True)
        pulls = {w: result.pull for w, result in outcome.results.items()}
        self._note_inputs(mesh, outcome, [x.path for x in leaves], inputs)
        out_tree = _one_structure(self.where, mesh, outcome)
        outs = _joined_leaves(self.where, mesh, outcome, self.check, self._turns)

        def pull(gs):
            if any(type(value) is Array for value in gs):
                return self._derivative(mesh, leaves, rebuild, moved, outs, gs)
            cotangents = [_cotangent(mesh, o, g) for o, g in zip(outs, gs, strict=True)]

            def backward(worker: Worker):
                given = [None if c is None else c.block(worker) for c in cotangents]
                return _gradients(worker, [leaves[k] for k in moved], pulls[worker.index](given))

            outcome = self._execute(mesh, ("backward", *kind), backward, tracked=True)
            given = [(f"the cotangent of result {k}", c) for k, c in enumerate(cotangents) if c is not None]
            self._note_inputs(mesh, outcome, [path for path, _ in given], [c for _, c in given])
            found = _joined_leaves(self.where, mesh, outcome, self.check, self._turns)
            return [_settled(g, leaves[k].value) for g, k in zip(found, moved, strict=True)]

        return out_tree, outs, pull

    def __value_and_grad__(
        self, check: Callable[[Any], None], numbers: Sequence[int], args: tuple, kwargs: dict
    ) -> tuple[Any, list] | None:
        """The value, and the gradients of these arguments, by one run in which every worker goes forward and back.

        check: raises where a result has no gradient. None where two runs are the way: where an argument lies on no mesh
        or is traced from outside, where the result is a tree, or where somebody looks for what is not finite.
        """
        if type(self.out_specs) is not P or WORKER.get() is not None or FINITE.get():
            return None
        flat, structures = zip(*(tree.flatten(x, none_is_leaf=True) for x in args), strict=True)
        of = [x for n in numbers for x in flat[n]]
        if not of or not all(type(x) is PartitionedArray and kind_of_dtype(x.dtype) in ("f", "c") for x in of):
            return None
        mesh = mesh_for(self.mesh, self.where)
        leaves, rebuild = self._arguments(mesh, args, kwargs)
        ends = [0, *itertools.accumulate(len(xs) for xs in flat)]
        moved = [k for n in numbers for k in range(ends[n], ends[n + 1])]
        if any(type(x.value) is Array for x in leaves) or any(leaves[k].spec is None for k in moved):
            return None
        value, *found = self._there_and_back(mesh, leaves, rebuild, moved, check)
        settled = iter([_settled(g, leaves[k].value) for g, k in zip(found, moved, strict=True)])
        return value, [tree.unflatten(structures[n], itertools.islice(settled, len(flat[n]))) for n in numbers]

    def _there_and_back(
        self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, moved: list[int], check: Callable[[Any], None]
    ) -> list:
        """The value, and the gradients of the leaves at `moved`."""

        def body(worker: Worker, blocks: list):
            forward = self._vjp(worker, blocks, rebuild, moved, True)
            check(tree.unflatten(forward.treedef, forward.blocks))
            assert forward.pull is not None
            one = Array(transforms.one_like(forward.blocks[0]), state_of(()))
            back = _gradients(worker, [leaves[k] for k in moved], forward.pull([one]))
            return _Results(
                forward.treedef, forward.paths + back.paths, forward.specs + back.specs, forward.blocks + back.blocks
            )

        return self._done(mesh, ("gradient", *moved), leaves, body, True).joined

    def _done(
        self, mesh: Mesh, kind: tuple, leaves: list[Leaf], body: Callable[[Worker, list], _Results], tracked: bool
    ) -> _Done:
        """Run a body on every worker's blocks of the leaves."""
        inputs = [self._input(mesh, leaf) for leaf in leaves]

        def on_worker(worker: Worker):
            return body(worker, [x.block(worker) for x in inputs])

        outcome = self._execute(mesh, (*kind, *(x.kind for x in inputs)), on_worker, tracked=tracked)
        self._note_inputs(mesh, outcome, [x.path for x in leaves], inputs)
        treedef = _one_structure(self.where, mesh, outcome)
        joined = _joined_leaves(self.where, mesh, outcome, self.check, self._turns)
        return _Done(treedef, joined, outcome.replicas.anywhere)

    def _vjp(self, worker: Worker, blocks: list, rebuild: Callable, moved: list[int], once: bool) -> _Results:
        """One worker's forward run on its tape: its results, and their pullback to the blocks at `moved`."""

        def part(*xs):
            full = list(blocks)
            for k, x in zip(moved, xs, strict=True):
                full[k] = x
            args, kwargs = rebuild(full)
            out = self.f(*args, **kwargs)
            found, treedef = self._returned(out)
            stated = [
                self._object(leaf)
                if leaf.spec is None
                else self._stated(worker, leaf, leaf.value)
                if type(leaf.value) is Array
                else leaf.value
                for leaf in found
            ]
            return [x for x in stated if _differentiable(x)], (treedef, found, stated)

        moving = [blocks[k] for k in moved]
        values, pullback, (treedef, found, stated) = transforms.pullback_of(part, moving, has_aux=True, once=once)
        traced = iter(values)
        final = [next(traced) if _differentiable(x) else x for x in stated]
        results = [
            self._result(worker, leaf._replace(value=x)) if leaf.spec is not None else x
            for leaf, x in zip(found, final, strict=True)
        ]
        places = [k for k, x in enumerate(stated) if _differentiable(x)]

        def pull(given: list):
            cotangent = [
                Array(np.zeros_like(results[k]), state_of(found[k].spec.varying)) if given[k] is None else given[k]
                for k in places
            ]
            return pullback(cotangent)

        return _Results(treedef, [x.path for x in found], [x.spec for x in found], results, pull)

    def _derivative(self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, moved: list[int], outs: list, gs: list):
        """The pullback as a map of the arguments and the cotangents, to be differentiated again."""
        places = [k for k, g in enumerate(gs) if g is not None]
        cotangents = {k: gs[k] for k in places}

        def body(arguments: list, given: dict):
            pull = self._vjp(_worker(), list(arguments), rebuild, moved, False).pull
            assert pull is not None
            return pull([given.get(k) for k in range(len(outs))])

        out_specs = [_layout_of(o) for o in outs]  # cotangents have the blocks of their results
        derivative = Mapped(
            body,
            ([x.spec for x in leaves], {k: out_specs[k] for k in places}),
            tuple(leaves[k].spec for k in moved),
            mesh,
            self.check,
        )
        found = derivative([x.value for x in leaves], cotangents)
        return [_settled(g, leaves[k].value) for g, k in zip(found, moved, strict=True)]


def _gradients(worker: Worker, of: list[Leaf], found: Sequence[Any]) -> _Results:
    """The gradients of arguments on one worker, as what a body returns."""
    blocks = [_block(value_of(g)) for g in found]
    if worker.mesh.places is not None:
        blocks = [worker.mesh.places.moved(b, worker.index) for b in blocks]
    return _Results(None, [f"the gradient of {x.path}" for x in of], [x.spec for x in of], blocks)


def _block(x: Any) -> Any:
    """What is computed, as a block."""
    return sealed(contiguous(x))


def _device_of(mesh: Mesh) -> str:
    return "" if mesh.device == "cpu" else f", {mesh.device}"


class _Results(NamedTuple):
    """What one worker's body returned: blocks, or any objects where the spec is None."""

    treedef: Any
    paths: list[str]
    specs: list[Spec | None]
    blocks: list[Any]
    pull: Callable | None = None


class _Done(NamedTuple):
    """What came of a map: the structure of the results, they, joined, and whether processes compared values."""

    treedef: Any
    joined: list[Any]
    compared: bool


def _positional(leaves: Sequence) -> tuple[tuple, dict]:
    """Arguments that are leaves themselves, by their places."""
    return tuple(leaves), {}


def _worker() -> Worker:
    worker = WORKER.get()
    assert worker is not None
    return worker


def _on(x, tape) -> bool:
    return type(x) is Array and x.tape is tape


def _differentiable(x) -> bool:
    return type(x) is Array and kind_of_dtype(x.dtype) in ("f", "c")


def _layout_of(x) -> Layout | None:
    x = value_of(x)
    return x.layout if isinstance(x, PartitionedArray) else None


def _parameter_names(f: Callable) -> tuple[str, ...]:
    """The names of the positional parameters of a function, as far as they are known."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


class _Input:
    """One argument, ready to give every worker its block.

    value: what is passed as it is; blocks: those to pass instead, by worker, in the state of the spec.
    kind: what of the argument the choice of a scheduler may depend on.
    """

    __slots__ = ("blocks", "kind", "number", "spec", "state", "value")

    def __init__(
        self,
        value: Any,
        blocks: dict[int, np.ndarray] | None = None,
        spec: Spec | None = None,
        *,
        number: bool = False,
    ):
        self.value = value
        self.number = number
        self.blocks = blocks
        self.spec = spec
        self.state = state_of(spec.varying) if spec is not None else None
        self.kind = None if blocks is None else getattr(value, "shape", ())

    def block(self, worker: Worker):
        """The worker's block, with its state where states are tracked."""
        if self.blocks is None:
            return self.value
        block = worker.comm.given(self.blocks[worker.index])
        return Array(block, self.state) if worker.tracked else block

    def note(self, mesh: Mesh, replicas: Replicas, where: str, path: str, turns: dict[Any, int]) -> None:
        """Note what was not compared before. What has the spec None may be anything."""
        x = self.value
        if self.number:
            replicas.add(tuple(mesh.axes), Record(where, path, "", repr(x), 0, 0, None), "number")
        elif self.blocks is not None and not (isinstance(x, PartitionedArray) and x.compared):
            (block,) = self.blocks.values()
            if isinstance(x, PartitionedArray):
                if x.compared is None and not on_device(block):
                    turn = next_turn(turns, ("rests", path, block.shape))
                    if rests(turn, block.nbytes):
                        return
                replicas.arrays.append(x)
            shape = f"{dtype_name(block.dtype)}{[*np.shape(x)]}, {self.spec}"
            note_argument(mesh, replicas, Record(where, path, "", shape, 0, 0, None), self.spec, block, turns)


def note_argument(
    mesh: Mesh, replicas: Replicas, record: Record, spec: Spec | None, block: Any, turns: dict[Any, int]
) -> None:
    """Note an argument of one of several processes: its shape and spec, for the comparison with all others, and its
    block, with those that hold copies of it."""
    replicas.add(tuple(mesh.axes), record, "shape")
    copies = tuple(n for n in mesh.axes if isinstance(spec, P) and n not in spec.varying)
    if copies and not on_device(block):
        turn = next_turn(turns, (record.argument, block.shape))
        part = taken(block, turn)
        replicas.add(copies, record._replace(turn=turn, number=digest(part), value=part), "argument")


def _cotangent(mesh: Mesh, out: PartitionedArray, g) -> _Input | None:
    """A cotangent laid out as the result it belongs to, uneven blocks included."""
    if g is None:
        return None
    given = g
    if not isinstance(g, PartitionedArray):
        g = put(np.broadcast_to(g if on_device(g) else np.asarray(g), out.shape), out.spec, mesh)
    return _Input(given, relayout(g, out.layout).blocks, out.spec)


def _settled(g, value):
    """A gradient as its argument came: laid out like a PartitionedArray, bare for bare data."""
    bare, value = value_of(g), value_of(value)
    if type(bare) is type(value) is PartitionedArray and bare.layout is value.layout:
        return g
    have, want = (x.layout if isinstance(x, PartitionedArray) else None for x in (bare, value))
    if have == want:
        return g
    return _brought(g, have, want, (value if have is None else bare).mesh, on_device(value))


def _way_back(g, _ans, _x, have: Layout | None, want: Layout | None, mesh: Mesh, there: bool = False) -> Any:
    return _brought(g, want, have, mesh, there)


@primitive("relayout", _way_back)
def _brought(x, have: Layout | None, want: Layout | None, mesh: Mesh, there: bool = False) -> Any:
    """An array in another layout; None for bare data, which is left there, on the device, or comes to the host. Its
    transpose is the way back."""
    if want is None:
        return (x.gathered() if there else x.numpy()) if isinstance(x, PartitionedArray) else x
    return relayout(x, want) if isinstance(x, PartitionedArray) else PartitionedArray(cut(x, want, mesh), want, mesh)


class _Settling(Join):
    """States as in bodies; outside of them, gradients get the layout of their arguments."""

    def settle(self, g, value):
        return _settled(g, value)

    def whole(self, x):
        value = value_of(x)
        return _brought(x, value.layout, None, value.mesh) if isinstance(value, PartitionedArray) else x


tracer.use_mixing(_Settling())


# Joining results


def _one_structure(where: str, mesh: Mesh, outcome: Outcome) -> Any:
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


def _joined_leaves(where: str, mesh: Mesh, outcome: Outcome, check: bool, turns: dict[Any, int]) -> list:
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
    parts = {k: {w: taken(r.blocks[k], n) for w, r in results.items()} for k, n in turn.items()}
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
    shared = mesh.transport.share({me: [structure, notes, outcome.replicas.noted() if checked else {}]})
    for w, (other, *_) in shared.items():
        if other != shared[0][0]:
            raise _structures_differ(where, mesh, (0, w), (shared[0][0], other))
    if checked:
        settle(mesh, {w: records for w, (_, _, records) in shared.items()}, outcome.replicas)
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
            if not rests(turn, block.nbytes):
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
        judged = [ROUNDING if alike(sketches[owner], sketches[w]) else OTHER for owner, w in pairs]
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
                judged = compared(record, theirs)
                if judged != SAME:
                    texts = [record.text, theirs.text] if record.text != theirs.text else []
                    report(mesh, judged, where, mine.paths[k], (first, w), tuple(mesh.axes), texts=texts, kind="object")
        if outcome.replicas.alone and record is not None:
            outcome.replicas.add(tuple(mesh.axes), record, "object")
