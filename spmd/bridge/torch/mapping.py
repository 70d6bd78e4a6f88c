"""spt.map: bodies in torch, on the workers of a mesh; tensors in, tensors out, differentiable from outside.

It is `spmd.map` with tensors: the arguments are laid out by the same specs, and results are checked and joined by the
same code. Each worker keeps the graph of its body; the graph of the caller holds one node for the whole map, whose
backward runs the workers' graphs back. A second derivative is a map too: of the arguments and the cotangents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, overload

import numpy as np
import torch
from torch.autograd import forward_ad

from spmd import mapping
from spmd.array import PartitionedArray, relayout
from spmd.autodiff import tree
from spmd.bridge.torch.closure import tensors_within_reach
from spmd.bridge.torch.drawing import BodyMode
from spmd.bridge.torch.dynamo import clear_errors
from spmd.bridge.torch.function import Draws, Function, Seat, one_level, transformed, twin
from spmd.bridge.torch.memory import borrowed, check_device, shaped_like, tensor_of
from spmd.bridge.torch.tensor import Tensor, in_blocks, plain, state_of_tensor, stated
from spmd.device import contiguous
from spmd.errors import LayoutError, StateError, TransportError, describe, message
from spmd.layout import Layout, P
from spmd.map_arguments import note_argument
from spmd.map_interpreters import called_in_body
from spmd.map_results import BodyResults, joined_leaves, one_structure
from spmd.mapping import Mapped
from spmd.mesh import WORKER, Mesh, Worker
from spmd.placement import mesh_for
from spmd.replicas.closures import note_closure
from spmd.replicas.compare import next_turn
from spmd.replicas.records import Record
from spmd.spec_trees import REQUIRED, Leaf
from spmd.state import state_of
from spmd.tracebacks import api_boundary

__all__ = ["TorchMapped", "map"]


@overload
def map(
    f: None = None, in_specs: Any = ..., out_specs: Any = ..., *, mesh: Mesh | None = ..., check: bool = ...
) -> Callable[[Callable], TorchMapped]: ...


@overload
def map(
    f: Callable, in_specs: Any = ..., out_specs: Any = ..., *, mesh: Mesh | None = ..., check: bool = ...
) -> TorchMapped: ...


@api_boundary
def map(
    f: Callable | None = None,
    in_specs: Any = REQUIRED,
    out_specs: Any = REQUIRED,
    *,
    mesh: Mesh | None = None,
    check: bool = True,
) -> Any:
    """A function on global tensors that runs `f`, a body in torch, on the block of every worker.

    f: a function of this worker's blocks, which are tensors, with collectives (`spt.psum(x, "data")`).
    in_specs, out_specs, mesh: as for `spmd.map`. Arguments are tensors, NumPy arrays, numbers or `PartitionedArray`s;
    arrays reach the body as tensors. A tensor argument is not copied, and a body that writes to one is an error.
    check: the tensors of bodies carry their state (`spt.Tensor`), and what is promised Invariant is verified. With
    check=False, and nothing differentiated from outside, bodies see plain tensors and say `spt.pvary` themselves.

    Gives plain tensors: whole ones, on every process. `loss.backward()` outside reaches the arguments, and leaves that
    the body closes over, parameters of a module for one: they count as Invariant, and get one gradient. A training
    loop may as well run inside the body, with `loss.backward()` there.

    The workers are threads of this process, or processes under mpiexec or torchrun. Gradients: as for `spmd.map`, to
    any order; `torch.func`'s transformations work on the mapped function too. Without f it is a decorator.

    Raises SpecError, LayoutError or StateError that name the argument or result by its path; MeshError without mesh;
    TransportError on a mesh with scheduler="lockstep".
    """
    if f is not None and callable(f) and REQUIRED not in (in_specs, out_specs):
        return TorchMapped(f, in_specs, out_specs, mesh, check)
    made = mapping.map(f, in_specs, out_specs, mesh=mesh, check=check)  # which says what is wrong
    if f is None:
        return lambda body: map(body, in_specs, out_specs, mesh=mesh, check=check)
    return made


class TorchMapped(Mapped):
    """A body in torch with its specs; see `spt.map`."""

    __value_and_grad__: Any = None  # torch differentiates it

    def __init__(
        self, f: Callable, in_specs: Any, out_specs: Any, mesh: Mesh | None, check: bool, where: str | None = None
    ):
        where = where or f"spt.map of {getattr(f, '__name__', None) or type(f).__name__}"
        super().__init__(f, in_specs, out_specs, mesh, check, where)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _called(self, args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if WORKER.get() is not None:
            raise called_in_body(self.where)
        mesh = mesh_for(self.mesh, self.where)
        leaves, rebuild = self.arguments.bind(mesh, args, kwargs, self._admit)
        return _Call(self, mesh, leaves, rebuild).result()

    def _admit(self, mesh: Mesh, leaf: Leaf) -> Leaf:
        """An argument that is a tensor, or one of `spmd.map`, checked."""
        x = leaf.value
        if not isinstance(x, torch.Tensor):
            return self.arguments.admit(mesh, leaf)
        if isinstance(x, Tensor):
            raise StateError(
                message(
                    self.where,
                    argument=leaf.path,
                    got=f"{describe(x)} of a body",
                    need="a tensor from outside",
                    mend="return it from its map with an out_spec, or pass spt.block(x)",
                )
            )
        check_device(x, mesh, self.where, leaf.path)
        if x.layout is not torch.strided:
            raise StateError(
                message(
                    self.where,
                    argument=leaf.path,
                    got=f"a tensor of layout {x.layout}",
                    need="a dense tensor",
                    mend="x.to_dense(), or the spec None to pass it as it is",
                )
            )
        self.arguments.admit(mesh, leaf._replace(value=shaped_like(x)))
        return leaf


_called: Any = torch.compiler.disable(TorchMapped._call)
"""A map that a compiled function calls runs as it is."""


class _Call:
    """One call of a map: its arguments, and how to run it forward, back, and along tangents."""

    def __init__(self, mapped: TorchMapped, mesh: Mesh, leaves: list[Leaf], rebuild: Callable):
        self.mapped = mapped
        self.mesh = mesh
        self.leaves = leaves
        self.rebuild = rebuild
        self.where = mapped.where
        self.moved = [k for k, leaf in enumerate(leaves) if leaf.spec is not None and _followed(leaf.value)]
        self.given: list[torch.Tensor] = [leaves[k].value for k in self.moved]
        self.joined: list[Any] = []
        self.treedef: Any = None
        self.flowing: list[int] = []  # which results are differentiated
        self.specs: list[Layout | None] = []
        self.early: _Run | None = None

    def result(self) -> Any:
        """Run it, and record it in the graph of the caller where that follows an argument or what f closes over."""
        if any(transformed(x) or _tangent(x) is not None for x in self.given):
            outs = _Map.apply(self, None, *self.given)
        else:
            run = self.forward(self.given)
            if not (run.inputs or run.leaves) or not self.flowing:
                return tree.unflatten(self.treedef, self.joined)
            outs = _Map.apply(self, run, *self.given, *run.leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        final = list(self.joined)
        for k, y in zip(self.flowing, outs, strict=True):
            final[k] = y
        self._forget()
        return tree.unflatten(self.treedef, final)

    def _forget(self) -> None:
        """Let the results go: they hold their graph, which holds this call, and no collector sees such a circle."""
        self.joined, self.early = [], None

    # Forward

    def forward(self, given: Sequence[torch.Tensor]) -> _Run:
        """Run all workers, each with a graph of its own; keeps the joined results."""
        mapped, mesh = self.mapped, self.mesh
        follow = torch.is_grad_enabled() or bool(self.moved)
        tracked = mapped.check or bool(self.moved)
        run = _Run(self, bool(self.moved) or (follow and mapped.check))
        blocks = self._blocks(given)
        before = [(leaf, leaf.value._version) for leaf in self.leaves if isinstance(leaf.value, torch.Tensor)]
        local = _thread_state(enabled=follow)

        def body(worker: Worker) -> BodyResults:
            seat = run.seat(worker.index)
            with seat.occupied(worker), local(), _mode(worker):
                mine = [b[worker.index] if isinstance(b, dict) else b for b in blocks]
                for k, leaf in enumerate(self.leaves):
                    if isinstance(blocks[k], dict):
                        mine[k] = self._entering(mine[k], leaf, k in self.moved, worker.tracked)
                run.inputs[worker.index] = [mine[k] for k in self.moved]
                args, kwargs = self.rebuild(mine)
                return self._results(worker, run, mapped.f(*args, **kwargs))

        outcome = self._execute(body, tracked)
        run.draws.leave()
        for leaf, version in before:
            self._unchanged(leaf, version)
        self._note_arguments(outcome, blocks)
        self.treedef = one_structure(self.where, mesh, outcome)
        joined = joined_leaves(self.where, mesh, outcome, mapped.check, mapped.turns)
        self.joined = [self._leaving(x) for x in joined]
        self.specs = [x.layout if isinstance(x, PartitionedArray) else None for x in joined]
        self._settle(run)
        return run

    def _note_arguments(self, outcome: Any, blocks: list[Any]) -> None:
        """Note the tensors and arrays that this process, one of several, passed of its own: see `Mapped`."""
        mapped, mesh = self.mapped, self.mesh
        if not (outcome.replicas.distributed and mapped.check and mesh.checks):
            return
        for leaf, block in zip(self.leaves, blocks, strict=True):
            if not isinstance(block, dict) or isinstance(leaf.value, PartitionedArray):
                continue
            (own,) = block.values()
            shape = f"{own.dtype}{[*leaf.value.shape]}, {leaf.spec}"
            record = Record(self.where, leaf.path, "", shape, 0, 0, None)
            note_argument(mesh, outcome.replicas, record, leaf.spec, borrowed(own), mapped.turns)
        note_closure(tuple(mesh.axes), outcome.replicas, self.where, mapped.f, mapped.turns)

    def _execute(self, body: Callable[[Worker], Any], tracked: bool) -> Any:
        if self.mesh.scheduler == "lockstep" and self.mesh.size > 1 and self.mesh.transport.name == "local":
            raise TransportError(
                message(
                    self.where,
                    got='a mesh with scheduler="lockstep"',
                    need="threads: torch's own frames do not survive a switch of greenlets",
                    mend='leave scheduler out, or Mesh(..., scheduler="threads")',
                )
            )

        def limited(worker: Worker) -> Any:
            with _torch_threads(self.mesh.transport.threads()):
                return body(worker)

        clear_errors()
        shared = self.mesh.transport.name == "local" and self.mesh.size > 1
        if shared and "torch._dynamo" in sys.modules:
            # While one worker compiles a function another one may come to it, and runs it as it is meanwhile. torch,
            # whose flag for tracing is one for all threads, would take that for a function that traces itself.
            sys.modules["torch._dynamo"].config.error_on_nested_fx_trace = False
        with one_level() if shared else nullcontext():
            number = next_turn(self.mapped.turns, body.__name__)
            return self.mesh.run(limited, tracked=tracked, scheduler="threads", number=number)

    def _blocks(self, given: Sequence[torch.Tensor]) -> list[Any]:
        """For each argument its blocks by worker, or, where it is passed as it is, itself."""
        values = [leaf.value for leaf in self.leaves]
        for k, x in zip(self.moved, given, strict=True):
            values[k] = x
        return [
            x if leaf.spec is None or not hasattr(x, "shape") else self.cut(x, leaf.spec)
            for leaf, x in zip(self.leaves, values, strict=True)
        ]

    def cut(self, x: Any, spec: Any) -> dict[int, torch.Tensor]:
        """The blocks of an argument or a cotangent that this process holds: views of a tensor, tensors of an array."""
        mesh = self.mesh
        if not isinstance(x, torch.Tensor | PartitionedArray):
            x = np.asarray(x) if isinstance(x, np.generic | list | tuple) else x
            x = tensor_of(x.copy() if isinstance(x, np.ndarray) else x)
        layout = mesh.layout(tuple(x.shape), spec)
        if isinstance(x, PartitionedArray):
            return {w: tensor_of(b.copy()) for w, b in relayout(x, layout).blocks.items()}
        x = x.detach()
        return {w: _block(x, layout, w) for w in mesh.local_workers}

    def _entering(self, x: torch.Tensor, leaf: Leaf, followed: bool, tracked: bool) -> torch.Tensor:
        """A block as the body sees it: a leaf of the worker's graph where it is differentiated."""
        x = x.detach()
        if tracked:
            x = torch.Tensor._make_subclass(Tensor, x, followed)  # type: ignore[attr-defined]
            x._state = state_of(leaf.spec.varying)  # type: ignore[union-attr]
            return x
        return x.requires_grad_(followed)

    def _results(self, worker: Worker, run: _Run, out: Any) -> BodyResults:
        """What a body returned, checked against out_specs: blocks to be joined, and what is differentiated of them."""
        mapped = self.mapped
        found, treedef = mapped.results.leaves(out)
        ends: list[torch.Tensor | None] = []
        blocks = []
        for leaf in found:
            x = leaf.value
            if in_blocks(x):
                raise _in_blocks_refused(self.where, leaf)
            if isinstance(x, torch.Tensor) and leaf.spec is not None:
                if worker.tracked:
                    x = self._promised(worker, leaf, x)
                ends.append(plain(x) if run.follows and x.requires_grad else None)
                blocks.append(mapped.results.block(worker, leaf._replace(value=borrowed(plain(x)))))
            else:
                ends.append(None)
                blocks.append(mapped.results.block(worker, leaf) if leaf.spec is not None else self._object(leaf))
        run.ends[worker.index] = ends
        return BodyResults(treedef, [x.path for x in found], [x.spec for x in found], blocks)

    def _promised(self, worker: Worker, leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
        """A result in the state that its spec says."""
        own = state_of_tensor(x)
        state = self.mapped.results.promised_state(worker, leaf, x.ndim, own)
        return x if state is own or not x.requires_grad else twin(x, state)

    def _object(self, leaf: Leaf) -> Any:
        """A result with the out_spec None; a tensor without its state, where it is one value."""
        x = leaf.value
        if isinstance(x, Tensor):
            if x.state.varying:
                raise StateError(
                    message(
                        self.where,
                        argument=leaf.path,
                        got=f"{describe(x)}, with the out_spec None",
                        need="an object that is equal on all workers",
                        mend="give it a spec: P() for one value, P(axis) for a block per worker",
                    )
                )
            return plain(x).detach()
        return x

    def _leaving(self, x: Any) -> Any:
        """A joined result as a plain tensor, whole on every process."""
        if not isinstance(x, PartitionedArray):
            return x
        whole = x.gathered() if self.mesh.places is not None else x.numpy()
        return tensor_of(whole.copy())

    def _unchanged(self, leaf: Leaf, version: int) -> None:
        if leaf.value._version != version:
            raise StateError(
                message(
                    self.where,
                    argument=leaf.path,
                    got="a tensor that the body has written to: workers share its memory, and the caller's was changed",
                    need="a body that leaves its arguments as they are",
                    mend="x = x.clone() in the body, or write a new tensor: y = x + 1 in place of x += 1",
                )
            )

    def _settle(self, run: _Run) -> None:
        """Which results are differentiated: those that are on some worker; and what f closes over."""
        count = len(self.joined)
        mine = [[e is not None for e in ends] for ends in run.ends.values()]
        flags = [any(column) for column in zip(*mine, strict=True)] if count else []
        leaves = _foreign_leaves(self, run) if run.follows and any(flags) else []
        if run.follows and len(run.ends) < self.mesh.size:
            said = self.mesh.transport.share(dict.fromkeys(run.ends, flags))
            flags = [any(column) for column in zip(*said.values(), strict=True)]
        self.flowing = [k for k, flag in enumerate(flags) if flag]
        run.leaves = leaves

    # Back

    def pull(self, run: _Run, gs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of the arguments and of what f closes over, given those of the results."""
        cotangents = [self.cut(g, self.specs[k]) for k, g in zip(self.flowing, gs, strict=True)]
        paths = [f"the gradient of {self.leaves[k].path}" for k in self.moved]
        paths += [f"the gradient of a tensor that f closes over, of shape {list(x.shape)}" for x in run.leaves]
        specs = [self.leaves[k].spec for k in self.moved] + [P()] * len(run.leaves)
        local = _thread_state(enabled=False)

        def backward(worker: Worker) -> BodyResults:
            seat = run.seats[worker.index]
            with seat.occupied(worker), local(), _mode(worker):
                ends, starts = run.ends[worker.index], [*run.inputs[worker.index], *run.leaves]
                found = _grad(
                    [(ends[k], c[worker.index]) for k, c in zip(self.flowing, cotangents, strict=True)],
                    starts,
                    seat.tokens or [],
                )
                blocks = [
                    contiguous(borrowed(plain(torch.zeros_like(x) if g is None else g)))
                    for g, x in zip(found, starts, strict=True)
                ]
                return BodyResults(None, paths, specs, blocks)

        outcome = self._execute(backward, True)
        joined = joined_leaves(self.where, self.mesh, outcome, self.mapped.check, self.mapped.turns)
        return [self._leaving(g) for g in joined]

    def derivative(self, given: Sequence[torch.Tensor], gs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients as results of a map of the arguments and the cotangents, to be differentiated again."""
        moved, closed = self.moved, list(given[len(self.moved) :])

        def body(arguments: list, cotangents: list) -> tuple:
            with torch.enable_grad():
                ends, starts = self._graph(arguments, closed)
                pairs = [(plain(e), plain(g)) for e, g in zip(ends, cotangents, strict=True)]
                grads = _grad(pairs, starts, [], again=True)
            return tuple(_or_zeros(g, x) for g, x in zip(grads, starts, strict=True))

        out_specs = [self.leaves[k].spec for k in moved] + [P()] * len(closed)
        return self._of_both(body, given, list(gs), [self.specs[k] for k in self.flowing], out_specs)

    def push(self, given: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tangents of the results, as results of a map of the arguments and their tangents: the pullback is linear
        in the cotangents, so its own pullback applies the derivative."""

        def body(arguments: list, tangents: list) -> tuple:
            with torch.enable_grad():
                ends, starts = self._graph(arguments, [])
                zeros = [torch.zeros_like(plain(e)).requires_grad_() for e in ends]
                grads = _grad([(plain(e), v) for e, v in zip(ends, zeros, strict=True)], starts, [], again=True)
                pairs = [(g, plain(t)) for g, t in zip(grads, tangents, strict=True) if g is not None]
                found = _grad(pairs, zeros, [], again=True)
            return tuple(_or_zeros(t, e) for t, e in zip(found, ends, strict=True))

        specs = [self.leaves[k].spec for k in self.moved]
        return self._of_both(body, given, list(tangents), specs, [self.specs[k] for k in self.flowing])

    def _graph(self, arguments: list, closed: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """In a body: the differentiated results of f, and what they are differentiated by."""
        mine = list(arguments)
        for k in self.moved:
            if not mine[k].requires_grad:
                mine[k] = mine[k].detach().requires_grad_()
        args, kwargs = self.rebuild(mine)
        found, _ = self.mapped.results.leaves(self.mapped.f(*args, **kwargs))
        worker = WORKER.get()
        assert worker is not None
        return [self._promised(worker, found[k], found[k].value) for k in self.flowing], [
            *(mine[k] for k in self.moved),
            *closed,
        ]

    def _of_both(
        self, body: Callable, given: Sequence[torch.Tensor], others: list, specs: list, out_specs: list
    ) -> list:
        """A map of the arguments and of as many more."""
        values = [leaf.value for leaf in self.leaves]
        for k, x in zip(self.moved, given, strict=False):
            values[k] = x
        in_specs = ([leaf.spec for leaf in self.leaves], specs)
        mapped = TorchMapped(body, in_specs, tuple(out_specs), self.mesh, self.mapped.check, self.where)
        return list(mapped(values, others))


def _or_zeros(g: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """A derivative in the state of what it belongs to."""
    return stated(torch.zeros_like(plain(x)) if g is None else plain(g), state_of_tensor(x))


class _Run:
    """What a forward run leaves for the way back.

    seats: the places of the workers. inputs: by worker, the leaves of its graph for the differentiated arguments.
    ends: by worker, the results of its graph, None where they are not differentiated. leaves: what f closes over.
    draws: the random generators of the workers.
    """

    def __init__(self, call: _Call, follows: bool):
        self.call = call
        self.follows = follows
        self.seats: dict[int, Seat] = {}
        self.inputs: dict[int, list[torch.Tensor]] = {}
        self.ends: dict[int, list[torch.Tensor | None]] = {}
        self.leaves: list[torch.Tensor] = []
        self.draws = Draws()

    def seat(self, index: int) -> Seat:
        seat = self.seats[index] = Seat(self.call.mesh, index)
        seat.tokens = []
        seat.draws = self.draws
        return seat


class _Map(Function):
    """A whole map as one node of the caller's graph."""

    @staticmethod
    def forward(call: _Call, run: _Run | None, *given: torch.Tensor) -> Any:
        if run is None:
            run = call.forward(given)
            call.early = run
        return tuple(call.joined[k] for k in call.flowing)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, run, *given = inputs
        ctx.call = call
        run = run if run is not None else call.early
        # The graphs of the workers are let go with what is saved here: when torch frees the caller's graph.
        key = torch.empty(0)
        if run is not None:
            key.run = run  # type: ignore[attr-defined]
        ctx.save_for_backward(*given, key)
        ctx.save_for_forward(*given)

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor) -> Any:
        *given, key = ctx.saved_tensors
        call: _Call = ctx.call
        again = torch.is_grad_enabled() and any(_followed(x) for x in (*given, *gs))
        if again or any(transformed(x) for x in gs) or not hasattr(key, "run"):
            found: Any = call.derivative(given, gs)
        else:
            found = call.pull(key.run, gs)
        return None, None, *found

    @staticmethod
    def jvp(ctx: Any, _call: Any, _run: Any, *tangents: Any) -> Any:
        call: _Call = ctx.call
        given, tangents = ctx.saved_tensors[: len(call.moved)], tangents[: len(call.moved)]
        filled = [torch.zeros_like(x) if t is None else t for x, t in zip(given, tangents, strict=True)]
        return tuple(call.push(given, filled))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, run: Any, *given: torch.Tensor) -> Any:
        """One run of the map per sample; where there is none, one of zeros tells the shapes."""
        dims = in_dims[2:]
        found = []
        if not info.batch_size:
            given = tuple(
                x if d is None else x.new_zeros([1 if k == d else n for k, n in enumerate(x.shape)])
                for x, d in zip(given, dims, strict=True)
            )
        for i in range(max(1, info.batch_size)):
            values = [leaf.value for leaf in call.leaves]
            for k, x, d in zip(call.moved, given, dims, strict=True):
                values[k] = x if d is None else x.select(d, i)
            leaves = [leaf._replace(value=v) for leaf, v in zip(call.leaves, values, strict=True)]
            one = _Call(call.mapped, call.mesh, leaves, call.rebuild)
            one.moved, one.given = call.moved, [values[k] for k in call.moved]
            outs = _Map.apply(one, None, *one.given)
            call.flowing, call.joined, call.treedef, call.specs = one.flowing, one.joined, one.treedef, one.specs
            one._forget()
            found.append(outs if isinstance(outs, tuple) else (outs,))
        stacks = (torch.stack(column)[: info.batch_size] for column in zip(*found, strict=True))
        return tuple(stacks), (0,) * len(found[0])


def _in_blocks_refused(where: str, leaf: Leaf) -> LayoutError:
    return LayoutError(
        message(
            where,
            argument=leaf.path,
            got=describe(leaf.value),
            need="what this worker has: a block, or a whole",
            mend="p.block() with the spec of p, or p.whole() with P()",
        )
    )


def _followed(x: Any) -> bool:
    """Whether torch follows what becomes of an argument."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return False
    if transformed(x) or (x.requires_grad and torch.is_grad_enabled()):
        return True
    return _tangent(x) is not None


def _tangent(x: torch.Tensor) -> torch.Tensor | None:
    return forward_ad.unpack_dual(x).tangent if forward_ad._current_level >= 0 else None


def _block(x: torch.Tensor, layout: Layout, worker: int) -> torch.Tensor:
    if x.ndim:
        return x[layout.slices(worker)]
    return x if layout.positions(worker) is not None else x.new_zeros(layout.block_shape(worker) or (0,))


def _grad(
    pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor]],
    starts: Sequence[torch.Tensor],
    tokens: Sequence[torch.Tensor],
    again: bool = False,
) -> list[torch.Tensor | None]:
    """The gradients of starts. The tokens are asked for too, so that all collectives behind them are reached."""
    ends = [(e, g) for e, g in pairs if e is not None and e.requires_grad]
    if not ends:
        return [None] * len(starts)
    found = torch.autograd.grad(
        [e for e, _ in ends],
        [*starts, *tokens],
        [g.to(e.dtype) for e, g in ends],
        allow_unused=True,
        retain_graph=True,
        create_graph=again,
    )
    return list(found[: len(starts)])


def _foreign_leaves(call: _Call, run: _Run) -> list[torch.Tensor]:
    """The leaves of the workers' graphs that are no arguments, but that f closes over, not made by f itself.

    What several threads have is not their own. Of a worker in a process of its own f is searched.

    Raises StateError for a tensor with a history of its own that f closes over: its graph would be run by all workers.
    """
    leaves: dict[int, torch.Tensor] = {}
    holders: dict[int, set[int]] = {}
    met: dict[Any, int] = {}
    for index, ends in run.ends.items():
        own = {id(x) for x in (*run.inputs[index], *(run.seats[index].tokens or []))}
        stack = [e.grad_fn for e in ends if e is not None and e.grad_fn is not None]
        for e in ends:
            if e is not None and e.grad_fn is None and id(e) not in own:
                leaves[id(e)] = e
                holders.setdefault(id(e), set()).add(index)
        while stack:
            node = stack.pop()
            seen = met.get(node)
            if seen == index:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                if id(variable) not in own:
                    leaves[id(variable)] = variable
                    holders.setdefault(id(variable), set()).add(index)
                continue
            if seen is not None:
                raise StateError(
                    message(
                        call.where,
                        argument="f",
                        got=f"a function that closes over a tensor with a history: {node.name()} is in the graphs of "
                        f"{call.mesh.describe(seen)} and {call.mesh.describe(index)}",
                        need="what has been computed outside as an argument",
                        mend="pass it to the map, with a spec in in_specs (P() for a replicated one); parameters, "
                        "which have no history, may be closed over",
                    )
                )
            met[node] = index
            stack.extend(n for n, _ in node.next_functions if n is not None)
    if len(run.ends) > 1:
        return [x for key, x in leaves.items() if len(holders[key]) > 1]
    reached = tensors_within_reach(call.mapped.f) if leaves else set()
    return [x for key, x in leaves.items() if key in reached]


def _mode(worker: Worker) -> Any:
    """What stands between a body and torch's functions."""
    return BodyMode() if worker.tracked else nullcontext()


def _thread_state(*, enabled: bool) -> Callable[[], Any]:
    """What torch keeps for each thread, as it is in the caller's, to be set in the workers'."""
    inference = torch.is_inference_mode_enabled()
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def local() -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(enabled))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield

    return local


@contextmanager
def _torch_threads(n: int) -> Any:
    """torch's own threads within a worker: as many as BLAS has, but no more than torch was told to use.

    torch keeps their number for each thread that calls it.
    """
    before = torch.get_num_threads()
    n = min(n, before)
    if n != before:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if n != before:
            torch.set_num_threads(before)
