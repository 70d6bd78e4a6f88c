"""Pipelines of stages with arrays: `spmd.training.pipeline`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.tracer import Array
from spmd.errors import SpecError, StateError
from spmd.mesh import Worker
from spmd.operators.at_root import LoneWorker
from spmd.operators.reduce import AxisName, _names, psum
from spmd.operators.root import Rooted, dtype_of
from spmd.training.pipelines.arguments import WHERE, check_floating, check_pipeline, check_step, checked_worker
from spmd.training.pipelines.array_stages import ArrayStages, axes_of, spread
from spmd.training.pipelines.batches import check_joined, joined, microbatches_of, sizes_of
from spmd.training.pipelines.exchange import Exchange, from_last
from spmd.training.pipelines.executor import Execution
from spmd.training.pipelines.schedules import Schedule, schedule_of
from spmd.training.sample_weights import SampleWeights
from spmd.transport.call import Call, Group

__all__ = ["Gradients", "Pipeline", "pipeline"]


class Gradients(NamedTuple):
    """The gradients of a step. params: as the parameters; those of stages of other workers are zeros. shared: of what
    all stages get, Invariant along the axis; None where there is none. x: of the batch, Rooted at the first worker;
    None unless it was asked for."""

    params: list[Any]
    shared: Any = None
    x: Any = None


class Pipeline:
    """Stages that work on microbatches one after the other: see `spmd.training.pipeline`.

    most: the most microbatches of which this process's latest step kept activations at a time, by worker.
    """

    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        axis_name: AxisName,
        microbatches: int,
        schedule: str,
        loss: Callable[..., Any] | None,
        reduction: str,
        loss_axis_name: AxisName | None,
    ):
        self.stages, self.axis_name, self.loss = list(stages), axis_name, loss
        self.microbatches, self.schedule = microbatches, schedule
        self.reduction, self.loss_axis_name = reduction, loss_axis_name
        self.most: dict[int, int] = {}

    def plan(self, workers: int, microbatches: int | None = None) -> Schedule:
        """The schedule on so many workers. microbatches: None: those of the pipeline."""
        virtual, rest = divmod(len(self.stages), workers)
        if rest or not virtual:
            raise SpecError.at(
                WHERE,
                argument="stages",
                got=f"{len(self.stages)} stages for {workers} workers along {self.axis_name!r}",
                need="as many stages on each worker",
                mend=f"{workers} stages, or a multiple with schedule='interleaved'",
            )
        return schedule_of(self.schedule, workers, microbatches or self.microbatches, virtual)

    def value_and_grad(
        self, params: Sequence[Any], x: Any, target: Any = None, *, shared: Any = None, of_input: bool = False
    ) -> tuple[Any, Gradients]:
        """The loss of a batch, and its gradients.

        params: for each stage a tree of its parameters; each worker needs those of its own stages only. x: the batch,
        which the first worker takes; target: what the last one gives to the loss. shared: parameters that all stages
        get, such as an embedding that the first and the last one use.
        Forward: loss(stage_n(... stage_0(x))), its mean or sum over microbatches; Invariant along the axis.
        Cost: a message from stage to stage for each microbatch, forward and back; one broadcast of the loss; one sum
        over the axis for each array of `shared`.
        """
        if self.loss is None:
            raise SpecError.at(
                WHERE, argument="loss", got="None", need="the loss of the last stage's output", mend="loss=f"
            )
        check_floating(params, shared)
        step = _Step(self, params, shared, x, target)
        step.stages.differentiates_input = of_input
        step.run()
        value = step.from_last(step.stages.total)
        summed = step.shared_sum() if shared is not None else None
        return value, Gradients(step.gradients(), summed, step.input_gradient() if of_input else None)

    def __call__(self, params: Sequence[Any], x: Any, *, shared: Any = None) -> Any:
        """The output of the last stage for a batch, Invariant along the axis. Microbatches are joined in dimension 0.

        Cost: a message from stage to stage for each microbatch, and one broadcast.
        """
        step = _Step(self, params, shared, x, None)
        step.stages.learns = False
        step.run()
        outputs = step.stages.outputs
        return step.from_last(
            step.stages.alone(lambda: _joined([outputs[k] for k in sorted(outputs)])) if outputs else None
        )


class _Step:
    """One run of a pipeline on one worker."""

    def __init__(self, pipeline: Pipeline, params: Sequence[Any], shared: Any, x: Any, target: Any):
        self.pipeline, self.params, self.shared, self.x = pipeline, params, shared, x
        self.worker: Worker = checked_worker()
        self.names = _names(pipeline.axis_name, "training.pipeline")
        self.group: Group = self.worker.group(self.names)
        self.schedule = pipeline.plan(self.group.size)
        length = check_step(params, shared, x, target, self.names, self.schedule.stages, self.group.size)
        alone = LoneWorker(self.worker, self.names, self._refused)
        self.stages = stages = ArrayStages(pipeline.stages, pipeline.loss, alone, self.names)
        stages.splits = self.schedule.splits_backward
        x, target = spread(x, self.names), spread(target, self.names)
        self.batch_axes = tuple(n for n in axes_of((x, target)) if n not in self.names)
        axes, option = frozenset(self.batch_axes), "loss_axis_name"
        sizes = sizes_of(length, pipeline.microbatches, not axes)
        self.schedule = pipeline.plan(self.group.size, len(sizes))
        stages.weights = SampleWeights(
            WHERE, option, sizes, axes, pipeline.loss_axis_name, (params, shared), pipeline.reduction
        )
        stages.inputs = microbatches_of(x, sizes)
        stages.targets = [None] * len(sizes) if target is None else microbatches_of(target, sizes)
        own = range(self.group.index, self.schedule.stages, self.group.size)
        everywhere = (*self.names, *self.batch_axes)
        stages.params = {s: spread(params[s], everywhere) for s in own}
        stages.shared = () if shared is None else (spread(shared, everywhere),)

    def _refused(self, axis: str, call: Call) -> StateError:
        return StateError.at(
            WHERE,
            argument="stages",
            got=f"{call} {call.source}, within a stage, which other workers along {axis!r} do not run",
            need="no collective along the axes of the pipeline",
            mend="use the other axes in stages; give what all stages use in `shared`",
        )

    def run(self) -> None:
        """Run the actions of this worker; add up gradients over the axes of the batch."""
        with Exchange(self.schedule, self.worker, self.group) as exchange:
            execution = Execution(self.schedule, self.group.index, self.stages, exchange)
            execution.run(not self.stages.learns)
            if self.stages.learns:
                self.stages.reduce(
                    {s: [self._missing(leaf) for leaf in tree.flatten(self.params[s])[0]] for s in self.stages.params}
                )
        self.pipeline.most[self.worker.index] = execution.most

    def _missing(self, leaf: Any) -> tuple[str, ...]:
        """The axes of the batch along which a parameter is one value."""
        held = leaf.block if type(leaf) is Rooted else leaf
        state = getattr(held, "state", None)
        return tuple(n for n in self.batch_axes if state is None or n not in state.varying)

    def from_last(self, value: Any) -> Any:
        """What the last worker has, on all of them."""
        message = None if self.group.index < self.group.size - 1 else self.stages.pack(value)
        sent = from_last(self.worker, self.group, message, sys._getframe(2))
        value = self.stages.unpack(sent)
        return tree.map(self._without_axes, value)

    def _without_axes(self, x: Any) -> Any:
        if type(x) is not Array or x.state is None:
            return x
        return self.worker.carrying(x.value, type(x.state)(x.state.varying - {*self.names}))

    def shared_sum(self) -> Any:
        """The gradient of what all stages get."""
        leaves, treedef = tree.flatten(self.shared)
        found = tree.flatten(self.stages.shared_gradients[0])[0]
        axes = [(*self.names, *self._missing(leaf)) for leaf in leaves]
        return tree.unflatten(treedef, [psum(g, names) for g, names in zip(found, axes, strict=True)])

    def gradients(self) -> list[Any]:
        """The gradients of the parameters of all stages, as they were given."""
        result = []
        for s, params in enumerate(self.params):
            if s in self.stages.params:
                found = tree.flatten(self.stages.gradients[s])[0]
            else:
                found = [None] * len(tree.flatten(params)[0])
            leaves, treedef = tree.flatten(params)
            result.append(tree.unflatten(treedef, [*map(self._as_given, leaves, found)]))
        return result

    def _as_given(self, leaf: Any, gradient: Any) -> Any:
        if gradient is None:
            held = leaf.block if type(leaf) is Rooted else leaf
            gradient = self.stages.alone(lambda: spread(np.zeros_like(held), self.names))
        if type(leaf) is not Rooted:
            return gradient
        return leaf.holding(self._without_axes(gradient))

    def input_gradient(self) -> Any:
        """The gradient of the batch, as Rooted values at the first worker."""
        found = self.stages.input_gradients
        leaves, treedef = tree.flatten(self.x)
        if found:
            blocks = tree.flatten(self.stages.alone(lambda: joined([found[k] for k in sorted(found)])))[0]
        else:
            blocks = [np.zeros((0,), dtype_of(leaf.block if type(leaf) is Rooted else leaf)) for leaf in leaves]
        handles = [
            Rooted(self._without_axes(block), tuple(leaf.shape), dtype_of(block), self.names, 0)
            for block, leaf in zip(blocks, leaves, strict=True)
        ]
        return tree.unflatten(treedef, handles)


def _joined(outputs: list[Any]) -> Any:
    """The outputs of microbatches as that of the batch."""
    leaves, structures = zip(*map(tree.flatten, outputs), strict=True)
    check_joined(structures, [[np.shape(leaf) for leaf in own] for own in leaves], WHERE)
    return joined(outputs)


def pipeline(
    stages: Sequence[Callable[..., Any]],
    axis_name: AxisName = "stage",
    *,
    microbatches: int = 8,
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b",
    loss: Callable[..., Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    loss_axis_name: AxisName | None = None,
) -> Pipeline:
    """Stages that lie on the workers along an axis, and work at the same time on the microbatches of a batch.

    stages: functions f(params, x) of the parameters of a stage and what the stage before gives, arrays of any shapes in
    tuples, lists and dicts; f(params, x, shared) where parameters are shared. Stage s is on the worker at place s
    modulo the workers along axis_name; a multiple of as many stages needs the schedule "interleaved". Stages may use
    collectives along other axes. microbatches: the pieces of a batch along dimension 0, as even as they go.
    schedule: "gpipe" keeps the activations of all microbatches, "1f1b" those of at most `workers - s` on worker s, and
    gives the same gradients; "zero_bubble" fills the time in which a worker would wait with gradients of parameters.
    loss: loss(y) or loss(y, target) of a microbatch at the last stage; reduction: whether it is a mean over the entries
    of dimension 0, or a sum. loss_axis_name: for "mean" the axes over which loss takes it, () for the worker's own
    samples; None: as in `spmd.training.accumulate`, those that split the samples and along which the result is one
    value, as that of `spmd.mean(errors, "data")` is. Shares of workers may differ in length, and be shorter than the
    microbatches: the value and gradients are those of the whole minibatch.

    Returns an object `step`: `step.value_and_grad(params, x, target)` in a body gives the loss and its gradients,
    `step(params, x)` the output of the last stage. Parameters may be Rooted, or vary along the axis, as those that
    `spmd.training.stage_specs` lays out.
    Cost: a message from stage to stage for each microbatch, forward and back. Nobody waits for a message to be taken
    while at most 16 of its own are on their way.
    For a mean over other axes one all-reduce of the counts, at the last stage.
    Raises SpecError for options and a schedule that do not fit, StateError where a stage uses a collective along the
    axis, where the batch varies along it, and where loss_axis_name must be said, LayoutError for samples and targets of
    different numbers, DifferentiationError within `spmd.grad` and for a loss that is no scalar, JitError within
    `spmd.jit`. An error in a stage has a note of its stage and microbatch.
    Source: Huang et al., GPipe (2019); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (2021).

        >>> step = spmd.training.pipeline([lambda w, x: w * x] * 2, microbatches=2, loss=np.mean)
        >>> def body(w, x):
        ...     value, grads = step.value_and_grad([w[0], w[0]], x)
        ...     return value, spmd.psum(grads.params[0], "stage")
        >>> with spmd.Mesh(stage=2):
        ...     [y.item() for y in spmd.map(body, (P("stage"), P()), P())(np.array([2.0, 3.0]), np.arange(4.0))]
        [9.0, 4.5]
    """
    check_pipeline(stages, microbatches, schedule, reduction)
    return Pipeline(stages, axis_name, microbatches, schedule, loss, reduction, loss_axis_name)
