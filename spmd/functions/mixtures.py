"""Mixtures of experts: each token goes to a few of the experts that lie on the workers; losses that balance them."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.staging.recorder import is_slot
from spmd.autodiff.tracer import value_of
from spmd.errors import JitError, LayoutError, SpecError, StateError, describe
from spmd.functions.arguments import require_varying
from spmd.functions.expert_routes import Routes, accepted_counts, best_experts, plan_routes, sorted_choices
from spmd.functions.layouts import dtype_of, floating_operand
from spmd.functions.local import local, namespace
from spmd.functions.movement import varied
from spmd.functions.reductions import reduced
from spmd.functions.softmaxes import softmax
from spmd.global_ops.call import global_value
from spmd.kernels.cpu.chunks import accurate
from spmd.mesh import WORKER, here
from spmd.operators.all_to_all import RaggedAllToAll
from spmd.operators.apply import operate
from spmd.operators.base import Called, called_as
from spmd.operators.partial_comm import refusing_along
from spmd.operators.reduce import AxisName, in_dtype, psum, varying_of
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call

__all__ = ["experts", "load_balance_loss", "router_z_loss"]

_EXPERTS = "spmd.functions.experts"


@api_boundary
def experts(
    x: Any,
    gate: Any,
    fns: Callable[..., Any] | Sequence[Callable[[Any], Any]],
    axis_name: AxisName | None = None,
    k: int = 2,
    capacity: int | None = None,
    *,
    params: Any = None,
    renormalize: bool = True,
    token_axes: AxisName | None = None,
    out_features: int | None = None,
) -> Any:
    """A mixture of experts: each token is given to the k experts of its largest scores. Arrays of NumPy, CuPy, PyTorch.

    x: this worker's tokens, (tokens, features), of which there may be none. gate: their scores for all experts,
    (tokens, experts), before any softmax. Both vary over axis_name.
    fns: the experts of this worker, in the order of workers: functions of rows, (n, features) to (n, out_features).
    They may use collectives along other axes. Workers may have different numbers, or none: then what functions close
    over, if it is differentiated, varies over axis_name. Or one function of (params of an expert, rows), or a list, and
    params, a tree whose arrays count experts in dimension 0: so for order 2, or sums over axis_name, if one has none.
    axis_name: the axes along which the experts lie; None: all are here. k: how many experts a token is given to. Of
    equal scores the expert of the lowest index is chosen.
    capacity: how many tokens an expert takes, of all workers together: the first in the order of workers and tokens;
    None: all. A choice that is not taken contributes zero. token_axes: the axes that split the tokens among which
    capacity counts, major to minor; None: axis_name.
    renormalize: whether weights are the softmax over the k chosen scores, as by Shazeer et al., GShard and Mixtral (of
    k=1 they are 1, and have no gradient); else the chosen entries of the softmax over all scores, as in Switch.
    out_features: of the results of experts; None: as x.

    Forward: y_t = Σ_e w_te f_e(x_t) over the chosen experts e of token t; Varying, in the dtype of x. Adjoint: the
    cotangents go the same ways; the parameters of an expert get theirs where it lies.
    Cost: an all-gather of experts + 2 integers, over token_axes if there is a capacity; then one exchange of the rows
    that go to other workers, and one back. A list of functions within a derivative in neither x nor gate costs one
    all-gather more. Backward: the same two exchanges.
    Raises SpecError and LayoutError for arguments that do not fit, StateError for x or gate that do not vary over
    axis_name, JitError within spmd.jit. Source: Shazeer et al., "Outrageously large neural networks", 2017; Lepikhin et
    al., "GShard", 2021; Fedus, Zoph, Shazeer, "Switch transformers", 2022; Jiang et al., "Mixtral of experts", 2024.

        >>> w = np.array([[[1.0]], [[10.0]], [[100.0]]])  # of three experts
        >>> def body(x, gate, w):
        ...     return spmd.functions.experts(x, gate, lambda w, h: h @ w, "x", k=1, params=w)
        >>> x, gate = np.array([[1.0], [2.0], [3.0]]), np.eye(3)[[2, 0, 1]]
        >>> with spmd.Mesh(x=2), spmd.ledger() as log:
        ...     y = spmd.map(body, P("x"), P("x"))(x, gate, w)
        >>> y.numpy().ravel(), log.workers[0].messages
        (array([100.,   2.,  30.]), 3)
    """
    x, gate = _checked_tokens(x, gate)
    k = _checked_number(_EXPERTS, "k", k, 1, gate.shape[1], "experts")
    capacity = capacity if capacity is None else _checked_number(_EXPERTS, "capacity", capacity, 1)
    width = x.shape[1] if out_features is None else _checked_number(_EXPERTS, "out_features", out_features, 0)
    names = _split_axes(x, gate, axis_name)
    x = _varied_as(x, [gate, *tree.leaves(params)])  # the rows that an expert gets differ as the scores do
    calls, lib = _calls(fns, params, x), local(x, "mixtures")
    best = best_experts(lib.scores(gate), k)
    routes, told = _routes(lib, gate, best, calls, names, capacity, token_axes)
    y = _by_experts(lib, lib.rows(x, routes.choices // k), names, routes, calls, width, told)
    weights = _weights(lib, gate, best, routes, renormalize, dtype_of(x))
    return lib.weighted_sums(y, weights, routes.choices, x.shape[0], k)


def _checked_tokens(x: Any, gate: Any) -> tuple[Any, Any]:
    """x and gate, if they are blocks of the same tokens."""
    x, gate = floating_operand(_EXPERTS, "x", x), _checked_gate(_EXPERTS, gate)
    if global_value(x) is not None:
        raise _global_error(_EXPERTS, "x", x)
    if x.ndim != 2:
        need, mend = "two dimensions, (tokens, features)", "x.reshape(-1, x.shape[-1])"
        raise LayoutError.at(_EXPERTS, argument="x", got=describe(x), need=need, mend=mend)
    if gate.shape[0] != x.shape[0]:
        raise LayoutError.at(
            _EXPERTS,
            argument="gate",
            got=f"{describe(gate)} for {describe(x)}",
            need=f"scores of {x.shape[0]} tokens, (tokens, experts)",
            mend="gate = x @ w_gate, on this worker's tokens",
        )
    return x, gate


def _flat_gate(where: str, gate: Any) -> Any:
    """Scores of tokens, which lie in all dimensions but the last, as (tokens, experts)."""
    gate = floating_operand(where, "gate", gate)
    if global_value(gate) is None and gate.ndim > 2:
        gate = namespace(gate).reshape(gate, (math.prod(gate.shape[:-1]), gate.shape[-1]))
    return _checked_gate(where, gate)


def _checked_gate(where: str, gate: Any) -> Any:
    gate = floating_operand(where, "gate", gate)
    if global_value(gate) is not None:
        raise _global_error(where, "gate", gate)
    if gate.ndim != 2 or not gate.shape[1]:
        need, mend = "scores of an expert or more for each token, (tokens, experts)", "gate = x @ w_gate"
        raise LayoutError.at(where, argument="gate", got=describe(gate), need=need, mend=mend)
    return gate


def _global_error(where: str, argument: str, x: Any) -> SpecError:
    return SpecError.at(
        where,
        argument=argument,
        got=describe(x),
        need="a block, or a bare array",
        mend=f"call it in a body: spmd.map(lambda x, gate: {where}(...), in_specs=..., out_specs=...)",
    )


def _checked_number(where: str, argument: str, value: Any, low: int, high: int | None = None, of: str = "") -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        need = f"an integer from {low}" + ("" if high is None else f" to {high}, the number of {of}")
        raise SpecError.at(where, argument=argument, got=describe(value), need=need, mend=f"{argument}={low}")
    return number


def _split_axes(x: Any, gate: Any, axis_name: AxisName | None) -> tuple[str, ...]:
    _refuse_recording(_EXPERTS, gate)
    if axis_name is None:
        return ()
    require_varying(_EXPERTS, gate, axis_name)
    return require_varying(_EXPERTS, x, axis_name)


def _refuse_recording(where: str, gate: Any) -> None:
    """Raise where a program records the scores, whose values it does not have."""
    if is_slot(value_of(gate)):
        raise JitError.at(
            where,
            got="a call within spmd.jit",
            need="a body that runs each time: where tokens go depends on their values",
            mend="leave spmd.jit out, or record what is done before and after it in maps of their own",
        )


class _Told(NamedTuple):
    """What workers tell each other of their experts. is_trained: whether the functions of any are known to be trained.
    is_even: whether all workers have as many."""

    is_trained: bool
    is_even: bool


class _Calls(NamedTuple):
    """The experts of this worker. runs: functions of rows. leaves: the arrays of their stacked parameters."""

    runs: list[Callable[[Any], Any]]
    leaves: list[Any]
    functions: list[Any]


def _calls(fns: Any, params: Any, x: Any) -> _Calls:
    is_list = isinstance(fns, Iterable) and not callable(fns)
    functions: list[Any] = [*fns] if is_list else [fns]
    if params is None and is_list and all(map(callable, functions)):
        return _Calls(functions, [], functions)
    leaves, treedef = tree.flatten(params)
    lengths = {np.shape(value_of(leaf))[:1] for leaf in leaves}
    callables = all(map(callable, functions))
    if not callables or len(lengths) != 1 or not lengths <= ({(len(functions),)} if is_list else lengths - {()}):
        raise _calls_error(fns, len(functions) if is_list else None, leaves if callables else [])
    leaves, (count,) = [_varied_as(leaf, [x]) for leaf in leaves], lengths.pop()
    columns = [namespace(leaf).unstack(leaf) for leaf in leaves]
    parts = [tree.unflatten(treedef, [c[e] for c in columns]) for e in range(count)]
    functions = functions if is_list else functions * count
    return _Calls([_with_params(fn, part) for fn, part in zip(functions, parts, strict=True)], leaves, [])


def _calls_error(fns: Any, count: int | None, leaves: list[Any]) -> SpecError:
    if leaves:
        argument, mend = "params", "params=np.stack([...]) for each of them"
        got = f"arrays of shapes {[list(np.shape(value_of(a))) for a in leaves]}"
        got += "" if count is None else f" for {count} functions"
        need = "arrays with one entry in the first dimension for each expert of this worker"
    else:
        argument, got, mend = "fns", describe(fns), "fns=[fn] for one expert"
        need = "a list of functions of rows, one for each expert of this worker; or of (params, rows), and params"
    return SpecError.at(_EXPERTS, argument=argument, got=got, need=need, mend=mend)


def _varied_as(x: Any, others: Sequence[Any]) -> Any:
    """x in the state of others too: one sum over workers for all experts, however many are here."""
    worker = WORKER.get()
    if worker is None or not worker.tracked:
        return x
    axes = (*worker.mesh.axes,)
    missing = {n for other in others for n in varying_of(other, axes)} - {*varying_of(x, axes)}
    return varied(x, [n for n in axes if n in missing])


def _with_params(fn: Callable[[Any, Any], Any], part: Any) -> Callable[[Any], Any]:
    return lambda rows: fn(part, rows)


def _routes(
    lib: Any,
    gate: Any,
    best: np.ndarray,
    calls: _Calls,
    names: tuple[str, ...],
    capacity: int | None,
    token_axes: AxisName | None,
) -> tuple[Routes, _Told]:
    """Where rows go; and what workers tell each other. Collective."""
    count = gate.shape[1]
    order, counts = sorted_choices(best, count)
    own = np.array([len(calls.runs), lib.is_trained(calls.functions), *counts], np.int64)
    table, members, worker = own[None], [0], 0
    if names:
        table, members, worker = _exchanged(own, gate, names, capacity, token_axes, best.shape[1])
    accepted = accepted_counts(table[:, 2:], capacity)[members]
    experts_per_worker = table[members, 0]
    if experts_per_worker.sum() != count:
        raise LayoutError.at(
            _EXPERTS,
            argument="fns",
            got=f"{' + '.join(map(str, experts_per_worker))} experts on the workers",
            need=f"{count} in all, as gate of shape {list(gate.shape)} has scores for",
            mend="give each worker its own experts, no two the same",
        )
    routes = plan_routes(order, counts, accepted, experts_per_worker, worker)
    is_even = bool((experts_per_worker == experts_per_worker[0]).all())
    return routes, _Told(bool(table[members, 1].any()), is_even)


def _exchanged(
    own: np.ndarray, gate: Any, names: tuple[str, ...], capacity: int | None, token_axes: AxisName | None, k: int
) -> tuple[np.ndarray, list[int], int]:
    """The rows of all workers among which tokens are counted; which of them are of the workers along axis_name, and
    which of those is this one."""
    worker = here(_EXPERTS)
    group = worker.group(names)
    counted = group
    if token_axes is not None and capacity is not None:
        over = require_varying(_EXPERTS, gate, token_axes, "token_axes")
        if not {*names} <= {*over}:
            raise SpecError.at(
                _EXPERTS,
                argument="token_axes",
                got=repr(token_axes),
                need=f"axes that include {', '.join(map(repr, names))}, along which the experts lie",
                mend="the axes that split the tokens, as in their spec",
            )
        counted = worker.group(over)
    detail = f"k={k}, capacity={capacity}"
    call = Call(
        "functions.experts", counted.axes, own.dtype, own.shape, detail=detail, same_shape=True, frame=sys._getframe()
    )
    call.host = True
    table = np.stack([np.asarray(row) for row in worker.comm.all_gather(counted, call, own).wait()])
    return table, [counted.members.index(w) for w in group.members], group.index


def _by_experts(
    lib: Any, rows: Any, names: tuple[str, ...], routes: Routes, calls: _Calls, width: int, told: _Told
) -> Any:
    """What the experts of all workers make of the rows that this worker sends."""
    if not names:
        return _outputs(lib, rows, calls, routes.loads, width, told.is_trained)
    frame = sys._getframe()
    there = RaggedAllToAll(names, routes.pieces, routes.rows, called=Called("functions.experts"))
    back = called_as(there.H, Called("functions.experts", forward="the way back"))
    received = operate(there, rows, frame)
    worker = here(_EXPERTS)
    with lib.apart(worker) as axes, nullcontext() if told.is_even else refusing_along(worker, names, _refused):
        outs = _outputs(lib, received, calls, routes.loads, width, told.is_trained)
        if not told.is_even:
            _refuse_sums(axes(), names)
    if not calls.leaves and not all(lib.differentiated_by(received)):
        outs = lib.taking_part(outs, _agreed(lib.differentiated_by(outs), names))
    return operate(back, outs, frame)


def _refused(axis: str, call: Call) -> StateError:
    return StateError.at(
        _EXPERTS,
        argument="fns",
        got=f"{call} {call.source}, within an expert, where workers along {axis!r} have different numbers of experts",
        need=f"no collective along {axis!r}: workers with other experts do not make it",
        mend="call it before or after the experts; they may use collectives along other axes",
    )


def _refuse_sums(axes: set[str], names: tuple[str, ...]) -> None:
    """Raise where a derivative of this worker's experts would meet workers that have others, or none. axes: of the
    operators that are differentiated in experts."""
    for axis in names:
        if axis in axes:
            raise StateError.at(
                _EXPERTS,
                argument="fns",
                got=f"an expert that closes over a differentiated array, the same on all workers along {axis!r}, which "
                "have different numbers of experts",
                need=f"arrays that vary along {axis!r}: workers with other experts do not sum this gradient",
                mend=f"w = spmd.pvary(w, {axis!r}) before the experts; where a worker has none, one function of "
                "(params, rows), and params=w[first:last]",
            )


def _agreed(own: tuple[int, ...], names: tuple[str, ...]) -> list[int]:
    """Which differentiations the results of any worker's functions take part in: who has no expert does not know."""
    worker = here(_EXPERTS)
    group, flags = worker.group(names), np.array(own, np.int64)
    detail = "what is differentiated"
    call = Call(
        "functions.experts", names, flags.dtype, flags.shape, detail=detail, same_shape=True, frame=sys._getframe()
    )
    call.host = True
    return np.max([np.asarray(row) for row in worker.comm.all_gather(group, call, flags).wait()], axis=0).tolist()


