"""A whole map as one node of the caller's graph, and the data that backward needs of a forward run."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from spmd.bridge.torch.function import Function
from spmd.bridge.torch.functorch import is_wrapped
from spmd.bridge.torch.worker_context import WorkerContext, WorkerGenerators

__all__ = ["MapFunction", "MapRun", "is_differentiated", "tangent_of"]


class MapRun:
    """The data that backward needs of a forward run.

    keeps_graphs: whether the map may be differentiated from outside. contexts: of the workers.
    inputs: by worker, the leaves of its graph for the differentiated arguments.
    outputs: by worker, the results of its graph, None if they are not differentiated.
    leaves: the tensors that f captures. generators: the random generators of the workers.
    """

    def __init__(self, call: Any, keeps_graphs: bool):
        self.call = call
        self.keeps_graphs = keeps_graphs
        self.contexts: dict[int, WorkerContext] = {}
        self.inputs: dict[int, list[torch.Tensor]] = {}
        self.outputs: dict[int, list[torch.Tensor | None]] = {}
        self.leaves: list[torch.Tensor] = []
        self.generators = WorkerGenerators()

    def context(self, index: int) -> WorkerContext:
        context = self.contexts[index] = WorkerContext(self.call.mesh, index)
        context.extra_leaves = []
        context.generators = self.generators
        return context


class MapFunction(Function):
    """A whole map as one node of the caller's graph."""

    @staticmethod
    def forward(call: Any, run: MapRun | None, *diff_values: torch.Tensor) -> Any:
        if run is None:
            run = call.forward(diff_values)
            call.own_run = run
        return tuple(call.results[k] for k in call.diff_results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, run, *diff_values = inputs
        ctx.call = call
        ctx.set_materialize_grads(not call.keeps_shards)  # torch would make whole zeros
        run = run if run is not None else call.own_run
        # torch frees the graphs of the workers together with what is saved here, when it frees the caller's graph.
        key = torch.empty(0)
        if run is not None:
            key.run = run  # type: ignore[attr-defined]
        ctx.save_for_backward(*diff_values, key)
        ctx.save_for_forward(*diff_values)

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor) -> Any:
        *diff_values, key = ctx.saved_tensors
        call: Any = ctx.call
        gs = tuple(call.filled(gs))
        differentiable = torch.is_grad_enabled() and any(is_differentiated(x) for x in (*diff_values, *gs))
        if differentiable or any(is_wrapped(x) for x in gs) or not hasattr(key, "run"):
            grads: Any = call.derivative(diff_values, gs)
        else:
            grads = call.run_backward(key.run, gs)
        return None, None, *grads

    @staticmethod
    def jvp(ctx: Any, _call: Any, _run: Any, *tangents: Any) -> Any:
        call: Any = ctx.call
        diff_values, tangents = ctx.saved_tensors[: len(call.diff_arguments)], tangents[: len(call.diff_arguments)]
        filled = [torch.zeros_like(x) if t is None else t for x, t in zip(diff_values, tangents, strict=True)]
        return tuple(call.run_jvp(diff_values, filled))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, run: Any, *diff_values: torch.Tensor) -> Any:
        """One run of the map per sample. For an empty batch, a run on zeros gives the shapes."""
        dims = in_dims[2:]
        samples = []
        if not info.batch_size:
            diff_values = tuple(
                x if d is None else x.new_zeros([1 if k == d else n for k, n in enumerate(x.shape)])
                for x, d in zip(diff_values, dims, strict=True)
            )
        for i in range(max(1, info.batch_size)):
            values = [leaf.value for leaf in call.leaves]
            for k, x, d in zip(call.diff_arguments, diff_values, dims, strict=True):
                values[k] = x if d is None else x.select(d, i)
            leaves = [leaf._replace(value=v) for leaf, v in zip(call.leaves, values, strict=True)]
            sample_call = type(call)(call.mapped, call.mesh, leaves, call.rebuild)
            sample_call.diff_arguments, sample_call.diff_values = (
                call.diff_arguments,
                [values[k] for k in call.diff_arguments],
            )
            outs = MapFunction.apply(sample_call, None, *sample_call.diff_values)
            for name in ("diff_results", "results", "treedef", "specs", "dtypes"):
                setattr(call, name, getattr(sample_call, name))
            sample_call._forget()
            samples.append(outs if isinstance(outs, tuple) else (outs,))
        stacks = (torch.stack(column)[: info.batch_size] for column in zip(*samples, strict=True))
        return tuple(stacks), (0,) * len(samples[0])


def is_differentiated(x: Any) -> bool:
    """Whether autograd records functions of an argument."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return False
    if is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled()):
        return True
    return tangent_of(x) is not None


def tangent_of(x: torch.Tensor) -> torch.Tensor | None:
    return forward_ad.unpack_dual(x).tangent if forward_ad._current_level >= 0 else None
