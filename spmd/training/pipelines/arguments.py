"""Checks of what pipelines are given, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from spmd.autodiff import tree
from spmd.autodiff.tracer import Array
from spmd.autodiff.transform_arguments import kind_of, not_floating
from spmd.errors import DifferentiationError, JitError, LayoutError, MeshError, SpecError, StateError, describe
from spmd.mesh import WORKER, Worker
from spmd.operators.root import Rooted
from spmd.operators.varying import verify_one_value
from spmd.optim.numbers import varying_axes
from spmd.training.pipelines.batches import length_of
from spmd.training.pipelines.schedules import check_options

__all__ = [
    "WHERE",
    "check_batch",
    "check_floating",
    "check_pipeline",
    "check_place",
    "check_step",
    "check_untraced",
    "checked_worker",
]

WHERE = "spmd.training.pipeline"


def check_pipeline(stages: Sequence[Any], microbatches: Any, schedule: Any, reduction: Any) -> None:
    """Raise for options that no pipeline has."""
    if not isinstance(stages, list | tuple) or not stages or not all(map(callable, stages)):
        raise SpecError.at(
            WHERE,
            argument="stages",
            got=describe(stages),
            need="a list of functions f(params, x), one for each stage",
            mend="[f] * 4, for four stages of one function",
        )
    check_options(schedule, microbatches)
    if reduction not in ("mean", "sum"):
        raise SpecError.at(WHERE, argument="reduction", got=repr(reduction), need='"mean" or "sum"', mend='"mean"')


def checked_worker() -> Worker:
    """The worker that runs the calling body."""
    worker = WORKER.get()
    if worker is None:
        raise MeshError.at(
            WHERE,
            got="a step outside of any body",
            need="a body: each worker runs its own stages",
            mend="spmd.map(lambda params, x: step(params, x), in_specs=(specs, P()), out_specs=P()), "
            "with specs = spmd.training.stage_specs(params); step.value_and_grad in the same way",
        )
    if not worker.tracked:
        raise StateError.at(
            WHERE,
            got="a map with check=False: its arrays are bare",
            need="arrays that carry their state",
            mend="spmd.map(..., check=True)",
        )
    if worker.program is not None:
        raise JitError.at(
            WHERE,
            got="a call within spmd.jit",
            need="a body that runs each time: workers run different stages in different orders",
            mend="leave spmd.jit out",
        )
    return worker


def check_step(params: Any, shared: Any, x: Any, target: Any, names: tuple[str, ...], stages: int, workers: int) -> int:
    """The length of a batch. Raises for arguments of a step that a pipeline along these axes cannot take."""
    if not isinstance(params, list | tuple) or len(params) != stages:
        raise SpecError.at(
            WHERE,
            argument="params",
            got=describe(params),
            need=f"a list with the parameters of each of the {stages} stages",
            mend="[params_0, params_1, ...]; those of other workers' stages may be None",
        )
    for argument, value in (("params", params), ("shared", shared), ("x", x), ("target", target)):
        check_untraced(value, argument)
    for stage, own in enumerate(params):
        check_place(own, f"params[{stage}]", names, stage % workers)
    _check_same(shared, names)
    return check_batch(x, target, names, workers)


def check_batch(
    x: Any,
    target: Any,
    names: tuple[str, ...],
    workers: int,
    where: str = WHERE,
    varying: Callable[[Any], Collection[str]] = varying_axes,
) -> int:
    """The length of a batch. varying: gives the axes along which a leaf varies. Raises for batches that differ along
    these axes, and for targets of other samples."""
    for argument, value, place in (("x", x, 0), ("target", target, workers - 1)):
        check_place(value, argument, names, place, where)
        _check_unvaried(value, argument, names, place, where, varying)
    length = length_of(x, "x", where)
    if target is not None and length_of(target, "target", where) != length:
        raise LayoutError.at(
            where,
            argument="target",
            got=f"{length_of(target, 'target', where)} entries in dimension 0, and {length} of x",
            need="a target for each sample: both are cut into the same microbatches",
            mend="x and target of the same samples, such as x[indices] and y[indices]",
        )
    return length


def check_floating(params: Any, shared: Any) -> None:
    """Raise DifferentiationError for parameters that have no gradient."""
    for argument, value in (("params", params), ("shared", shared)):
        leaves = tree.flatten(value)[0]
        for k, leaf in enumerate(leaves):
            held = leaf.block if type(leaf) is Rooted else leaf
            if kind_of(held) not in ("f", "c"):
                path = lambda k=k, argument=argument, value=value: (
                    argument + "".join(f"[{p!r}]" for p in tree.paths(value)[k])
                )
                raise not_floating(held, WHERE, path, "or close over it in the stages")


def check_untraced(value: Any, argument: str) -> None:
    """Raise for arrays that a transformation around the pipeline differentiates."""
    for leaf in tree.flatten(value)[0]:
        held = leaf.block if type(leaf) is Rooted else leaf
        if type(held) is Array and held.tape is not None:
            raise DifferentiationError.at(
                WHERE,
                argument=argument,
                got=f"{describe(leaf)}, which is differentiated around the pipeline",
                need="arrays that are not: a pipeline computes gradients itself, microbatch by microbatch",
                mend="step.value_and_grad(params, x, target) without spmd.grad around it, in a body and outside of it; "
                "give what stages close over in `shared`, whose gradient is grads.shared",
            )


def check_place(value: Any, argument: str, names: tuple[str, ...], place: int, where: str = WHERE) -> None:
    """Raise for Rooted values that another worker holds."""
    for leaf in tree.flatten(value)[0]:
        if type(leaf) is Rooted and (leaf.axes, leaf.root) != (names, place):
            axis, library = names[0] if len(names) == 1 else names, where.partition(".")[0]
            raise StateError.at(
                where,
                argument=argument,
                got=describe(leaf),
                need=f"a value of the worker at place {place} along {axis!r}, which uses it",
                mend=f"{library}.keep(x, {axis!r}, {place}), or {library}.move(x, {axis!r}, {leaf.root}, {place})",
            )


def _check_unvaried(
    value: Any,
    argument: str,
    names: tuple[str, ...],
    place: int,
    where: str,
    varying: Callable[[Any], Collection[str]],
) -> None:
    for leaf in tree.flatten(value)[0]:
        if type(leaf) is Rooted:
            continue
        axes = [n for n in names if n in varying(leaf)]
        library = where.partition(".")[0]
        if axes:
            raise StateError.at(
                where,
                argument=argument,
                got=f"{describe(leaf)}, of which each worker along {axes[0]!r} has another one",
                need=f"one batch along {axes[0]!r}: x goes in at its first worker, target at its last",
                mend=f"leave {axes[0]!r} out of the specs of the batch, and of its Sampler: axis_name=() for whole "
                f"minibatches; {library}.keep(x, {axes[0]!r}, {place}) of what only this worker has to know",
            )
        verify_one_value(leaf, names, where, argument)


def _check_same(shared: Any, names: tuple[str, ...]) -> None:
    for leaf in tree.flatten(shared)[0]:
        varies = type(leaf) is Array and leaf.state is not None and not leaf.state.varying.isdisjoint(names)
        if varies or type(leaf) is Rooted:
            axis = names[0] if len(names) == 1 else names
            raise StateError.at(
                WHERE,
                argument="shared",
                got=describe(leaf),
                need=f"one value on all workers along {axis!r}: all stages get it",
                mend=f"spmd.replicate(x, {axis!r}) of a Rooted value; what one stage uses belongs to its params",
            )
