"""Pipelines of stages that are modules: `spt.pipeline`."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from spmd.autodiff import tree
from spmd.bridge.torch.data_parallel import DataParallel
from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.pipelines.arguments import check_data, check_shared, check_tensors
from spmd.bridge.torch.pipelines.module_stages import ModuleStages
from spmd.bridge.torch.pipelines.sample_weights import TensorWeights, axes_of_batch, axes_of_leaf
from spmd.bridge.torch.pipelines.states import StageNames, gathered_states
from spmd.bridge.torch.pipelines.ties import Tie
from spmd.bridge.torch.pipelines.values import WHERE, Value, held_as, structured
from spmd.bridge.torch.rng import random_word, worker_generator
from spmd.bridge.torch.sharded import (
    Place,
    blocks_of,
    norm_of_gradients,
    norm_over,
    places_of,
    saves_whole,
    state_dict,
)
from spmd.bridge.torch.stale_optimizers import note_staged
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.tensor_state import plain, state_of_tensor
from spmd.bridge.torch.worker_context import device_of
from spmd.errors import SpecError, StateError, describe, message
from spmd.mesh import Worker, here
from spmd.operators.at_root import LoneWorker
from spmd.operators.partial_comm import whole_comm
from spmd.operators.root import Rooted
from spmd.state import state_of
from spmd.tracebacks import api_boundary
from spmd.training.pipelines.arguments import check_batch
from spmd.training.pipelines.batches import check_joined, microbatches_of, sizes_of
from spmd.training.pipelines.exchange import Exchange, from_last
from spmd.training.pipelines.executor import Execution
from spmd.training.pipelines.schedules import schedule_of
from spmd.transport.call import Call, Group

__all__ = ["Pipeline", "pipeline"]


class Pipeline(nn.Module):
    """Stages that work on microbatches at the same time: `spt.pipeline` makes it.

    A module with this worker's stages. `step.backward(x, target)` adds gradients to their parameters, `step(x)` is
    inference. most: the most microbatches of which the latest step kept activations at a time.

    `state_dict()` is collective: the states of all stages on every worker, with the names of the model that
    `spt.split_stages` cut; `stages.k.name` if two stages use one name. `load_state_dict` takes its own of that, and
    sends nothing. `spmd.save` writes each stage where it lies: a run goes on with any other number of stages.

        >>> def body(x):
        ...     step = spt.pipeline(torch.nn.Tanh(), "stage", microbatches=3)
        ...     return step(x)
        >>> with spmd.Mesh(stage=2):
        ...     spt.map(body, P(), P())(torch.zeros(5))
        tensor([0., 0., 0., 0., 0.])
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module | None],
        axis_name: str | Sequence[str],
        microbatches: int,
        schedule: str,
        loss: Callable[..., Any] | None,
        reduction: str,
        tied: Sequence[Sequence[tuple[int, str]]],
        loss_axis_name: str | Sequence[str] | None,
    ):
        super().__init__()
        worker = here(WHERE)
        self.axis_name = worker.mesh.names(axis_name, WHERE)
        group = worker.group(self.axis_name)
        modules = self._own_stages(stages, group)
        self.schedule = schedule_of(schedule, group.size, microbatches, self.n_stages // group.size, WHERE)
        check_shared(stages, self.schedule, tied)
        self.stages = nn.ModuleDict({str(k): m for k, m in modules.items()})
        self.loss, self.reduction, self.loss_axis_name, self.most = loss, reduction, loss_axis_name, 0
        self.ties = [Tie(holders, modules, self.schedule, self.axis_name) for holders in tied]
        self.names = StageNames(modules, self.ties, self.schedule, self.axis_name, worker)
        for tie in self.ties:
            tie.equalize(worker)
        self._note_stages()

    def _note_stages(self) -> None:
        if self.schedule.workers > 1:
            note_staged(self, self.axis_name)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        self._note_stages()

    def _own_stages(self, stages: Any, group: Group) -> dict[int, nn.Module]:
        """This worker's stages, by number."""
        if isinstance(stages, nn.Module) and not isinstance(stages, nn.ModuleList):
            self.n_stages = group.size
            return {group.index: stages}
        listed: list[Any] = list(stages) if isinstance(stages, list | tuple | nn.ModuleList) else []
        if not listed or len(listed) % group.size:
            raise SpecError.at(
                WHERE,
                argument="stages",
                got=f"{len(listed)} stages" if listed else describe(stages),
                need=f"a module, this worker's stage, or a list of all stages, as many on each of {group.size} workers",
                mend=f"spt.split_stages(model, {group.size})",
            )
        self.n_stages = len(listed)
        own = {k: listed[k] for k in range(group.index, len(listed), group.size)}
        for k, module in own.items():
            if not isinstance(module, nn.Module):
                raise TypeError(
                    message(
                        WHERE,
                        argument=f"stages[{k}]",
                        got=describe(module),
                        need="the module of a stage of this worker",
                        mend="None only stands for stages of other workers",
                    )
                )
        return own

    @property
    def modules_by_stage(self) -> dict[int, nn.Module]:
        """This worker's stages, by number."""
        return {int(k): module for k, module in self.stages.items()}

    @api_boundary
    def backward(
        self,
        x: Any,
        target: Any = None,
        *,
        scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
        of_input: bool = False,
    ) -> Any:
        """The loss of a batch, whose gradients are added to `.grad` of the parameters of all stages.

        x: the batch, tensors cut along dimension 0; the first worker takes it. target: what the last one gives to the
        loss, cut alike; None: the loss gets the output alone. scale: of what backward starts from, as `scaler.scale`,
        called on all workers; the loss is returned without it. of_input: return the gradient of x too, as Rooted values
        at the first worker.
        Forward: the mean or the sum over microbatches of loss(stage_n(... stage_0(x)), target); the same on all workers
        of the axis, without history.
        Cost: a message from stage to stage for each microbatch, forward and back; one broadcast of the loss. Gradients
        that `spt.data_parallel` sums are summed once, after the last microbatch.
        """
        if self.loss is None:
            raise SpecError.at(
                WHERE, argument="loss", got="None", need="the loss of the last stage's output", mend="loss=f"
            )
        if not of_input:
            check_data(x, "x")
        check_data(target, "target")
        step = _Step(self, x, target)
        step.stages.learns, step.stages.differentiates_input = True, of_input
        step.stages.splits_backward = self.schedule.splits_backward
        step.stages.loss, step.stages.scale = self.loss, scale
        if scale is not None and str(self.n_stages - 1) not in self.stages:
            scale(torch.zeros((), device=device_of(step.worker)))  # A scaler begins with its first loss.
        step.run()
        total = step.stages.total
        value = step.from_last(None if total is None else Value(0, [total], [False]))
        loss = value.tensors[0]
        return (loss, step.input_gradient()) if of_input else loss

    @api_boundary
    def forward(self, x: Any) -> Any:
        """The output of the last stage for a batch, without history, on all workers of the axis.

        Cost: a message from stage to stage for each microbatch, and one broadcast.
        """
        step = _Step(self, x, None)
        step.run()
        outputs = step.stages.outputs
        value = step.from_last(_joined([outputs[k] for k in sorted(outputs)]) if outputs else None)
        return structured(value.structure, value.tensors)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        stages = self.modules_by_stage.items() if recurse else ()
        found = {(k, name): p for k, m in stages for name, p in m.named_parameters("", True, remove_duplicate)}
        return self._renamed(prefix, found, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        stages = self.modules_by_stage.items() if recurse else ()
        found = {(k, name): b for k, m in stages for name, b in m.named_buffers("", True, remove_duplicate)}
        return self._renamed(prefix, found, remove_duplicate)

    def _renamed(self, prefix: str, found: dict[tuple[int, str], Any], once: bool) -> Iterator[tuple[str, Any]]:
        """Tensors by their names in the model. once: those that several stages use only at first."""
        seen: set[int] = set()
        for (k, name), x in found.items():
            if not once or id(x) not in seen:
                seen.add(id(x))
                yield f"{prefix}{'.' if prefix else ''}{self.names.full(k, name)}", x

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        """The states of all stages; with `spt.state_dict(module, whole=False)` those of this worker's."""
        worker = here(WHERE)
        with whole_comm(worker.comm).uncounted():
            stages = self.modules_by_stage.items()
            found = {k: state_dict(m) if saves_whole() else blocks_of(m, keep_vars) for k, m in stages}
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        for k, state in found.items():
            for key, values in getattr(state, "_metadata", {}).items():
                destination._metadata[f"{prefix}stages.{k}{'.' if key else ''}{key}"] = values
        if saves_whole():
            found = gathered_states(found, self.schedule, self.axis_name, worker, device_of(worker))
        for k, state in found.items():
            destination |= {f"{prefix}{name}": x for name, x in self.names.renamed(k, state).items()}
        own = {name: Place(w, p and f"{prefix}{p}") for name, (w, p) in self.names.places.items()}
        destination._places = places_of(destination) | {f"{prefix}{name}": place for name, place in own.items()}
        return destination

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take the states of this worker's stages out of those of all."""
        names = [name for name in self.names.places if f"{prefix}{name}" in state_dict]
        values = {name: state_dict.pop(f"{prefix}{name}") for name in names}
        for k in self.modules_by_stage:
            own = self.names.of_stage(k).items()
            state_dict |= {f"{prefix}stages.{k}.{name}": values[full] for full, name in own if full in values}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def norm_of_stages(self, p: float) -> torch.Tensor:
        """The p-norm of the gradients of all stages, for `spt.grad_norm`. Parameters that are tied count once."""
        worker = here(WHERE)
        copies = {id(copy) for tie in self.ties for copy in tie.copies}
        own = [parameter for parameter in self.parameters() if id(parameter) not in copies]
        with whole_comm(worker.comm).uncounted():
            norm = norm_of_gradients(own, p)
        return norm_over(self.axis_name, norm, p)


class _Step:
    """One run of a pipeline on one worker."""

    def __init__(self, pipeline: Pipeline, x: Any, target: Any):
        self.pipeline, self.names = pipeline, pipeline.axis_name
        self.worker: Worker = here(WHERE)
        self.group: Group = self.worker.group(self.names)
        check_tensors(x, target)
        length = check_batch(x, target, self.names, self.group.size, WHERE, axes_of_leaf)
        axes, everywhere = self._sample_axes((x, target))
        sizes = sizes_of(length, pipeline.schedule.microbatches, everywhere)
        plan = pipeline.schedule
        self.schedule = schedule_of(plan.name, plan.workers, len(sizes), plan.virtual, WHERE)
        self.stages = stages = ModuleStages(
            pipeline.modules_by_stage,
            self.schedule.stages - 1,
            LoneWorker(self.worker, self.names, self._refused),
        )
        self.x = x
        stages.weights = TensorWeights(
            WHERE, "loss_axis_name", sizes, axes, pipeline.loss_axis_name, (), pipeline.reduction
        )
        stages.inputs = microbatches_of(self._own(x), sizes)
        stages.targets = [None] * len(sizes) if target is None else microbatches_of(self._own(target), sizes)
        generator = worker_generator()
        if pipeline.training and generator is not None:
            stages.seed = random_word(generator)

    def _sample_axes(self, batch: Any) -> tuple[frozenset[str], bool]:
        """The axes along which samples differ, and whether there are none. Without states the loss must say those that
        matter to a mean; in a sum each counts."""
        named, mesh = self.pipeline.loss_axis_name, self.worker.mesh
        if self.worker.tracked:
            axes = axes_of_batch(batch).difference(self.names)
            return axes, not axes
        others = [n for n, size in mesh.axes.items() if size > 1 and n not in self.names]
        if named is not None:
            return frozenset(mesh.names(named, WHERE)), not others
        if others and self.pipeline.loss is not None and self.pipeline.reduction == "mean":
            raise StateError.at(
                WHERE,
                argument="loss_axis_name",
                got="None, in a body without states",
                need="the axes over which loss takes the mean: workers may have different numbers of samples",
                mend=f"loss_axis_name={others[0]!r}, or () for a mean of each worker's own samples",
            )
        return frozenset(others), not others

    def _own(self, x: Any) -> Any:
        """Tensors as this worker has them, along the axes of the pipeline of its own."""

        def own(leaf: Any) -> Any:
            block = leaf.block if type(leaf) is Rooted else leaf
            return held_as(plain(block).detach(), self._beside(block)) if isinstance(block, torch.Tensor) else block

        return tree.map(own, x)

    def _beside(self, x: torch.Tensor) -> list[str]:
        """The other axes along which a tensor varies."""
        return [n for n in state_of_tensor(x).varying if n not in self.names]

    def _refused(self, axis: str, call: Call) -> StateError:
        return StateError.at(
            WHERE,
            argument="stages",
            got=f"{call} {call.source}, within a stage, which other workers along {axis!r} do not run",
            need="no collective along the axes of the pipeline, nor tensors that vary along them",
            mend="use the other axes in stages; `tied` sums gradients of what two stages share",
        )

    def run(self) -> None:
        """Run the actions of this worker; then add up gradients of what other workers have too."""
        learns = self.stages.learns
        ties = self.pipeline.ties if learns else []
        syncs: list[Any] = []
        for tie in ties:
            tie.set_aside()
        with Exchange(self.schedule, self.worker, self.group) as exchange:
            execution = Execution(self.schedule, self.group.index, self.stages, exchange)
            with self._own_gradients(syncs) if learns else ExitStack():
                execution.run(not learns)
            for module in syncs:
                module.sum_gradients()
        for tie in ties:
            tie.add_up(self.worker)
        self.pipeline.most = execution.most

    @contextmanager
    def _own_gradients(self, syncs: list[Any]) -> Iterator[None]:
        """Inside, `spt.data_parallel` sends nothing. syncs: filled with the modules that are to sum their gradients."""
        with ExitStack() as stack:
            for module in self.pipeline.modules():
                if isinstance(module, DataParallel):
                    if module.sums_now():
                        syncs.append(module)
                    stack.enter_context(module.no_sync())
            yield

    def from_last(self, value: Value | None) -> Value:
        """What the last worker has, on all of them."""
        sent = None if value is None else self.stages.pack(value)
        block = from_last(self.worker, self.group, sent, sys._getframe(2))
        value = self.stages.unpack(block.copy())
        if not self.worker.tracked:
            return value
        return value._replace(tensors=[with_state(x, state_of(state_of_tensor(x).varying)) for x in value.tensors])

    def input_gradient(self) -> Any:
        """The gradient of the batch, as Rooted values at the first worker; None of integers."""
        leaves, treedef = tree.flatten(self.x)
        found = [tree.leaves(own) for _, own in sorted(self.stages.input_gradients.items())]
        result: list[Any] = []
        for k, leaf in enumerate(leaves):
            dtype = _dtype_of(leaf)
            if not (dtype.is_floating_point or dtype.is_complex):
                result.append(None)
                continue
            block = torch.cat([own[k] for own in found]) if found else torch.zeros(0, dtype=dtype)
            result.append(Rooted(block, tuple(leaf.shape), array_dtype(dtype), self.names, 0))
        return tree.unflatten(treedef, result)


def _dtype_of(leaf: Any) -> torch.dtype:
    return (leaf.block if type(leaf) is Rooted else leaf).dtype


def _joined(values: list[Value]) -> Value:
    """The outputs of microbatches as that of the batch."""
    shapes = [[tuple(x.shape) for x in value.tensors] for value in values]
    check_joined([value.structure for value in values], shapes, WHERE)
    columns = zip(*(value.tensors for value in values), strict=True)
    return values[0]._replace(tensors=[torch.cat([*column]) for column in columns])


@api_boundary
def pipeline(
    stages: nn.Module | Sequence[nn.Module | None],
    axis_name: str | Sequence[str] = "stage",
    *,
    microbatches: int = 8,
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b",
    loss: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    tied: Sequence[Sequence[tuple[int, str]]] = (),
    loss_axis_name: str | Sequence[str] | None = None,
) -> Pipeline:
    """Modules as stages on the workers along an axis, which work at the same time on the microbatches of a batch.

        step = spt.pipeline(spt.split_stages(model, 4), "stage", microbatches=8, loss=F.cross_entropy)
        optimizer = torch.optim.AdamW(step.parameters())
        for x, t in batches:
            optimizer.zero_grad()
            value = step.backward(x, t)
            optimizer.step()

    stages: a module, this worker's stage; or a list of all stages, of which each worker keeps its own, those at its
    place modulo the workers along axis_name. A stage is called with what the stage before returns: tensors of any
    shapes, in tuples, lists and dicts. It may use collectives along other axes, and be split by `spt.parallelize`.
    microbatches: the pieces of a batch along dimension 0, as even as they go, without empty ones where all workers have
    as many samples. Batch norms and the like see one after the other. Dropout draws by stage and microbatch: the same
    in each schedule, on any number of workers.
    schedule: "1f1b" keeps the activations of at most `workers - s` microbatches on worker s, "gpipe" those of all;
    "zero_bubble" fills the time in which a worker would wait with gradients of parameters; "interleaved" runs several
    stages on each worker. All give the same gradients.
    loss: loss(y) or loss(y, target) of a microbatch at the last stage; reduction: whether it is a mean over the entries
    of dimension 0, so that microbatches count by their lengths, or a sum. loss_axis_name: for "mean" the axes over
    which loss takes it, () for the worker's own samples; None: those that split the samples and along which the loss is
    one value, as that of `spt.mean(errors, "data")` is. With check=False it must be said where the mesh has other axes.
    tied: lists of parameters that are one, each as (stage, name): all get the value of the first, and the sum of their
    gradients. All need the same options of the optimiser. Stages of several workers may share no others.

    Returns a `spt.Pipeline`, a module. `spt.clip_grad_norm_(step, 1.0)` clips by the norm over all stages;
    `spt.data_parallel(stage, "data", varying="stage")` in a stage sums gradients over `data` once for each batch.
    Cost: a message from stage to stage for each microbatch, forward and back. Nobody waits for a message to be taken
    while at most 16 of its own are on their way. With "zero_bubble" one maximum of a number for each microbatch,
    over the workers of a stage.
    Raises SpecError for stages that do not fit, StateError where a stage uses a collective along the axis.
    Source: Huang et al., GPipe (2019); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (2021); Qi et
    al., Zero Bubble Pipeline Parallelism (2023).

        >>> def body(x):
        ...     stages = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
        ...     for stage in stages:
        ...         torch.nn.init.ones_(stage.weight)
        ...     step = spt.pipeline(stages, "stage", microbatches=2, loss=torch.mean)
        ...     return step.backward(x), spt.grad_norm(step)
        >>> with spmd.Mesh(stage=2):
        ...     spt.map(body, P(), P())(torch.ones(4, 2))
        (tensor(4.), tensor(2.8284, dtype=torch.float64))
    """
    if reduction not in ("mean", "sum"):
        raise SpecError.at(WHERE, argument="reduction", got=repr(reduction), need='"mean" or "sum"', mend='"mean"')
    return Pipeline(stages, axis_name, microbatches, schedule, loss, reduction, tied, loss_axis_name)
