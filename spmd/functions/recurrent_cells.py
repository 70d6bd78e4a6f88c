"""Cells of recurrent layers, and layers that follow one another in one direction of time. In bodies, and outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd.functions.local import local, namespace
from spmd.functions.movement import varied
from spmd.loops.scans import scan
from spmd.operators.gather import all_gather
from spmd.operators.reduce import psum

__all__ = ["CELLS", "Cell", "Chain", "Weights", "empty"]

State = tuple[Any, ...]
"""(h,), or (h, c): each of shape (batch, features)."""


@dataclass(frozen=True)
class Cell:
    """A step: gates(a, b, state) is the next state.

    a: the products of the input with weight_ih. b: those of h with weight_hh. The gates stand side by side in the last
    dimension. gates: their number. states: 2 with c. bias_apart: whether b needs its bias apart from that of a.
    """

    gates: int
    states: int
    step: Callable[[Any, Any, State], State]
    bias_apart: bool = False


def _parts(a: Any, count: int) -> list[Any]:
    """The gates, which stand side by side in the last dimension."""
    n = a.shape[-1] // count
    return [a[..., k * n : (k + 1) * n] for k in range(count)]


def _tanh(a: Any, b: Any, _state: State) -> State:
    return (namespace(a).tanh(a + b),)


def _relu(a: Any, b: Any, _state: State) -> State:
    return (local(a, "recurrent").relu(a + b),)


def _lstm(a: Any, b: Any, state: State) -> State:
    sigmoid, tanh = local(a, "recurrent").sigmoid, namespace(a).tanh
    i, f, g, o = _parts(a + b, 4)
    c = sigmoid(f) * state[1] + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def _gru(a: Any, b: Any, state: State) -> State:
    sigmoid, tanh = local(a, "recurrent").sigmoid, namespace(a).tanh
    (r, z, n), (r_h, z_h, n_h) = _parts(a, 3), _parts(b, 3)
    z = sigmoid(z + z_h)
    n = tanh(n + sigmoid(r + r_h) * n_h)
    return (n + z * (state[0] - n),)


CELLS = {
    "tanh": Cell(1, 1, _tanh),
    "relu": Cell(1, 1, _relu),
    "lstm": Cell(4, 2, _lstm),
    "gru": Cell(3, 1, _gru, bias_apart=True),
}


class Weights(NamedTuple):
    """The parameters of one layer in one direction; None where the layer does without."""

    weight_ih: Any
    weight_hh: Any
    bias_ih: Any = None
    bias_hh: Any = None
    weight_hr: Any = None


def empty(arrays: Sequence[Any]) -> Any:
    """No entries, of shape (0,), that depend on all of these arrays.

    What is joined with it has their common dtype and state, and takes part in the adjoints of all of them. By the
    exponential in those of any order: the derivative of a linear function would not depend on the arrays.
    """
    xp = namespace(arrays[0])
    return xp.exp(xp.concat([xp.reshape(a[:0], (0,)) for a in arrays]))


@dataclass(frozen=True)
class Chain:
    """Layers that follow one another in one direction of time.

    states: the first states of each layer. names: the axes that split the hidden features. With a projection h is
    whole on every worker; otherwise it lies as the hidden features do, and is gathered at each step.
    """

    cell: Cell
    weights: Sequence[Weights]
    states: Sequence[State]
    reverse: bool
    names: tuple[str, ...]

    @property
    def projected(self) -> bool:
        return self.weights[0].weight_hr is not None

    def tokens(self, x: Any) -> State:
        """`empty` for each part of a state."""
        arrays = [x, *(a for each in (*self.weights, *self.states) for a in each if a is not None)]
        token = empty(arrays)
        if self.projected and self.names:
            return psum(token, self.names), token
        return (token,) * self.cell.states

    def run(
        self, x: Any, states: Sequence[State], lengths: Any, tokens: State, drops: Any = None
    ) -> tuple[Any, list[State]]:
        """The output of the last layer, (time, batch, features), and the last states of each. x varies over names.

        drops: the factors of the inputs of all layers but the first, or None.
        """
        ends = []
        mask = None if lengths is None else local(lengths, "recurrent").before(lengths, x.shape[0])[:, :, None]
        for layer, (weights, state) in enumerate(zip(self.weights, states, strict=True)):
            x = self.whole(x) if layer else x
            x = x * drops[layer - 1] if layer and drops is not None else x
            x, end = self._layer(weights, x, tuple(map(_joined, state, tokens)), mask)
            ends.append(end)
        return x, ends

    def _layer(self, weights: Weights, x: Any, state: State, mask: Any) -> tuple[Any, State]:
        linear, cell = local(x, "linear").linear, self.cell
        a = linear(x, weights.weight_ih)
        if weights.bias_ih is not None:
            a = a + (weights.bias_ih if cell.bias_apart else weights.bias_ih + weights.bias_hh)

        def step(state: State, now: tuple[Any, ...]) -> tuple[State, Any]:
            a, *active = now
            b = linear(self.whole(state[0]), weights.weight_hh)
            if cell.bias_apart and weights.bias_hh is not None:
                b = b + weights.bias_hh
            new = cell.step(a, b, state)
            if weights.weight_hr is not None:
                h = linear(new[0], weights.weight_hr)
                new = (psum(h, self.names) if self.names else h, *new[1:])
            return _masked(new, state, *active)

        end, y = scan(step, state, (a,) if mask is None else (a, mask), reverse=self.reverse)
        return y, end

    def whole(self, h: Any) -> Any:
        """All features of states or outputs, to be multiplied by weights: one all-gather where they are split."""
        if not self.names:
            return h
        return varied(h, self.names) if self.projected else all_gather(h, self.names, axis=h.ndim - 1, tiled=True)


def _joined(state: Any, token: Any) -> Any:
    xp = namespace(state)
    return xp.concat([state, xp.reshape(token, (0, state.shape[-1]))])


def _masked(new: State, old: State, active: Any = None) -> tuple[State, Any]:
    """The state and the output; of entries that have ended the old state and zeros."""
    if active is None:
        return new, new[0]
    where, zeros = namespace(new[0]).where, namespace(new[0]).zeros_like
    kept = tuple(where(active, n, o) for n, o in zip(new, old, strict=True))
    return kept, where(active, new[0], zeros(new[0]))
