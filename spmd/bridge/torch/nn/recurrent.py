"""Recurrent layers of torch, and their cells, with hidden features, the batch or time split over workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from spmd.bridge.torch import functions
from spmd.bridge.torch.dropout import drawn_key
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer
from spmd.errors import SpecError, describe
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]


_FEATURES = "hidden features"


class _Recurrent(Layer):
    """What recurrent layers and cells have in common: each parameter has its gates side by side in its rows."""

    _spec_names = "spec", "w_spec"
    hidden_size: int
    proj_size: int = 0

    def _checked_spec(self, where: str, name: str, spec: Any) -> Any:
        if name == "microbatches":
            return spec
        spec = super()._checked_spec(where, name, spec)
        if name == "w_spec" and not _is_of_features(spec):
            need, mend = "a spec of the hidden features alone, or a Layout by such a spec", 'w_spec=P("model")'
            raise SpecError.at(where, argument=name, got=str(spec), need=need, mend=mend)
        return spec

    @property
    def _gates(self) -> int:
        return 4 if isinstance(self, nn.LSTM | nn.LSTMCell) else 3 if isinstance(self, nn.GRU | nn.GRUCell) else 1

    def _unpacked(self, name: str) -> Sequence[int] | None:
        if self._gates == 1 or name.startswith("weight_hr") or self._specs["w_spec"] is None:
            return None
        return (self._gates, self.hidden_size, *getattr(self, name).shape[1:])

    def _layouts(self) -> dict[str, LayoutLike]:
        return {name: self._layout(name, p) for name, p in self._parameters.items() if p is not None}

    def _layout(self, name: str, p: torch.Tensor) -> LayoutLike:
        """How a parameter lies: with the gates apart, unless there is one, or none."""
        w_spec = self._specs["w_spec"]
        projects = name.startswith("weight_hr")  # of which the hidden features are the second dimension
        before = () if self._gates == 1 and not projects else (None,)
        if w_spec is None:
            return P()
        if isinstance(w_spec, P):
            return P(*before, *w_spec.trimmed)
        shape = tuple(p.shape) if not before or projects else (self._gates, self.hidden_size, *p.shape[1:])
        cuts: list[Any] = [None] * len(shape)
        cuts[len(before)] = w_spec.cuts[0]
        return Layout(shape, P(*before, *w_spec.spec.trimmed), w_spec.axes, cuts)

    def _split_parameters(self) -> None:
        super()._split_parameters()
        w_spec = self._specs["w_spec"]
        if isinstance(w_spec, P):
            w_spec = Layout((self.hidden_size,), w_spec, here(f"spt.nn.{self._class_name}").mesh.axes)
        if w_spec is not None:
            self._lies[_FEATURES] = w_spec, w_spec

    def _run(self, x: torch.Tensor, state: Any, params: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        """Outputs and last states of x, (time, batch, features)."""
        w_spec = self._layout_of_parameter(_FEATURES) if self._split else None
        if self._gates > 1:
            function: Any = functions.lstm if self._gates == 4 else functions.gru
            return function(x, state, params, w_spec=w_spec, **options)
        return functions.rnn(x, state, params, w_spec=w_spec, nonlinearity=self.nonlinearity, **options)  # type: ignore[arg-type]


def _is_of_features(spec: Any) -> bool:
    if isinstance(spec, P):
        return len(spec.trimmed) <= 1
    return isinstance(spec, Layout) and spec.spec is not None and len(spec.shape) == 1


def _each(function: Callable[[Any], Any], state: Any) -> Any:
    """A function of h, or of h and c."""
    return tuple(map(function, state)) if isinstance(state, tuple | list) else function(state)


class _Layers(_Recurrent):
    """Recurrent layers. See `RNN`."""

    _spec_names = "spec", "w_spec", "microbatches"

    def flatten_parameters(self) -> None:
        """Nothing: parameters are blocks, and no kernel of cuDNN takes them."""

    def _init_flat_weights(self: Any) -> None:
        """torch's list of the weights; without weak references, as of a tensor with one nothing can be parametrized."""
        self._flat_weights = [getattr(self, name, None) for name in self._flat_weights_names]
        self._flat_weight_refs = [None] * len(self._flat_weights)

    def _split_parameters(self: Any) -> None:
        super()._split_parameters()
        self._init_flat_weights()

    def _torch_module(self, filled: bool = False) -> Any:
        module = super()._torch_module(filled)
        module._init_flat_weights()
        return module

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.ndim not in (2, 3) or (hx is not None and any(h.ndim != input.ndim for h in _states(hx))):
            raise SpecError.at(
                f"spt.nn.{self._class_name}",
                argument="input" if input.ndim not in (2, 3) else "hx",
                got=describe(input) if input.ndim not in (2, 3) else f"{describe(hx)} for {describe(input)}",
                need="three dimensions of both, or two without a batch",
                mend="x of (time, batch, features), hx of (layers * directions, batch, hidden)",
            )
        batched, swapped = input.ndim == 3, self.batch_first and input.ndim == 3
        x = input.transpose(0, 1) if swapped else input if batched else input[:, None]
        hx = hx if hx is None or batched else _each(lambda h: h[:, None], hx)
        y, state = self._outputs(x, hx, spec=self._time_first(), microbatches=self._specs["microbatches"])
        if not batched:
            return y[:, 0], _each(lambda h: h[:, 0], state)
        return (y.transpose(0, 1) if swapped else y), state

    def _packed(self: Any, packed: PackedSequence, hx: Any) -> Any:
        if self._specs["spec"] is not None:
            got, need = f"a PackedSequence, with spec={self._specs['spec']}", "no spec: each worker has all rows of it"
            mend = "pad_packed_sequence, or w_spec alone"
            raise SpecError.at(f"spt.nn.{self._class_name}", argument="input", got=got, need=need, mend=mend)
        data, sizes, order, inverse = packed
        hx = None if hx is None else self.permute_hidden(hx, order)
        y, state = self._outputs(data, hx, batch_sizes=sizes.tolist())
        return PackedSequence(y, sizes, order, inverse), self.permute_hidden(state, inverse)

    def _outputs(self: Any, x: torch.Tensor, hx: Any, **options: Any) -> tuple[Any, Any]:
        params = {name: self.shard(name) for name in self._flat_weights_names}
        drops = self.training and self.dropout > 0 and self.num_layers > 1
        dropout = {"dropout": self.dropout, "key": drawn_key()} if drops else {}
        return self._run(x, hx, params, **options, **dropout)

    def _time_first(self: Any) -> Any:
        """spec of x whose first dimension is time."""
        spec = self._specs["spec"]
        if spec is None or not self.batch_first:
            return spec
        if isinstance(spec, P):
            batch, time, *rest = (*spec.trimmed, *[()] * (2 - len(spec.trimmed)))
            return P(*(names or None for names in (time, batch, *rest)))
        raise SpecError.at(
            f"spt.nn.{self._class_name}",
            argument="spec",
            got=f"{spec} with batch_first=True",
            need="a spec of axes, or time first",
            mend="batch_first=False, and x.transpose(0, 1)",
        )