def _outputs(lib: Any, received: Any, calls: _Calls, loads: tuple[int, ...], width: int, is_trained: bool) -> Any:
    """What this worker's experts make of the rows that they get."""
    xp, dtype, outs = namespace(received), dtype_of(received), []
    for k, (run, rows) in enumerate(zip(calls.runs, lib.parts(received, loads), strict=True)):
        try:
            outs.append(in_dtype(_checked_output(run(rows), rows, width), dtype))
        except Exception as error:
            if not hasattr(error, "peer"):  # it arose elsewhere: this expert was waiting
                error.add_note(f"raised in expert {k} of this worker, for {rows.shape[0]} rows")
            raise
    if outs:
        return xp.concat(outs, axis=0) if len(outs) > 1 else outs[0]
    # Without experts here the backward sweep still has to come by: the other workers wait for it.
    reached = [received, *(a for a in calls.leaves if kind_of_dtype(dtype_of(a)) in ("f", "c"))]
    return lib.nothing((0, width), received, reached, is_trained)


def _checked_output(out: Any, rows: Any, width: int) -> Any:
    shape: tuple[int, ...] = tuple(getattr(out, "shape", ()))
    if shape != (rows.shape[0], width):
        widths = shape[1:] if shape[:1] == tuple(rows.shape[:1]) else ()
        raise LayoutError.at(
            _EXPERTS,
            argument="fns",
            got=f"an expert that gives {describe(out)} for {describe(rows)}",
            need=f"shape {[rows.shape[0], width]}: a row of {width} features for each row",
            mend=f"out_features={widths[0]}" if len(widths) == 1 else "functions of rows, which may be none",
        )
    if dtype_of(out).kind == "c":
        need, mend = "real numbers: results have the dtype of x", "return np.real(y), or real and imaginary parts"
        raise SpecError.at(_EXPERTS, argument="fns", got=f"an expert that gives {describe(out)}", need=need, mend=mend)
    return out


