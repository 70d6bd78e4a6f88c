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
from typing import Any, overload

import numpy as np

from spmd import device as devices
from spmd.array import DONATED, PartitionedArray, closure_error, donated_error, relayout
from spmd.autodiff import tracer, transforms, tree
from spmd.autodiff.admission import admit
from spmd.autodiff.allocation import writable
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.sanitizers import FINITE
from spmd.autodiff.staging.recorder import is_slot, one_line
from spmd.autodiff.tape import suspended
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import (
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
from spmd.kernels import on_device
from spmd.layout import Layout, P, Spec
from spmd.map_arguments import (
    MapArgument,
    Settling,
    cotangent_input,
    differentiable,
    is_on_tape,
    layout_of,
    parameter_names,
    positional_leaves,
    settled_cotangent,
)
from spmd.map_results import BodyResults, MapResult, as_block, device_of, joined_leaves, one_structure
from spmd.mesh import WORKER, Mesh, Worker, use_map
from spmd.operators.base import bounded, outside, vary
from spmd.operators.root import Rooted, laid_out
from spmd.ownership import owned
from spmd.placement import cut, mesh_for
from spmd.replicas.closures import note_closure
from spmd.replicas.compare import next_turn
from spmd.scheduler_choice import Trial
from spmd.spec_trees import REQUIRED, Leaf, spec_leaves, spread
from spmd.state import State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.call import ONE_BY_ONE, Call
from spmd.transport.handles import Outcome, sealed

__all__ = ["Mapped", "map"]

_NUMBERS = (bool, int, float, complex)
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
    in_specs: Any = REQUIRED,
    out_specs: Any = REQUIRED,
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
        if specs is REQUIRED:
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


use_map(map)


class Mapped:
    """A body with its specs; see `spmd.map`."""

    def __init__(self, f: Callable, in_specs: Any, out_specs: Any, mesh: Mesh | None, check: bool):
        self.f = f
        self.in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
        self.out_specs = out_specs
        self.mesh = mesh
        self.check = check
        self._names = parameter_names(f)
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
            return leaves, positional_leaves
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
        if type(x) is not PartitionedArray or x.mesh is not mesh or x.blocks is DONATED:
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
        if isinstance(x, PartitionedArray) and x.blocks is DONATED:
            raise donated_error(self.where, leaf.path)
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
                    got=f"an array on {x.mesh} ({x.mesh.transport.name}{device_of(x.mesh)})",
                    need=f"an array on {mesh} ({mesh.transport.name}{device_of(mesh)})",
                    mend="spmd.put(x.numpy(), spec, mesh), or x.numpy()",
                )
            )
        return leaf

    def _input(self, mesh: Mesh, leaf: Leaf) -> MapArgument:
        """An argument laid out by its spec."""
        x, spec = leaf.value, leaf.spec
        if spec is None:
            return MapArgument(x)
        if type(x) in _NUMBERS and isinstance(spec, P):
            return MapArgument(x, number=True)
        if self._laid_out(mesh, x, spec):
            return MapArgument(x, x.blocks, spec)
        if not isinstance(x, PartitionedArray):
            data = x if hasattr(x, "dtype") else np.asarray(x)
            return MapArgument(x, cut(data, mesh.layout(data.shape, spec), mesh), spec)
        return MapArgument(x, relayout(x, mesh.layout(x.shape, spec)).blocks, spec)

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

    def _note_inputs(self, mesh: Mesh, outcome: Outcome, paths: Sequence[str], inputs: Sequence[MapArgument]) -> None:
        """Note what this process, one of several, passed of its own, for the comparison at the end of the map: bare
        arguments, and arrays that the body closes over."""
        if not (outcome.replicas.distributed and self.check and mesh.checks):
            return
        for path, x in zip(paths, inputs, strict=True):
            x.note(mesh, outcome.replicas, self.where, path, self._turns)
        note_closure(tuple(mesh.axes), outcome.replicas, self.where, self.f, self._turns)

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

    def _results(self, worker: Worker, out) -> BodyResults:
        """What a body returned, leaf by leaf, checked against out_specs."""
        leaves, treedef = self._returned(out)
        blocks = [self._result(worker, leaf) if leaf.spec is not None else self._object(leaf) for leaf in leaves]
        return BodyResults(treedef, [leaf.path for leaf in leaves], [leaf.spec for leaf in leaves], blocks)

    def _result(self, worker: Worker, leaf: Leaf):
        """One result as a block: bare, C-contiguous, read-only, Invariant where it was promised to be."""
        x, spec = leaf.value, leaf.spec
        assert spec is not None
        if type(x) is Array:
            x = self._stated(worker, leaf, x)
            block = self._admitted_result(leaf, as_block(value_of(x)))
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
            return closure_error(self.where, x, leaf.path)
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
        moved = [k for k, x in enumerate(leaves) if x.spec is not None and is_on_tape(x.value, tape)]
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
        out_tree = one_structure(self.where, mesh, outcome)
        outs = joined_leaves(self.where, mesh, outcome, self.check, self._turns)

        def pull(gs):
            if any(type(value) is Array for value in gs):
                return self._derivative(mesh, leaves, rebuild, moved, outs, gs)
            cotangents = [cotangent_input(mesh, o, g) for o, g in zip(outs, gs, strict=True)]

            def backward(worker: Worker):
                given = [None if c is None else c.block(worker) for c in cotangents]
                return gradients(worker, [leaves[k] for k in moved], pulls[worker.index](given))

            outcome = self._execute(mesh, ("backward", *kind), backward, tracked=True)
            given = [(f"the cotangent of result {k}", c) for k, c in enumerate(cotangents) if c is not None]
            self._note_inputs(mesh, outcome, [path for path, _ in given], [c for _, c in given])
            found = joined_leaves(self.where, mesh, outcome, self.check, self._turns)
            return [settled_cotangent(g, leaves[k].value) for g, k in zip(found, moved, strict=True)]

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
        settled = iter([settled_cotangent(g, leaves[k].value) for g, k in zip(found, moved, strict=True)])
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
            back = gradients(worker, [leaves[k] for k in moved], forward.pull([one]))
            return BodyResults(
                forward.treedef, forward.paths + back.paths, forward.specs + back.specs, forward.blocks + back.blocks
            )

        return self._done(mesh, ("gradient", *moved), leaves, body, True).joined

    def _done(
        self, mesh: Mesh, kind: tuple, leaves: list[Leaf], body: Callable[[Worker, list], BodyResults], tracked: bool
    ) -> MapResult:
        """Run a body on every worker's blocks of the leaves."""
        inputs = [self._input(mesh, leaf) for leaf in leaves]

        def on_worker(worker: Worker):
            return body(worker, [x.block(worker) for x in inputs])

        outcome = self._execute(mesh, (*kind, *(x.kind for x in inputs)), on_worker, tracked=tracked)
        self._note_inputs(mesh, outcome, [x.path for x in leaves], inputs)
        treedef = one_structure(self.where, mesh, outcome)
        joined = joined_leaves(self.where, mesh, outcome, self.check, self._turns)
        return MapResult(treedef, joined, outcome.replicas.any_noted)

    def _vjp(self, worker: Worker, blocks: list, rebuild: Callable, moved: list[int], once: bool) -> BodyResults:
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
            return [x for x in stated if differentiable(x)], (treedef, found, stated)

        moving = [blocks[k] for k in moved]
        values, pullback, (treedef, found, stated) = transforms.pullback_of(part, moving, has_aux=True, once=once)
        traced = iter(values)
        final = [next(traced) if differentiable(x) else x for x in stated]
        results = [
            self._result(worker, leaf._replace(value=x)) if leaf.spec is not None else x
            for leaf, x in zip(found, final, strict=True)
        ]
        places = [k for k, x in enumerate(stated) if differentiable(x)]

        def pull(given: list):
            cotangent = [
                Array(np.zeros_like(results[k]), state_of(found[k].spec.varying)) if given[k] is None else given[k]
                for k in places
            ]
            return pullback(cotangent)

        return BodyResults(treedef, [x.path for x in found], [x.spec for x in found], results, pull)

    def _derivative(self, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, moved: list[int], outs: list, gs: list):
        """The pullback as a map of the arguments and the cotangents, to be differentiated again."""
        places = [k for k, g in enumerate(gs) if g is not None]
        cotangents = {k: gs[k] for k in places}

        def body(arguments: list, given: dict):
            pull = self._vjp(_worker(), list(arguments), rebuild, moved, False).pull
            assert pull is not None
            return pull([given.get(k) for k in range(len(outs))])

        out_specs = [layout_of(o) for o in outs]  # cotangents have the blocks of their results
        derivative = Mapped(
            body,
            ([x.spec for x in leaves], {k: out_specs[k] for k in places}),
            tuple(leaves[k].spec for k in moved),
            mesh,
            self.check,
        )
        found = derivative([x.value for x in leaves], cotangents)
        return [settled_cotangent(g, leaves[k].value) for g, k in zip(found, moved, strict=True)]


def gradients(worker: Worker, of: list[Leaf], found: Sequence[Any]) -> BodyResults:
    """The gradients of arguments on one worker, as what a body returns."""
    blocks = [as_block(value_of(g)) for g in found]
    if worker.mesh.places is not None:
        blocks = [worker.mesh.places.moved(b, worker.index) for b in blocks]
    return BodyResults(None, [f"the gradient of {x.path}" for x in of], [x.spec for x in of], blocks)


def _worker() -> Worker:
    worker = WORKER.get()
    assert worker is not None
    return worker


tracer.use_mixing(Settling())
