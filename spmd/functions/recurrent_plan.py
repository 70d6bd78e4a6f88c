"""Where the arrays of a recurrent layer lie, and the layer on blocks that lie so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from spmd.errors import LayoutError, SpecError
from spmd.functions.dropouts import dropped
from spmd.functions.layouts import spec_of_names
from spmd.functions.local import local, namespace
from spmd.functions.movement import relaid, varied
from spmd.functions.recurrent_cells import CELLS, Cell, Chain, State, Weights
from spmd.functions.recurrent_pipeline import Line, pipeline
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.operators.varying import varying
from spmd.window_nd import same_grid

__all__ = [
    "Network",
    "check_shapes",
    "gates_joined",
    "has_gates_apart",
    "hidden_layout",
    "inner_layout",
    "lengths_layout",
    "plan",
    "run_network",
    "split_layout",
    "state_layout",
]

Names = tuple[str, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """What the layers are: where: the function. cell: a name in CELLS. directions: 1 or 2."""

    where: str
    cell: str
    layers: int
    directions: int
    bias: bool
    projected: bool

    @property
    def rule(self) -> Cell:
        return CELLS[self.cell]

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of parameters, in the order of `Weights`."""
        return ("weight_ih", "weight_hh", *("bias_ih", "bias_hh") * self.bias, *("weight_hr",) * self.projected)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters: those of layer 0, of layer 0 in reverse, of layer 1, ..."""
        ends = [f"_l{k}{way}" for k in range(self.layers) for way in ("", "_reverse")[: self.directions]]
        return tuple(kind + end for end in ends for kind in self.kinds)

    def features(self, weight_hh: Sequence[int]) -> tuple[int, int]:
        """The features of h and of c, from the shape of weight_hh_l0."""
        return weight_hh[-1], weight_hh[1] if len(weight_hh) == 3 else weight_hh[0] // self.rule.gates

    def weights(self, parameters: Sequence[Any]) -> list[Weights]:
        """The parameters of each layer and direction, from all in the order of their names."""
        n = len(self.kinds)
        return [
            Weights(**dict(zip(self.kinds, parameters[k : k + n], strict=True))) for k in range(0, len(parameters), n)
        ]


def run_network(
    net: Network,
    x: Any,
    states: Sequence[Any],
    lengths: Any,
    parameters: Sequence[Any],
    names: Names = (),
    line: Line | None = None,
    drops: Any = None,
) -> tuple[list[Any], list[Any]]:
    """The outputs of the last layer in each direction, and the last h (and c) of all layers, (layers, batch, features).

    names: the axes that split the hidden features. line: the workers that split time. drops: the factors of the inputs
    of all layers but the first, (layers - 1, time, batch, features), or None.
    """
    xp, each = namespace(x), net.weights(parameters)
    first = [tuple(part[k] for part in states) for k in range(len(each))]
    if lengths is not None and line is not None:
        from_here: Any = varying(lengths, line.names)
        lengths = from_here - sum(line.sizes[: line.index])
    # With two directions a layer needs all outputs of the layer before; with one, all layers are one chain.
    groups = [(slice(k, k + 1), slice(k + 1, k + 2)) for k in range(0, len(each), 2)]
    ends: list[State] = []
    chains: list[Chain] = []
    outputs: list[Any] = []
    for k, group in enumerate(groups if net.directions == 2 else [(slice(None),)]):
        wide = [chain.whole(y) for chain, y in zip(chains, outputs, strict=True)]
        x = xp.concat(wide, axis=2) if wide else varied(x, names)
        x = x * drops[k - 1] if wide and drops is not None else x
        chains = [Chain(net.rule, each[s], first[s], way == 1, names) for way, s in enumerate(group)]
        results = pipeline(chains, x, lengths, line, drops if net.directions == 1 else None)
        outputs = [y for y, _ in results]
        ends += [end for _, chain in results for end in chain]
    return outputs, [xp.stack([end[part] for end in ends]) for part in range(net.rule.states)]


def hidden_layout(weight: Layout) -> tuple[Names, tuple[int, ...] | None]:
    """The axes that split the hidden features, and the lengths of the blocks, from the layout of weight_hh_l0."""
    if weight.spec is None or len(weight.shape) == 2:
        return (), None
    return weight.spec.dims[1], weight.cuts[1]


def has_gates_apart(name: str, ndim: int) -> bool:
    """Whether a parameter of this many dimensions has the gates as its first dimension, or none: a projection."""
    return name.startswith("weight_hr") or ndim == (2 if name.startswith("bias") else 3)


def gates_joined(net: Network, name: str, w: Any) -> Any:
    """A parameter as of torch.nn, (gates * hidden, ...), whose gates may be a dimension of their own."""
    if name.startswith("weight_hr") or not has_gates_apart(name, w.ndim):
        return w
    return namespace(w).reshape(w, (net.rule.gates * w.shape[1], *w.shape[2:]))


def split_layout(name: str, shape: Sequence[int], names: Names, cut: Any, axes: dict[str, int]) -> Layout:
    """How a parameter of this shape, with its gates apart, lies where axes split its hidden features, the second
    dimension."""
    rest = len(shape) - 2
    return Layout(shape, spec_of_names([(), names, *[()] * rest]), axes, [None, cut, *[None] * rest])


def check_shapes(
    net: Network, x: Shape, parameters: Mapping[str, Shape], h: Shape | None, c: Shape | None, lengths: Shape | None
) -> None:
    """Raise unless the shapes of the whole arrays fit together."""
    hh, gates = parameters["weight_hh_l0"], net.rule.gates
    features, hidden = net.features(hh)
    for name, shape in parameters.items():
        kind, matrix, layer = name.split("_")[:3]
        inputs = features if matrix == "hh" else x[2] if layer == "l0" else net.directions * features
        last = () if kind == "bias" else (inputs,)
        allowed = [(gates * hidden, *last), (gates, hidden, *last)] if matrix != "hr" else [(features, hidden)]
        if shape not in allowed:
            raise SpecError.at(
                net.where,
                argument=f"params[{name!r}]",
                got=f"shape {list(shape)} of the whole",
                need=f"shape {list(allowed[0])}, for x of {list(x)} and weight_hh_l0 of {list(hh)}",
                mend="the parameters of torch.nn, by their names; weights of shape (gates * hidden, in_features)",
            )
    count, states = net.layers * net.directions, "(layers * directions, batch, features)"
    for name, shape, need, what in (
        ("h0", h, (count, x[1], features), states),
        ("c0", c, (count, x[1], hidden), states),
        ("lengths", lengths, (x[1],), "(batch,)"),
    ):
        if shape is not None and shape != need:
            raise LayoutError.at(
                net.where,
                argument=name,
                got=f"shape {list(shape)} of the whole",
                need=f"shape {list(need)}, of {what}",
                mend="x of shape (time, batch, features)",
            )


def inner_layout(x: Layout, names: Names) -> Layout:
    """How x lies for the computation: features whole, time and batch as they are, but for the axes of the hidden
    features. Of a layout on some of the workers the batch is split over all."""
    if x.spec is None:
        return Layout(x.shape, spec_of_names([(), [n for n in x.axes if n not in names], ()]), x.axes)
    dims = [tuple(n for n in each if n not in names) for each in x.spec.dims[:2]]
    cuts = [cut if own == each else None for cut, own, each in zip(x.cuts, x.spec.dims, dims, strict=False)]
    return Layout(x.shape, spec_of_names([*dims, ()]), x.axes, [*cuts, None])


def state_layout(x: Layout, shape: Sequence[int], names: Names = (), cut: Any = None) -> Layout:
    """How states of shape (layers, batch, features) lie: the batch as that of x; on a grid where time begins."""
    if x.spec is None:
        blocks = range(len(x.cuts[1]))
        return Layout.grid(
            shape, (1, len(blocks), 1), x.axes, [x.holders[0, b, 0][0] for b in blocks], [None, x.cuts[1], None]
        )
    spec = spec_of_names([(), x.spec.dims[1], names])
    return Layout(shape, spec, x.axes, [None, x.cuts[1], cut if names else None])


def lengths_layout(x: Layout) -> Layout:
    """How the lengths lie: as the batch of x."""
    like = state_layout(x, (1, x.shape[1], 1))
    if like.spec is None:
        return Layout.grid(like.shape[1:2], (len(like.cuts[1]),), x.axes, like.workers, like.cuts[1:2])
    return Layout(like.shape[1:2], spec_of_names(like.spec.dims[1:2]), x.axes, like.cuts[1:2])


@lru_cache(maxsize=256)
def plan(
    net: Network,
    microbatches: int | None,
    rate: float,
    hh: Layout,
    x: Layout,
    h: Layout | None,
    c: Layout | None,
    lengths: Layout | None,
    _key: Layout | None,
    *parameters: Layout,
) -> Plan:
    made = Plan(net, microbatches, rate, hh, x, h, c, lengths, parameters)
    made.check()
    return made


@dataclass(frozen=True)
class Plan:
    """Recurrent layers of arrays in these layouts. rate: of dropout between layers. parameters: all but weight_hh_l0,
    in the order of net.names."""

    net: Network
    microbatches: int | None
    rate: float
    hh: Layout
    x: Layout
    h: Layout | None
    c: Layout | None
    lengths: Layout | None
    parameters: tuple[Layout, ...]

    @cached_property
    def _hidden(self) -> tuple[Names, tuple[int, ...] | None]:
        return hidden_layout(self.hh)

    @cached_property
    def _features(self) -> tuple[int, int]:
        """Those of h, and of c."""
        return self.net.features(self.hh.shape)

    @cached_property
    def _inner(self) -> Layout:
        return inner_layout(self.x, self._hidden[0])

    @cached_property
    def _states(self) -> tuple[Layout, ...]:
        """The layouts of h (and c) for the computation."""
        (names, cut), count = self._hidden, self.net.layers * self.net.directions
        shapes = [(count, self.x.shape[1], features) for features in self._features]
        of_h = state_layout(self._inner, shapes[0], () if self.net.projected else names, cut)
        return (of_h, state_layout(self._inner, shapes[1], names, cut))[: self.net.rule.states]

    @cached_property
    def _output(self) -> Layout:
        """The layout of the output of one direction."""
        (names, cut), inner = self._hidden, self._inner
        names = () if self.net.projected else names
        shape = (*inner.shape[:2], self._features[0])
        return Layout(
            shape, spec_of_names([*inner.spec.dims[:2], names]), inner.axes, [*inner.cuts[:2], cut if names else None]
        )

    @cached_property
    def _joined(self) -> Layout:
        """The layout of the output of all directions: of two the features are whole on each worker."""
        if self.net.directions == 1:
            return self._output
        inner, shape = self._inner, (*self.x.shape[:2], 2 * self._features[0])
        return Layout(shape, inner.spec, inner.axes, [*inner.cuts[:2], None])

    @cached_property
    def out(self) -> tuple[Layout, ...]:
        if self.x.spec is not None:
            return (self._joined, *self._states)
        y = same_grid(self.x, self._joined.shape, [*self.x.cuts[:2], None])
        return (y, *(state_layout(self.x, state.shape) for state in self._states))

    def check(self) -> None:
        """Raise unless the shapes of the whole arrays fit together."""
        shapes = {
            n: layout.shape for n, layout in zip(self.net.names, self._in_order(self.hh, self.parameters), strict=True)
        }
        given = (None if layout is None else layout.shape for layout in (self.h, self.c, self.lengths))
        check_shapes(self.net, self.x.shape, shapes, *given)

    @staticmethod
    def _in_order(hh: Any, others: Sequence[Any]) -> tuple[Any, ...]:
        """What belongs to the parameters, in the order of net.names, of which weight_hh_l0 is the second."""
        return (others[0], hh, *others[1:])

    def __call__(self, hh: Any, x: Any, h: Any, c: Any, lengths: Any, key: Any, *parameters: Any) -> Any:
        net, inner, (names, _) = self.net, self._inner, self._hidden
        x = relaid(x, self.x, inner)
        split = [n for dims in inner.spec.dims for n in dims]
        blocks, layouts = self._in_order(hh, parameters), self._in_order(self.hh, self.parameters)
        weights = [varied(self._parameter(*each), split) for each in zip(net.names, blocks, layouts, strict=True)]
        states = [self._state(x, *each) for each in zip((h, c), (self.h, self.c), self._states, strict=False)]
        if lengths is not None:
            assert self.lengths is not None
            lengths = relaid(lengths, self.lengths, lengths_layout(inner))
        drops = self._drops(x, key) if self.rate else None
        outputs, ends = run_network(net, x, states, lengths, weights, names, self._line(), drops)
        if net.directions == 2:
            target = Layout(self._output.shape, inner.spec, inner.axes, (*inner.cuts[:2], None))
            outputs = [namespace(x).concat([relaid(y, self._output, target) for y in outputs], axis=2)]
        results = [
            relaid(y, own, out)
            for y, own, out in zip([*outputs, *ends], (self._joined, *self._states), self.out, strict=True)
        ]
        return tuple(results)

    def _parameter(self, name: str, block: Any, layout: Layout) -> Any:
        """A parameter as the computation needs it: (gates * hidden features of this worker, in_features)."""
        gates, hidden = self.net.rule.gates, self._features[1]
        if not has_gates_apart(name, len(layout.shape)):
            whole = Layout(layout.shape, P(), layout.axes)
            apart = Layout((gates, hidden, *layout.shape[1:]), P(), layout.axes)
            block, layout = namespace(block).reshape(relaid(block, layout, whole), apart.shape), apart
        names, cut = self._hidden
        block = relaid(block, layout, split_layout(name, layout.shape, names, cut, layout.axes))
        return gates_joined(self.net, name, block)

    def _drops(self, x: Any, key: Any) -> Any:
        """The factors of dropout between layers, by the indices of entries in the whole."""
        net, inner = self.net, self._inner
        shape = (net.layers - 1, *inner.shape[:2], net.directions * self._features[0])
        layout = Layout(shape, spec_of_names([(), *inner.spec.dims]), inner.axes, [None, *inner.cuts[:2], None])
        block = layout.block_shape(here(net.where).index)
        return dropped(net.where, local(x, "recurrent").zeros(x, block) + 1, self.rate, key, layout)

    def _state(self, x: Any, block: Any, layout: Layout | None, target: Layout) -> Any:
        if block is None:
            return local(x, "recurrent").zeros(x, target.block_shape(here(self.net.where).index))
        assert layout is not None
        return varied(relaid(block, layout, target), self._inner.spec.dims[0])

    def _line(self) -> Line | None:
        """The workers that split time."""
        inner = self._inner
        names, sizes = inner.spec.dims[0], inner.cuts[0]
        if not names:
            return None
        place = inner.positions(here(self.net.where).index)
        assert place is not None
        return Line(names, sizes, place[0], self.microbatches or max(1, min(len(sizes), *inner.cuts[1])))
