"""One call of a map: run the bodies, join the results, and run backward through the graphs of the workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from spmd.array import PartitionedArray, relayout
from spmd.autodiff import tree
from spmd.bridge.torch.captured_tensors import captured_leaves, lone_capture
from spmd.bridge.torch.compile_errors import clear_errors
from spmd.bridge.torch.frontend import FRONTEND
from spmd.bridge.torch.functorch import is_wrapped, shared_dual_level
from spmd.bridge.torch.interop import borrowed, tensor_of
from spmd.bridge.torch.map_function import MapFunction, MapRun, is_differentiated, tangent_of
from spmd.bridge.torch.rng import BodyMode
from spmd.bridge.torch.sharded_tensors.tensor import ShardedTensor, moved_like, of_array, relaid_blocks, sharded_layout
from spmd.bridge.torch.tensor import Tensor, varied_copy, with_state
from spmd.bridge.torch.tensor_state import is_partitioned, plain, state_of_tensor
from spmd.bridge.torch.thread_settings import autocast_state, thread_state, torch_threads, without_autocast
from spmd.bridge.torch.worker_context import WorkerContext
from spmd.device import contiguous
from spmd.errors import LayoutError, StateError, TransportError, describe
from spmd.layout import Layout, P
from spmd.map_arguments import note_argument
from spmd.map_results import BodyResults, joined_leaves, one_structure
from spmd.mesh import WORKER, Mesh, Worker
from spmd.replicas.closures import closed_arrays, note_closure
from spmd.replicas.compare import next_turn
from spmd.replicas.records import ReplicaRecord
from spmd.spec_trees import Leaf
from spmd.state import state_of


class MapCall:
    """One call of a map: its forward, its backward and its derivative along tangents.

    diff_arguments, diff_values: positions and values of the differentiated arguments. diff_results: positions of the
    differentiated results. specs, dtypes: the layouts and dtypes of the results. keeps_shards: whether results that
    their layouts split are sharded tensors, because an argument is one. captures_apart: whether f closes over leaves
    that some workers use alone.
    """

    def __init__(self, mapped: Any, mesh: Mesh, leaves: list[Leaf], rebuild: Callable):
        self.mapped = mapped
        self.mesh = mesh
        self.leaves = leaves
        self.rebuild = rebuild
        self.where = mapped.where
        self.diff_arguments = [
            k for k, leaf in enumerate(leaves) if leaf.spec is not None and is_differentiated(leaf.value)
        ]
        self.diff_values: list[torch.Tensor] = [leaves[k].value for k in self.diff_arguments]
        self.results: list[Any] = []
        self.treedef: Any = None
        self.diff_results: list[int] = []
        self.captures_apart = False
        self.specs: list[Layout | None] = []
        self.dtypes: list[Any] = []
        self.keeps_shards = any(sharded_layout(leaf.value) is not None for leaf in leaves)
        self.own_run: MapRun | None = None
        self.autocast = autocast_state()  # backward, which may run f again, is called outside of it

    def result(self) -> Any:
        """Run the map. Record it in the graph of the caller if an argument or a captured tensor is differentiated."""
        if any(is_wrapped(x) or tangent_of(x) is not None for x in self.diff_values):
            outs = MapFunction.apply(self, None, *self.diff_values)
        else:
            run = self.forward(self.diff_values)
            if not (run.inputs or run.leaves) or not self.diff_results:
                return tree.unflatten(self.treedef, self.results)
            outs = MapFunction.apply(self, run, *self.diff_values, *run.leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        results = list(self.results)
        for k, y in zip(self.diff_results, outs, strict=True):
            results[k] = y
        self._forget()
        return tree.unflatten(self.treedef, results)

    def _forget(self) -> None:
        """Drop the results: they hold their graph, which holds this call, and no collector sees that cycle."""
        self.results, self.own_run = [], None

    # Forward

    def forward(self, diff_values: Sequence[torch.Tensor]) -> MapRun:
        """Run all workers, each with its own graph. Keeps the joined results."""
        mapped, mesh = self.mapped, self.mesh
        grad_enabled = torch.is_grad_enabled() or bool(self.diff_arguments)
        tracked = mapped.check or bool(self.diff_arguments)
        run = MapRun(self, bool(self.diff_arguments) or (grad_enabled and mapped.check))
        blocks = self._blocks(diff_values)
        versions = [(leaf, _version(leaf.value)) for leaf in self.leaves if isinstance(leaf.value, torch.Tensor)]
        local = thread_state(enabled=grad_enabled)

        def body(worker: Worker) -> BodyResults:
            context = run.context(worker.index)
            with _running(context, worker, local):
                values = [b[worker.index] if isinstance(b, dict) else b for b in blocks]
                for k, leaf in enumerate(self.leaves):
                    if isinstance(blocks[k], dict):
                        values[k] = self._argument(values[k], leaf, k in self.diff_arguments, worker.tracked)
                run.inputs[worker.index] = [values[k] for k in self.diff_arguments]
                args, kwargs = self.rebuild(values)
                return self._results(worker, run, mapped.f(*args, **kwargs))

        outcome = self._execute(body, tracked)
        run.generators.leave()
        for leaf, version in versions:
            self._check_unchanged(leaf, version)
        self._note_arguments(outcome, blocks)
        self.treedef = one_structure(self.where, mesh, outcome)
        results = joined_leaves(self.where, mesh, outcome, mapped.check, mapped.turns)
        self.results = [self._result(x, self.keeps_shards) for x in results]
        self.dtypes = [getattr(x, "dtype", None) for x in self.results]
        self.specs = [x.layout if isinstance(x, PartitionedArray) else None for x in results]
        self._find_differentiated(run)
        return run

    def _note_arguments(self, outcome: Any, blocks: list[Any]) -> None:
        """Note the tensors and arrays that this process, one of several, passed: see `Mapped`."""
        mapped, mesh = self.mapped, self.mesh
        if not (outcome.replicas.distributed and mapped.check and mesh.checks):
            return
        for leaf, block in zip(self.leaves, blocks, strict=True):
            if not isinstance(block, dict) or isinstance(leaf.value, PartitionedArray):
                continue
            (own,) = block.values()
            shape = f"{own.dtype}{[*leaf.value.shape]}, {leaf.spec}"
            record = ReplicaRecord(self.where, leaf.path, "", shape)
            note_argument(mesh, outcome.replicas, record, leaf.spec, borrowed(own), mapped.turns)
        note_closure(tuple(mesh.axes), outcome.replicas, self.where, closed_arrays(mapped.f), mapped.turns)

    def _execute(self, body: Callable[[Worker], Any], tracked: bool) -> Any:
        if self.mesh.scheduler == "lockstep" and self.mesh.size > 1 and self.mesh.transport.name == "local":
            raise TransportError.at(
                self.where,
                got='a mesh with scheduler="lockstep"',
                need="threads: torch's own frames do not survive a switch of greenlets",
                mend='leave scheduler out, or Mesh(..., scheduler="threads")',
            )

        def limited(worker: Worker) -> Any:
            with torch_threads(self.mesh.transport.threads()):
                return body(worker)

        clear_errors()
        shared = self.mesh.transport.name == "local" and self.mesh.size > 1
        if shared and "torch._dynamo" in sys.modules:
            # While one worker compiles a function, another may run it uncompiled. torch has one tracing flag for all
            # threads, so it would mistake that for a function that traces itself.
            sys.modules["torch._dynamo"].config.error_on_nested_fx_trace = False
        with shared_dual_level() if shared else nullcontext():
            number = next_turn(self.mapped.turns, body.__name__)
            name = self.where, body.__name__
            return self.mesh.run(limited, tracked=tracked, scheduler="threads", number=number, name=name)

    def _blocks(self, diff_values: Sequence[torch.Tensor]) -> list[Any]:
        """For each argument its blocks by worker; the argument itself if it is not laid out."""
        values = [leaf.value for leaf in self.leaves]
        for k, x in zip(self.diff_arguments, diff_values, strict=True):
            values[k] = x
        return [
            x if leaf.spec is None or not hasattr(x, "shape") else self.split(x, leaf.spec)
            for leaf, x in zip(self.leaves, values, strict=True)
        ]

    def split(self, x: Any, spec: Any) -> dict[int, torch.Tensor]:
        """The blocks of an argument or a cotangent on the workers of this process; of a tensor they are views."""
        mesh = self.mesh
        if not isinstance(x, torch.Tensor | PartitionedArray):
            x = np.asarray(x) if isinstance(x, np.generic | list | tuple) else x
            x = tensor_of(x.copy() if isinstance(x, np.ndarray) else x)
        layout = mesh.layout(tuple(x.shape), spec)
        if isinstance(x, PartitionedArray):
            return {w: tensor_of(b.copy()) for w, b in relayout(x, layout).blocks.items()}
        if isinstance(x, ShardedTensor):
            return {w: b.detach() for w, b in relaid_blocks(x, layout).items()}
        x = x.detach()
        return {w: _block(x, layout, w) for w in mesh.local_workers}

    def _argument(self, x: torch.Tensor, leaf: Leaf, differentiated: bool, tracked: bool) -> torch.Tensor:
        """A block as an argument of the body: a leaf of the worker's graph if it is differentiated."""
        x = x.detach()
        if tracked:
            x = torch.Tensor._make_subclass(Tensor, x, differentiated)  # type: ignore[attr-defined]
            x._state = state_of(leaf.spec.varying)  # type: ignore[union-attr]
            return x
        return x.requires_grad_(differentiated)

    def _results(self, worker: Worker, run: MapRun, out: Any) -> BodyResults:
        """The results of a body, checked against out_specs. Stores the outputs of its graph in the run."""
        mapped = self.mapped
        returned, treedef = mapped.results.leaves(out)
        outputs: list[torch.Tensor | None] = []
        blocks = []
        for leaf in returned:
            x = leaf.value
            if is_partitioned(x):
                raise _partitioned_error(self.where, leaf)
            if isinstance(x, torch.Tensor) and leaf.spec is not None:
                if worker.tracked:
                    x = self._in_promised_state(worker, leaf, x)
                outputs.append(plain(x) if run.keeps_graphs and x.requires_grad else None)
                blocks.append(mapped.results.block(worker, leaf._replace(value=borrowed(plain(x)))))
            else:
                outputs.append(None)
                blocks.append(mapped.results.block(worker, leaf) if leaf.spec is not None else self._object(leaf))
        run.outputs[worker.index] = outputs
        return BodyResults(treedef, [x.path for x in returned], [x.spec for x in returned], blocks)

    def _in_promised_state(self, worker: Worker, leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
        """A result in the state that its spec says."""
        own = state_of_tensor(x)
        state = self.mapped.results.promised_state(worker, leaf, x.ndim, own)
        return x if state is own or not x.requires_grad else varied_copy(x, state)

    def _object(self, leaf: Leaf) -> Any:
        """A result with the out_spec None. A tensor must be Invariant and loses its state."""
        x = leaf.value
        if isinstance(x, Tensor):
            if x.state.varying:
                raise StateError.at(
                    self.where,
                    argument=leaf.path,
                    got=f"{describe(x)}, with the out_spec None",
                    need="an object that is equal on all workers",
                    mend="give it a spec: P() for one value, P(axis) for a block per worker",
                )
            return plain(x).detach()
        return x

    def _result(self, x: Any, keeps_shards: bool) -> Any:
        """A joined result as a plain tensor, whole on every process. keeps_shards: as it lies, if that splits it."""
        if not isinstance(x, PartitionedArray):
            return x
        if keeps_shards and not (x.layout.has_copies and x.layout.copies == "varying"):
            x = x.reduced
            if x.layout.varying:
                return of_array(x)
        whole = x.gathered() if self.mesh.places is not None else x.numpy()
        return tensor_of(whole.copy())

    def _check_unchanged(self, leaf: Leaf, version: int) -> None:
        if _version(leaf.value) != version:
            raise StateError.at(
                self.where,
                argument=leaf.path,
                got="a tensor that the body has written to: workers share its memory, and the caller's was changed",
                need="a body that leaves its arguments as they are",
                mend="x = x.clone() in the body, or write a new tensor: y = x + 1 in place of x += 1",
            )

    def _find_differentiated(self, run: MapRun) -> None:
        """Find the results that are differentiated on any worker, and the tensors that f captures."""
        count = len(self.results)
        on_workers = [[e is not None for e in outputs] for outputs in run.outputs.values()]
        flags = [any(column) for column in zip(*on_workers, strict=True)] if count else []
        leaves, self.captures_apart = captured_leaves(self, run) if run.keeps_graphs and any(flags) else ([], False)
        if run.keeps_graphs and len(run.outputs) < self.mesh.size:
            own = flags, len(leaves), self.captures_apart
            shared = [*self.mesh.transport.share(dict.fromkeys(run.outputs, own)).values()]
            flags = [any(column) for column in zip(*(of_worker for of_worker, _, _ in shared), strict=True)]
            self.captures_apart = any(apart for _, _, apart in shared) or len({count for _, count, _ in shared}) > 1
        self.diff_results = [k for k, flag in enumerate(flags) if flag]
        run.leaves = leaves

    # Backward

    def run_backward(self, run: MapRun, gs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of the arguments and of captured tensors, from those of the results."""
        cotangents = [self.split(g, self.specs[k]) for k, g in zip(self.diff_results, gs, strict=True)]
        paths = [f"the gradient of {self.leaves[k].path}" for k in self.diff_arguments]
        paths += [f"the gradient of a tensor that f closes over, of shape {list(x.shape)}" for x in run.leaves]
        specs = [self.leaves[k].spec for k in self.diff_arguments] + [P()] * len(run.leaves)
        local = thread_state(enabled=False, autocast=False)  # in the dtypes of the forward pass

        def backward(worker: Worker) -> BodyResults:
            context = run.contexts[worker.index]
            with _running(context, worker, local):
                outputs, wrt = run.outputs[worker.index], [*run.inputs[worker.index], *run.leaves]
                grads = _gradients(
                    [(outputs[k], c[worker.index]) for k, c in zip(self.diff_results, cotangents, strict=True)],
                    wrt,
                    context.extra_leaves or [],
                )
                blocks = [
                    contiguous(borrowed(plain(torch.zeros_like(x) if g is None else g)))
                    for g, x in zip(grads, wrt, strict=True)
                ]
                return BodyResults(None, paths, specs, blocks)

        outcome = self._execute(backward, True)
        results = joined_leaves(self.where, self.mesh, outcome, self.mapped.check, self.mapped.turns)
        values = [*self.diff_values, *run.leaves]
        grads = [self._result(g, sharded_layout(x) is not None) for g, x in zip(results, values, strict=True)]
        return self._laid_out_as(grads, values)

    def _laid_out_as(self, grads: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Gradients laid out as the values that they belong to."""
        return [moved_like(g, sharded_layout(x), self.mesh) for g, x in zip(grads, values, strict=True)]

    def filled(self, gs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Cotangents of the results, zeros for None. They lie as the results do. Raises where a captured leaf, which
        some workers use alone, would get no gradient."""
        if self.captures_apart:
            raise lone_capture(self)
        return [self._zeros(k) if g is None else g for k, g in zip(self.diff_results, gs, strict=True)]

    def _zeros(self, k: int) -> torch.Tensor:
        layout, dtype = self.specs[k], self.dtypes[k]
        assert layout is not None
        if not (self.keeps_shards and layout.varying):
            return torch.zeros(layout.shape, dtype=dtype, device=self.mesh.device)
        zeros = lambda w: torch.zeros(layout.block_shape(w), dtype=dtype, device=self.mesh.device)
        return ShardedTensor(self.mesh.shared(layout, zeros), layout, self.mesh)

    def derivative(self, diff_values: Sequence[torch.Tensor], gs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients as results of a map of arguments and cotangents, so that they can be differentiated."""
        diff_arguments, captured = self.diff_arguments, list(diff_values[len(self.diff_arguments) :])

        def body(arguments: list, cotangents: list) -> tuple:
            with torch.enable_grad(), without_autocast():
                outputs, wrt = self._graph(arguments, captured)
                pairs = [(plain(e), plain(g)) for e, g in zip(outputs, cotangents, strict=True)]
                grads = _gradients(pairs, wrt, [], differentiable=True)
            return tuple(_or_zeros(g, x) for g, x in zip(grads, wrt, strict=True))

        out_specs = [self.leaves[k].spec for k in diff_arguments] + [P()] * len(captured)
        grads = self._map_with(body, diff_values, list(gs), [self.specs[k] for k in self.diff_results], out_specs)
        return self._laid_out_as(grads, diff_values)

    def run_jvp(self, diff_values: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tangents of the results, as results of a map of the arguments and their tangents. The pullback is linear
        in the cotangents, so the pullback of the pullback is the derivative."""

        def body(arguments: list, tangents: list) -> tuple:
            with torch.enable_grad(), without_autocast():
                outputs, wrt = self._graph(arguments, [])
                zeros = [torch.zeros_like(plain(e)).requires_grad_() for e in outputs]
                grads = _gradients(
                    [(plain(e), v) for e, v in zip(outputs, zeros, strict=True)], wrt, [], differentiable=True
                )
                pairs = [(g, plain(t)) for g, t in zip(grads, tangents, strict=True) if g is not None]
                tangents_out = _gradients(pairs, zeros, [], differentiable=True)
            return tuple(_or_zeros(t, e) for t, e in zip(tangents_out, outputs, strict=True))

        specs = [self.leaves[k].spec for k in self.diff_arguments]
        return self._map_with(body, diff_values, list(tangents), specs, [self.specs[k] for k in self.diff_results])

    def _graph(self, arguments: list, captured: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """In a body: the differentiated results of f, and the tensors that they are differentiated by."""
        values = list(arguments)
        for k in self.diff_arguments:
            if not values[k].requires_grad:
                values[k] = values[k].detach().requires_grad_()
        args, kwargs = self.rebuild(values)
        with self.autocast():
            returned, _ = self.mapped.results.leaves(self.mapped.f(*args, **kwargs))
        worker = WORKER.get()
        assert worker is not None
        return [self._in_promised_state(worker, returned[k], returned[k].value) for k in self.diff_results], [
            *(values[k] for k in self.diff_arguments),
            *captured,
        ]

    def _map_with(
        self, body: Callable, diff_values: Sequence[torch.Tensor], others: list, specs: list, out_specs: list
    ) -> list:
        """Run a map of the arguments and of other values."""
        values = [leaf.value for leaf in self.leaves]
        for k, x in zip(self.diff_arguments, diff_values, strict=False):
            values[k] = x
        mapped = type(self.mapped)(
            body,
            ([leaf.spec for leaf in self.leaves], specs),
            tuple(out_specs),
            self.mesh,
            self.mapped.check,
            self.where,
        )
        return list(mapped(values, others))


def _or_zeros(g: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """A derivative in the state of its primal."""
    return with_state(torch.zeros_like(plain(x)) if g is None else plain(g), state_of_tensor(x))


def _version(x: torch.Tensor) -> int:
    """How often a tensor, or a block of it, was written to."""
    return sum(b._version for b in x.blocks.values()) if isinstance(x, ShardedTensor) else x._version


def _partitioned_error(where: str, leaf: Leaf) -> LayoutError:
    return LayoutError.at(
        where,
        argument=leaf.path,
        got=describe(leaf.value),
        need="a tensor of this worker: the block, or the whole",
        mend="p.block() with the spec of p, or p.whole() with P()",
    )


def _block(x: torch.Tensor, layout: Layout, worker: int) -> torch.Tensor:
    if x.ndim:
        return x[layout.slices(worker)]
    return x if layout.positions(worker) is not None else x.new_zeros(layout.block_shape(worker) or (0,))


def _gradients(
    pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor]],
    wrt: Sequence[torch.Tensor],
    extra_leaves: Sequence[torch.Tensor],
    differentiable: bool = False,
) -> list[torch.Tensor | None]:
    """The gradients with respect to `wrt`. Those of extra leaves make backward run all collectives."""
    outputs = [(e, g) for e, g in pairs if e is not None and e.requires_grad]
    if not outputs:
        return [None] * len(wrt)
    grads = torch.autograd.grad(
        [e for e, _ in outputs],
        [*wrt, *extra_leaves],
        [g.to(e.dtype) for e, g in outputs],
        allow_unused=True,
        retain_graph=True,
        create_graph=differentiable,
    )
    return list(grads[: len(wrt)])


@contextmanager
def _running(context: WorkerContext, worker: Worker, settings: Callable[[], Any]) -> Iterator[None]:
    """The context of a body, and of the backward of its graph, on a worker."""
    worker.frontend = FRONTEND
    with context.active(worker), settings(), BodyMode() if worker.tracked else nullcontext():
        yield
