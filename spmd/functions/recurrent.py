"""Recurrent layers on arrays that lie anyhow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from spmd.errors import SpecError, describe
from spmd.functions.arguments import layer
from spmd.functions.dropouts import check_rate, dropped
from spmd.functions.layouts import check_dtypes
from spmd.functions.local import local, namespace
from spmd.functions.planned import Operand, is_split, run_layer
from spmd.functions.recurrent_packed import PackedRows
from spmd.functions.recurrent_plan import (
    Network,
    check_shapes,
    gates_joined,
    has_gates_apart,
    hidden_layout,
    inner_layout,
    lengths_layout,
    plan,
    run_network,
    split_layout,
    state_layout,
)
from spmd.global_ops.call import global_value
from spmd.layout import Layout, P, Spec
from spmd.tracebacks import api_boundary

__all__ = ["gru", "lstm", "rnn"]


@api_boundary
@layer
def rnn(
    x: Any,
    h0: Any,
    params: Mapping[str, Any],
    *,
    nonlinearity: str = "tanh",
    lengths: Any = None,
    batch_sizes: Sequence[int] | None = None,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
    microbatches: int | None = None,
    dropout: float = 0.0,
    key: Any = None,
) -> Any:
    """Layers of h_t = tanh(x_t W_ihᵀ + b_ih + h_(t-1) W_hhᵀ + b_hh), over the first dimension of x: `y, h = rnn(...)`.

    x: (time, batch, features). h0: (layers * directions, batch, hidden), or None for zeros. Arrays of NumPy, CuPy or
    PyTorch. nonlinearity: "tanh" or "relu".
    params: the parameters of torch.nn.RNN by their names, `dict(module.named_parameters())`: weight_ih_l0 of shape
    (hidden, features), weight_hh_l0, and bias_ih_l0 and bias_hh_l0 or no biases; _l1, ... of further layers;
    weight_ih_l0_reverse, ... of layers in both directions.
    lengths: (batch,), integers: the steps of each sequence; after them its state stays, and its outputs are zeros.
    batch_sizes: integers; x is the data of a torch PackedSequence, of shape (sum(batch_sizes), features), the rows of
    one step after those of another, longest sequence first; y is packed too. Without spec.
    Gives y, (time, batch, directions * hidden), the outputs of the last layer, and the last states h, as h0.

    spec: in a body, how the whole x is split. h0 and lengths lie as the batch of x does: h0 is P(None, b) where spec is
    P(t, b). w_spec: how the hidden features are split, P("model"): each worker has its features of all gates, blocks of
    shape (gates * features, in) or (gates, features, in), which arrays of (gates, hidden, in) have by P(None, "model");
    h0 and h are then P(None, b, "model"), y is P(t, b, "model"), or whole with two directions. Outside of bodies global
    arrays have their layouts. shape: of the whole x, if spec splits it evenly.
    microbatches: where spec splits time, into how many parts the batch is cut, so that workers overlap; None: as many
    as workers along time.
    dropout: the probability to drop an entry of the outputs of each layer but the last, as `dropout` does; key: of
    `spmd.random`, for dropout above 0. The entries are the same on every mesh, packed or not.

    Cost: a split batch sends nothing; backward one sum per parameter. With w_spec each step of each layer sends one
    all-gather of h, (batch, hidden), backward one reduce-scatter; inputs of further layers, and y of two directions,
    are gathered once. Where time is split, states go from worker to worker in microbatches + workers - 2 messages, of
    all layers together or with two directions of each, then the last states are summed. x on some of the workers is
    brought to all, split by the batch, and the result back. Under spmd.jit a step is recorded once.
    Adjoint: the same steps, and messages, in the opposite order.
    Raises SpecError and LayoutError for parameters, shapes and specs that do not fit. Source: as torch.nn.RNN; Elman,
    "Finding structure in time", 1990; Huang et al., "GPipe", 2019, for the pipeline.

        >>> params = {"weight_ih_l0": np.eye(1), "weight_hh_l0": np.eye(1)}
        >>> with spmd.Mesh(time=2):
        ...     x = spmd.put(np.array([1.0, -2.0, 3.0]).reshape(3, 1, 1), P("time"))
        ...     spmd.functions.rnn(x, None, params, nonlinearity="relu")[0][:, 0, 0]
        PartitionedArray([1., 0., 3.], dtype=float64, spec=P('time'))
    """
    where = "spmd.functions.rnn"
    if nonlinearity not in ("tanh", "relu"):
        raise SpecError.at(
            where, argument="nonlinearity", got=repr(nonlinearity), need='"tanh" or "relu"', mend='nonlinearity="tanh"'
        )
    net = _network(where, nonlinearity, params)
    y, h = _run(net, x, (h0,), params, lengths, batch_sizes, spec, w_spec, shape, microbatches, (dropout, key))
    return y, h


@api_boundary
@layer
def lstm(
    x: Any,
    state: Any,
    params: Mapping[str, Any],
    *,
    lengths: Any = None,
    batch_sizes: Sequence[int] | None = None,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
    microbatches: int | None = None,
    dropout: float = 0.0,
    key: Any = None,
) -> Any:
    """Layers of long short-term memory: `y, (h, c) = lstm(x, (h0, c0), params)`, as torch.nn.LSTM.

    i, f, o = sigmoid, g = tanh of x_t W_ihᵀ + b_ih + h_(t-1) W_hhᵀ + b_hh, in the order i, f, g, o;
    c_t = f c_(t-1) + i g; h_t = o tanh(c_t), or that times W_hrᵀ where params has weight_hr_l0, of shape
    (projected, hidden).

    state: (h0, c0), or None for zeros. params, lengths and all else: see `rnn`; weight_ih_l0 is (4 * hidden, features).
    With a projection h has `projected` features, which w_spec does not split: each step sends one all-reduce of h in
    place of the all-gather. Source: as torch.nn.LSTM; Hochreiter, Schmidhuber, "Long short-term memory", 1997; Sak et
    al., 2014, for the projection.

        >>> params = {"weight_ih_l0": np.zeros((8, 1)), "weight_hh_l0": np.zeros((8, 2))}
        >>> with spmd.Mesh(data=2):
        ...     x = spmd.ones((3, 2, 1), spec=P(None, "data"))
        ...     y, (h, c) = spmd.functions.lstm(x, (np.zeros((1, 2, 2)), np.ones((1, 2, 2))), params)
        >>> c
        PartitionedArray([[[0.125, 0.125],
                           [0.125, 0.125]]], dtype=float64, spec=P(None, 'data', None))
    """
    where = "spmd.functions.lstm"
    states = (None, None) if state is None else state
    if not isinstance(states, tuple | list) or len(states) != 2:
        raise SpecError.at(
            where, argument="state", got=describe(state), need="(h0, c0), or None", mend="lstm(x, (h0, c0), params)"
        )
    y, h, c = _run(
        _network(where, "lstm", params),
        x,
        tuple(states),
        params,
        lengths,
        batch_sizes,
        spec,
        w_spec,
        shape,
        microbatches,
        (dropout, key),
    )
    return y, (h, c)


@api_boundary
@layer
def gru(
    x: Any,
    h0: Any,
    params: Mapping[str, Any],
    *,
    lengths: Any = None,
    batch_sizes: Sequence[int] | None = None,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
    microbatches: int | None = None,
    dropout: float = 0.0,
    key: Any = None,
) -> Any:
    """Layers of gated recurrent units: `y, h = gru(x, h0, params)`, as torch.nn.GRU.

    r, z = sigmoid of x_t W_ihᵀ + b_ih + h_(t-1) W_hhᵀ + b_hh; n = tanh(x_t W_inᵀ + b_in + r (h_(t-1) W_hnᵀ + b_hn)), in
    the order r, z, n; h_t = (1 - z) n + z h_(t-1).

    params, lengths and all else: see `rnn`; weight_ih_l0 is (3 * hidden, features). Source: as torch.nn.GRU; Cho et
    al., "Learning phrase representations using RNN encoder-decoder", 2014.

        >>> params = {"weight_ih_l0": np.zeros((6, 1)), "weight_hh_l0": np.zeros((6, 2))}
        >>> with spmd.Mesh(data=2):
        ...     x = spmd.ones((3, 2, 1), spec=P(None, "data"))
        ...     y, h = spmd.functions.gru(x, np.ones((1, 2, 2)), params)
        >>> h
        PartitionedArray([[[0.125, 0.125],
                           [0.125, 0.125]]], dtype=float64, spec=P(None, 'data', None))
    """
    net = _network("spmd.functions.gru", "gru", params)
    y, h = _run(net, x, (h0,), params, lengths, batch_sizes, spec, w_spec, shape, microbatches, (dropout, key))
    return y, h


def _network(where: str, cell: str, params: Any) -> Network:
    """The layers that the names of the parameters tell."""
    if not isinstance(params, Mapping) or "weight_hh_l0" not in params:
        got = describe(params) if not isinstance(params, Mapping) else f"the names {', '.join(map(str, params))}"
        need, mend = "a dictionary with weight_ih_l0, weight_hh_l0, ...", "dict(module.named_parameters())"
        raise SpecError.at(where, argument="params", got=got, need=need, mend=mend)
    layers = 1
    while f"weight_hh_l{layers}" in params:
        layers += 1
    directions = 2 if "weight_hh_l0_reverse" in params else 1
    projected = cell == "lstm" and "weight_hr_l0" in params
    net = Network(where, cell, layers, directions, "bias_hh_l0" in params, projected)
    missing, unknown = set(net.names) - set(params), set(params) - set(net.names)
    if missing or unknown:
        raise SpecError.at(
            where,
            argument="params",
            got=f"without {', '.join(sorted(missing))}" if missing else f"with {', '.join(sorted(unknown))}",
            need=f"the parameters of {layers} layers in {directions} directions: {', '.join(net.names)}",
            mend="all parameters of one module of torch.nn, by their names",
        )
    for name in net.names:
        need = (2,) if name.startswith("weight_hr") else (1, 2) if name.startswith("bias") else (2, 3)
        if getattr(params[name], "ndim", None) not in need:
            raise SpecError.at(
                where,
                argument=f"params[{name!r}]",
                got=describe(params[name]),
                need=f"an array of {' or '.join(map(str, need))} dimensions",
                mend="weights (gates * hidden, in_features), or with the gates apart, (gates, hidden, in_features)",
            )
    return net


def _run(
    net: Network,
    x: Any,
    states: Sequence[Any],
    params: Mapping[str, Any],
    lengths: Any,
    batch_sizes: Sequence[int] | None,
    spec: Spec | None,
    w_spec: Spec | None,
    shape: Sequence[int] | None,
    microbatches: int | None,
    dropout: tuple[float, Any],
) -> Sequence[Any]:
    if batch_sizes is not None:
        rows = _packed_rows(net, x, batch_sizes, lengths, spec)
        padded, lengths = rows.padded(x), rows.lengths(x)
        y, *ends = _run(net, padded, states, params, lengths, None, None, w_spec, None, microbatches, dropout)
        return rows.packed(y), *ends
    _check(net, x, states, lengths, microbatches)
    check_dtypes(net.where, x, **dict(zip(("h0", "c0"), states, strict=False)))
    check_dtypes(net.where, x, **{f"params[{name!r}]": params[name] for name in net.names})
    rate, key = _checked_dropout(net, *dropout)
    weights = dict(params)
    if w_spec is not None:
        weights = {name: _gates_apart(net, name, w) for name, w in params.items()}
    weight = weights.pop("weight_hh_l0")
    split = w_spec is not None
    operands = [
        Operand("w_spec", weight, _weight_spec(net, w_spec, weight)),
        Operand("spec", x, spec, shape),
        Operand("h0", states[0], derive=partial(_state_layout, net, 0)),
        Operand("c0", states[1] if len(states) == 2 else None, derive=partial(_state_layout, net, 1)),
        Operand("lengths", lengths, derive=lambda before: lengths_layout(_batch(before))),
        Operand("key", key),
    ]
    operands += [
        Operand(f"params[{n!r}]", w, derive=partial(_parameter_layout, n, w, split))
        for n, w in ((n, weights[n]) for n in net.names if n in weights)
    ]
    if is_split(*operands):
        return run_layer(net.where, partial(plan, net, microbatches, rate), operands)
    return _run_local(net, x, states, lengths, params, rate, key)


def _checked_dropout(net: Network, rate: Any, key: Any) -> tuple[float, Any]:
    """The probability to drop an entry between layers, and the key; 0 and None without dropout."""
    check_rate(net.where, "dropout", rate)
    if not rate or net.layers == 1:
        return 0.0, None
    if key is None:
        got, need = f"None, for dropout={rate}", "a key of spmd.random, another one for each call"
        raise SpecError.at(net.where, argument="key", got=got, need=need, mend="key=spmd.random.key(0), dropout=0.0")
    return float(rate), key


def _run_local(
    net: Network, x: Any, states: Sequence[Any], lengths: Any, params: Mapping[str, Any], rate: float, key: Any
) -> Sequence[Any]:
    """The layers on this worker alone."""
    arrays = [params[name] for name in net.names]
    shapes = {name: tuple(a.shape) for name, a in zip(net.names, arrays, strict=True)}
    given = [None if a is None else tuple(a.shape) for a in (*states, *[None] * (2 - len(states)), lengths)]
    check_shapes(net, tuple(x.shape), shapes, *given)
    flat = [gates_joined(net, name, a) for name, a in zip(net.names, arrays, strict=True)]
    count, batch, zeros = net.layers * net.directions, x.shape[1], local(x, "recurrent").zeros
    first = [
        zeros(x, (count, batch, n)) if part is None else part
        for part, n in zip(states, net.features(shapes["weight_hh_l0"]), strict=False)
    ]
    drops = None
    if rate:
        features = net.directions * net.features(shapes["weight_hh_l0"])[0]
        ones = zeros(x, (net.layers - 1, *x.shape[:2], features)) + 1
        drops = dropped(net.where, ones, rate, key, None)
    outputs, ends = run_network(net, x, first, lengths, flat, drops=drops)
    return (namespace(x).concat(outputs, axis=2) if len(outputs) > 1 else outputs[0], *ends)


def _check(net: Network, x: Any, states: Sequence[Any], lengths: Any, microbatches: int | None) -> None:
    """Raise unless the operands have the dimensions of a recurrent layer."""
    shape = "shape (layers * directions, batch, features), or None"
    given = [("x", x, 3, "shape (time, batch, features)")]
    given += [(name, a, 3, shape) for name, a in zip(("h0", "c0"), states, strict=False) if a is not None]
    given += [] if lengths is None else [("lengths", lengths, 1, "an array of integers, of shape (batch,)")]
    for name, array, ndim, need in given:
        if getattr(array, "ndim", None) != ndim:
            mend = f"np.asarray({name}) of these dimensions; time is the first dimension of x: np.swapaxes(x, 0, 1)"
            raise SpecError.at(net.where, argument=name, got=describe(array), need=need, mend=mend)
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        raise SpecError.at(
            net.where,
            argument="microbatches",
            got=repr(microbatches),
            need="a positive integer, or None",
            mend="microbatches=4",
        )


def _packed_rows(net: Network, x: Any, batch_sizes: Any, lengths: Any, spec: Any) -> PackedRows:
    """Where the rows of packed data lie, checked."""
    sizes = tuple(int(n) for n in batch_sizes)
    falling = all(a >= b for a, b in itertools.pairwise(sizes)) and min(sizes, default=0) >= 0
    shape = None if getattr(x, "ndim", None) != 2 else tuple(x.shape)
    fits = shape is not None and shape[0] == sum(sizes) and global_value(x) is None
    if lengths is None and spec is None and falling and fits:
        return PackedRows(sizes)
    raise SpecError.at(
        net.where,
        argument="batch_sizes",
        got=f"{list(sizes)} for x, {describe(x)}, spec={spec}" + ("" if lengths is None else ", and lengths"),
        need="x of shape (sum(batch_sizes), features), sizes that do not grow, no lengths and no spec",
        mend="packed.data and packed.batch_sizes of torch; or x of shape (time, batch, features) and lengths",
    )


def _gates_apart(net: Network, name: str, block: Any) -> Any:
    """A block of a parameter with the gates as its first dimension."""
    gates = net.rule.gates
    if has_gates_apart(name, block.ndim):
        return block
    if block.shape[0] % gates:
        raise SpecError.at(
            net.where,
            argument=f"params[{name!r}]",
            got=f"a block of shape {list(block.shape)}",
            need=f"{gates} gates of each hidden feature of this worker: a multiple of {gates} rows",
            mend='spmd.put(w.reshape(gates, hidden, -1), P(None, "model")), and this block of it',
        )
    return namespace(block).reshape(block, (gates, block.shape[0] // gates, *block.shape[1:]))


def _weight_spec(net: Network, w_spec: Any, weight: Any) -> Spec | None:
    """The layout of weight_hh_l0 with the gates apart, from that of the hidden features."""
    if w_spec is None:
        return None
    if isinstance(w_spec, P) and len(w_spec.trimmed) <= 1:
        return P(None, *w_spec.trimmed)
    if isinstance(w_spec, Layout) and w_spec.spec is not None and len(w_spec.shape) == 1:
        shape = net.rule.gates, w_spec.shape[0], weight.shape[-1]
        return Layout(shape, P(None, *w_spec.spec), w_spec.axes, [None, w_spec.cuts[0], None])
    raise SpecError.at(
        net.where,
        argument="w_spec",
        got=describe(w_spec) if not isinstance(w_spec, P | Layout) else str(w_spec),
        need="a spec of the hidden features alone, or a Layout by such a spec",
        mend='w_spec=P("model")',
    )


def _batch(before: Sequence[Layout | None]) -> Layout:
    """The layout of x, by which the batch of states and lengths lies, from those of weight_hh_l0 and x."""
    weight, x = before[:2]
    assert weight is not None
    assert x is not None
    return x if x.spec is None else inner_layout(x, hidden_layout(weight)[0])


def _parameter_layout(name: str, block: Any, split: bool, before: Sequence[Layout | None]) -> Layout:
    weight = before[0]
    assert weight is not None
    if not split:
        return Layout(block.shape, P(), weight.axes)
    shape = block.shape[0], weight.shape[1], *block.shape[2:]
    return split_layout(name, shape, *hidden_layout(weight), weight.axes)


def _state_layout(net: Network, part: int, before: Sequence[Layout | None]) -> Layout:
    """The layout of h0 (part 0) or c0."""
    weight = before[0]
    assert weight is not None
    x, (names, cut) = _batch(before), hidden_layout(weight)
    shape = net.layers * net.directions, x.shape[1], net.features(weight.shape)[part]
    return state_layout(x, shape, () if part == 0 and net.projected else names, cut)