def _weights(lib: Any, gate: Any, best: np.ndarray, routes: Routes, renormalize: bool, dtype: np.dtype) -> Any:
    """The weight of each row that is sent."""
    xp, (tokens, k), count = namespace(gate), best.shape, gate.shape[1]
    if renormalize:
        places = (np.arange(tokens)[:, None] * count + best).reshape(-1)
        weights = softmax(xp.reshape(lib.rows(xp.reshape(gate, (-1,)), places), (tokens, k)))
        indices = routes.choices
    else:
        weights, indices = softmax(gate), routes.choices // k * count + routes.experts
    return in_dtype(lib.rows(xp.reshape(weights, (-1,)), indices), dtype)


@api_boundary
def load_balance_loss(gate: Any, axis_name: AxisName | None = None, k: int = 2) -> Any:
    """A loss that is least where the tokens of all workers are spread evenly over experts: 1 there. Any library.

    gate: scores of this worker's tokens, (..., experts), before any softmax. axis_name: the axes that split the
    tokens; None: all are here. k: how many experts a token is given to, as in `experts`.

    Forward: E Σ_e f_e p_e, of E experts: f_e is the share of e among the k choices of all tokens, of which capacity
    drops none, and p_e the mean over all tokens of the softmax over all experts; Invariant along axis_name. Of no
    tokens it is NaN. Its derivative is that of p_e. Cost: one all-reduce of 2 E + 1 numbers.
    Raises as `experts`. Source: Fedus, Zoph, Shazeer, "Switch transformers", 2022, whose α is a factor before it;
    Shazeer et al., 2017.

        >>> gate = np.array([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
        >>> with spmd.Mesh(x=3):
        ...     loss = spmd.map(lambda g: spmd.functions.load_balance_loss(g, "x", k=1), P("x"), P())
        ...     loss(gate).round(3).item(), loss(gate[2:]).round(3).item()
        (1.25, 1.0)
    """
    where = "spmd.functions.load_balance_loss"
    gate = _flat_gate(where, gate)
    count = gate.shape[1]
    k = _checked_number(where, "k", k, 1, count, "experts")
    _refuse_recording(where, gate)
    names = () if axis_name is None else require_varying(where, gate, axis_name)
    lib, xp, dtype = local(gate, "mixtures"), namespace(gate), dtype_of(gate)
    _, chosen = sorted_choices(best_experts(lib.scores(gate), k), count)
    shares = xp.sum(in_dtype(softmax(gate), accurate(dtype)), axis=0)
    all_of = xp.concat([shares, lib.constants(np.array([*chosen, gate.shape[0]]), shares)], axis=0)
    all_of = psum(all_of, names) if names else all_of
    with np.errstate(invalid="ignore", divide="ignore"):  # of no tokens
        tokens = all_of[-1]
        loss = count * xp.sum((all_of[:count] / tokens) * (all_of[count:-1] / (k * tokens)))
    return in_dtype(loss, dtype)


@api_boundary
def router_z_loss(gate: Any, axis_name: AxisName | None = None) -> Any:
    """A loss that keeps scores small: the mean over the tokens of all workers of logsumexp(gate)². Any library.

    gate: scores of this worker's tokens, (..., experts), before any softmax. axis_name: the axes that split the
    tokens; None: all are here. The result is Invariant there; of no tokens it is NaN.

    Cost: one all-reduce of two numbers. Raises SpecError and LayoutError for other arrays, StateError for a gate that
    does not vary over axis_name. Source: Zoph et al., "ST-MoE: Designing stable and transferable sparse expert models",
    2022.

        >>> with spmd.Mesh(x=2):
        ...     loss = spmd.map(lambda g: spmd.functions.router_z_loss(g, "x"), P("x"), P())
        ...     loss(np.log([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])) / np.log(2.0) ** 2
        PartitionedArray(4.66666667, dtype=float64, spec=P())
    """
    where = "spmd.functions.router_z_loss"
    gate = _flat_gate(where, gate)
    z = local(gate, "mixtures").logsumexp(gate)
    return reduced(where, z * z, None, "mean", axis_name, argument="axis_name")