def _states(hx: Any) -> tuple[Any, ...]:
    return tuple(hx) if isinstance(hx, tuple | list) else (hx,)


class RNN(_Layers, nn.RNN):
    """`nn.RNN`, of which hidden features, the batch, or time may be split.

        spt.nn.RNN(16, 64, w_spec=P("model"))  # each worker has some of the hidden features
        spt.nn.RNN(16, 64, spec=P("time", "data"), microbatches=4)  # a block of steps, of some of the sequences

    Arguments as those of `nn.RNN`. spec: of x, (time, batch, features), or (batch, time, features) with batch_first; of
    one without a batch too, as if it had one. A spec, a `Layout`, or a `Grid` of some of the workers. The initial and
    last states lie as the batch does. w_spec: of the hidden features, P("model"), or a `Layout` of them by a spec: all
    parameters have these rows of each gate, and states and outputs these features; outputs of two directions have all.
    microbatches: into how many parts the batch is cut where time is split. A `PackedSequence` goes with w_spec alone.
    generator: as for `spt.drawing`. State dicts are those of torch.

    Dropout between layers is by the index of entries in the whole: the same on any mesh, not the draws of `nn.RNN`.
    Forward, gradients and cost: as `spmd.functions.rnn`. Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        microbatches: int | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = (bias, batch_first, dropout, bidirectional)
        nn.RNN.__init__(self, input_size, hidden_size, num_layers, nonlinearity, *options, device="meta", dtype=dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec, microbatches=microbatches)


class LSTM(_Layers, nn.LSTM):
    """`nn.LSTM`, of which hidden features, the batch, or time may be split.

    Arguments as those of `nn.LSTM`; specs and microbatches: see `RNN`. With proj_size h is whole on each worker, and c
    lies by w_spec. Forward, gradients and cost: as `spmd.functions.lstm`.
    """

    @api_boundary
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        microbatches: int | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = (bias, batch_first, dropout, bidirectional, proj_size, "meta", dtype)
        nn.LSTM.__init__(self, input_size, hidden_size, num_layers, *options)
        self._place(device, generator, spec=spec, w_spec=w_spec, microbatches=microbatches)


class GRU(_Layers, nn.GRU):
    """`nn.GRU`, of which hidden features, the batch, or time may be split.

    Arguments as those of `nn.GRU`; specs and microbatches: see `RNN`. Forward, gradients and cost: as
    `spmd.functions.gru`.
    """

    @api_boundary
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        microbatches: int | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = (bias, batch_first, dropout, bidirectional)
        nn.GRU.__init__(self, input_size, hidden_size, num_layers, *options, device="meta", dtype=dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec, microbatches=microbatches)


# Cells


class _Cell(_Recurrent):
    """One step of a recurrent layer. See `RNNCell`."""

    def _checked_spec(self, where: str, name: str, spec: Any) -> Any:
        spec = super()._checked_spec(where, name, spec)
        if name == "spec" and not isinstance(spec, P):
            need, mend = "a spec of axes", 'spec=P("data")'
            raise SpecError.at(where, argument=name, got=str(spec), need=need, mend=mend)
        return spec

    def forward(self, input: torch.Tensor, hx: Any = None) -> Any:
        if input.ndim not in (1, 2) or (hx is not None and any(h.ndim != input.ndim for h in _states(hx))):
            raise SpecError.at(
                f"spt.nn.{self._class_name}",
                argument="input" if input.ndim not in (1, 2) else "hx",
                got=describe(input) if input.ndim not in (1, 2) else f"{describe(hx)} for {describe(input)}",
                need="two dimensions of both, or one without a batch",
                mend="x of (batch, features), hx of (batch, hidden)",
            )
        batched = input.ndim == 2
        step = (lambda a: a[None]) if batched else (lambda a: a[None, None])
        names = [name for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if getattr(self, name) is not None]
        params = {f"{name}_l0": self.shard(name) for name in names}
        spec = self._specs["spec"]
        spec = None if spec is None else P(None, *(names or None for names in spec.dims))
        _, state = self._run(step(input), None if hx is None else _each(step, hx), params, spec=spec)
        if isinstance(self, nn.LSTMCell) and input.device.type == "cpu":  # there autocast leaves its state
            state = _each(lambda h: h.to(input.dtype), state)
        return _each(lambda h: h[0] if batched else h[0, 0], state)


class RNNCell(_Cell, nn.RNNCell):
    """`nn.RNNCell`, of which the batch or hidden features may be split.

    Arguments as those of `nn.RNNCell`. spec: of x, (batch, features); hx lies as its batch, and its features by w_spec:
    see `RNN`. Forward, gradients and cost: as `spmd.functions.rnn` of one step.
    """

    @api_boundary
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        nn.RNNCell.__init__(self, input_size, hidden_size, bias, nonlinearity, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec)


class LSTMCell(_Cell, nn.LSTMCell):
    """`nn.LSTMCell`, of which the batch or hidden features may be split: see `RNNCell` and `spmd.functions.lstm`."""

    @api_boundary
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        nn.LSTMCell.__init__(self, input_size, hidden_size, bias, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec)


class GRUCell(_Cell, nn.GRUCell):
    """`nn.GRUCell`, of which the batch or hidden features may be split: see `RNNCell` and `spmd.functions.gru`."""

    @api_boundary
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        nn.GRUCell.__init__(self, input_size, hidden_size, bias, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec)
