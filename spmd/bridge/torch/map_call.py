"""One call of a map: run the bodies, join the results, and run the graphs of the workers back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from spmd.array import PartitionedArray, relayout
from spmd.autodiff import tree
from spmd.bridge.torch.captured_tensors import captured_leaves
from spmd.bridge.torch.compile_errors import clear_errors
from spmd.bridge.torch.frontend import FRONTEND
from spmd.bridge.torch.function import Function
from spmd.bridge.torch.functorch import one_level, transformed
from spmd.bridge.torch.interop import borrowed, tensor_of
from spmd.bridge.torch.rng import BodyMode
from spmd.bridge.torch.tensor import Tensor, stated, twin
from spmd.bridge.torch.tensor_state import in_blocks, plain, state_of_tensor
from spmd.bridge.torch.thread_settings import thread_state, torch_threads
from spmd.bridge.torch.worker_context import Draws, Seat
from spmd.device import contiguous
from spmd.errors import LayoutError, StateError, TransportError, describe, message
from spmd.layout import Layout, P
from spmd.map_arguments import note_argument
from spmd.map_results import BodyResults, joined_leaves, one_structure
from spmd.mesh import WORKER, Mesh, Worker
from spmd.replicas import Record, next_turn, note_closure
from spmd.spec_trees import Leaf
from spmd.state import state_of


class MapCall:
    """One call of a map: its arguments, and how to run it forward, back, and along tangents."""

    def __init__(self, mapped: Any, mesh: Mesh, leaves: list[Leaf], rebuild: Callable):
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
        self.early: MapRun | None = None

    def result(self) -> Any:
        """Run it, and record it in the graph of the caller where that follows an argument or what f closes over."""
        if any(transformed(x) or _tangent(x) is not None for x in self.given):
            outs = MapFunction.apply(self, None, *self.given)
        else:
            run = self.forward(self.given)
            if not (run.inputs or run.leaves) or not self.flowing:
                return tree.unflatten(self.treedef, self.joined)
            outs = MapFunction.apply(self, run, *self.given, *run.leaves)
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

    def forward(self, given: Sequence[torch.Tensor]) -> MapRun:
        """Run all workers, each with a graph of its own; keeps the joined results."""
        mapped, mesh = self.mapped, self.mesh
        follow = torch.is_grad_enabled() or bool(self.moved)
        tracked = mapped.check or bool(self.moved)
        run = MapRun(self, bool(self.moved) or (follow and mapped.check))
        blocks = self._blocks(given)
        before = [(leaf, leaf.value._version) for leaf in self.leaves if isinstance(leaf.value, torch.Tensor)]
        local = thread_state(enabled=follow)

        def body(worker: Worker) -> BodyResults:
            seat = run.seat(worker.index)
            with _running(seat, worker, local):
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
        joined = joined_leaves(self.where, mesh, outcome, mapped.check, mapped._turns)
        self.joined = [self._leaving(x) for x in joined]
        self.specs = [x.layout if isinstance(x, PartitionedArray) else None for x in joined]
        self._settle(run)
        return run

    def _note_arguments(self, outcome: Any, blocks: list[Any]) -> None:
        """Note the tensors and arrays that this process, one of several, passed of its own: see `Mapped`."""
        mapped, mesh = self.mapped, self.mesh
        if not (outcome.replicas.alone and mapped.check and mesh.checks):
            return
        for leaf, block in zip(self.leaves, blocks, strict=True):
            if not isinstance(block, dict) or isinstance(leaf.value, PartitionedArray):
                continue
            (own,) = block.values()
            shape = f"{own.dtype}{[*leaf.value.shape]}, {leaf.spec}"
            record = Record(self.where, leaf.path, "", shape, 0, 0, None)
            note_argument(mesh, outcome.replicas, record, leaf.spec, borrowed(own), mapped._turns)
        note_closure(mesh, outcome.replicas, self.where, mapped.f, mapped._turns)

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
            with torch_threads(self.mesh.transport.threads()):
                return body(worker)

        clear_errors()
        shared = self.mesh.transport.name == "local" and self.mesh.size > 1
        if shared and "torch._dynamo" in sys.modules:
            # While one worker compiles a function another one may come to it, and runs it as it is meanwhile. torch,
            # whose flag for tracing is one for all threads, would take that for a function that traces itself.
            sys.modules["torch._dynamo"].config.error_on_nested_fx_trace = False
        with one_level() if shared else nullcontext():
            number = next_turn(self.mapped._turns, body.__name__)
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

    def _results(self, worker: Worker, run: MapRun, out: Any) -> BodyResults:
        """What a body returned, checked against out_specs: blocks to be joined, and what is differentiated of them."""
        mapped = self.mapped
        found, treedef = mapped._returned(out)
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
                blocks.append(mapped._result(worker, leaf._replace(value=borrowed(plain(x)))))
            else:
                ends.append(None)
                blocks.append(mapped._result(worker, leaf) if leaf.spec is not None else self._object(leaf))
        run.ends[worker.index] = ends
        return BodyResults(treedef, [x.path for x in found], [x.spec for x in found], blocks)

    def _promised(self, worker: Worker, leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
        """A result in the state that its spec says."""
        own = state_of_tensor(x)
        state = self.mapped._promised(worker, leaf, x.ndim, own)
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

    def _settle(self, run: MapRun) -> None:
        """Which results are differentiated: those that are on some worker; and what f closes over."""
        count = len(self.joined)
        mine = [[e is not None for e in ends] for ends in run.ends.values()]
        flags = [any(column) for column in zip(*mine, strict=True)] if count else []
        leaves = captured_leaves(self, run) if run.follows and any(flags) else []
        if run.follows and len(run.ends) < self.mesh.size:
            said = self.mesh.transport.share(dict.fromkeys(run.ends, flags))
            flags = [any(column) for column in zip(*said.values(), strict=True)]
        self.flowing = [k for k, flag in enumerate(flags) if flag]
        run.leaves = leaves

    # Back

    def pull(self, run: MapRun, gs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of the arguments and of what f closes over, given those of the results."""
        cotangents = [self.cut(g, self.specs[k]) for k, g in zip(self.flowing, gs, strict=True)]
        paths = [f"the gradient of {self.leaves[k].path}" for k in self.moved]
        paths += [f"the gradient of a tensor that f closes over, of shape {list(x.shape)}" for x in run.leaves]
        specs = [self.leaves[k].spec for k in self.moved] + [P()] * len(run.leaves)
        local = thread_state(enabled=False)

        def backward(worker: Worker) -> BodyResults:
            seat = run.seats[worker.index]
            with _running(seat, worker, local):
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
        joined = joined_leaves(self.where, self.mesh, outcome, self.mapped.check, self.mapped._turns)
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
        found, _ = self.mapped._returned(self.mapped.f(*args, **kwargs))
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
        mapped = type(self.mapped)(
            body, ([leaf.spec for leaf in self.leaves], specs), tuple(out_specs), self.mesh, self.mapped.check
        )
        mapped.where = self.where
        return list(mapped(values, others))


def _or_zeros(g: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """A derivative in the state of what it belongs to."""
    return stated(torch.zeros_like(plain(x)) if g is None else plain(g), state_of_tensor(x))


class MapRun:
    """What a forward run leaves for the way back.

    seats: the places of the workers. inputs: by worker, the leaves of its graph for the differentiated arguments.
    ends: by worker, the results of its graph, None where they are not differentiated. leaves: what f closes over.
    draws: the random generators of the workers.
    """

    def __init__(self, call: MapCall, follows: bool):
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


class MapFunction(Function):
    """A whole map as one node of the caller's graph."""

    @staticmethod
    def forward(call: MapCall, run: MapRun | None, *given: torch.Tensor) -> Any:
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
        call: MapCall = ctx.call
        again = torch.is_grad_enabled() and any(_followed(x) for x in (*given, *gs))
        if again or any(transformed(x) for x in gs) or not hasattr(key, "run"):
            found: Any = call.derivative(given, gs)
        else:
            found = call.pull(key.run, gs)
        return None, None, *found

    @staticmethod
    def jvp(ctx: Any, _call: Any, _run: Any, *tangents: Any) -> Any:
        call: MapCall = ctx.call
        given, tangents = ctx.saved_tensors[: len(call.moved)], tangents[: len(call.moved)]
        filled = [torch.zeros_like(x) if t is None else t for x, t in zip(given, tangents, strict=True)]
        return tuple(call.push(given, filled))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: MapCall, run: Any, *given: torch.Tensor) -> Any:
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
            one = MapCall(call.mapped, call.mesh, leaves, call.rebuild)
            one.moved, one.given = call.moved, [values[k] for k in call.moved]
            outs = MapFunction.apply(one, None, *one.given)
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


@contextmanager
def _running(seat: Seat, worker: Worker, settings: Callable[[], Any]) -> Iterator[None]:
    """What surrounds a body, and the backward of its graph, on a worker."""
    worker.frontend = FRONTEND
    with seat.occupied(worker), settings(), BodyMode() if worker.tracked else nullcontext():
        yield
