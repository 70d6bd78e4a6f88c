"""Linear layers with sharded weights: between partitions, column-parallel, and row-parallel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

import spmd
from spmd.bridge.torch.compiled import compilable
from spmd.bridge.torch.layouts import Grid, Shape, common_axes, gather_shapes, grid_of, layout_for, layout_of_shapes
from spmd.bridge.torch.rng import drawing
from spmd.bridge.torch.sharded import ShardedModule
from spmd.errors import LayoutError, describe
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = ["ColumnParallelLinear", "DistributedLinear", "RowParallelLinear"]

_psum, _pvary, _all_gather, _psum_scatter = map(compilable, (spmd.psum, spmd.pvary, spmd.all_gather, spmd.psum_scatter))

_uncompiled: Any = torch.compiler.disable

AxisName = str | Sequence[str]


class _Linear(ShardedModule):
    """y = x wᵀ + b, of which workers hold blocks of w and b."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    _places: tuple[Any, ...]
    _options: dict[str, Any]

    def _hold(
        self,
        places: tuple[Any, ...],
        options: dict[str, Any],
        in_features: int,
        out_features: int,
        specs: tuple[P | Layout, P | Layout],
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
        generator: torch.Generator | int | None,
    ) -> None:
        """Register the blocks of the parameters of nn.Linear. places, options: arguments of the subclass, for repr."""
        self._places, self._options = places, options
        self.in_features, self.out_features = in_features, out_features
        whole = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        self.register_shard("weight", whole.weight, specs[0])
        if bias:
            self.register_shard("bias", whole.bias, specs[1])
        else:
            self.register_parameter("bias", None)
        on = torch.get_default_device() if device is None else torch.device(device)
        if on.type != "meta":
            self.to_empty(device=on)
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | int | None = None) -> None:
        """Draw the parameters anew: the blocks of those that nn.Linear draws. Nothing is communicated."""
        with drawing(generator):
            whole = nn.Linear(
                self.in_features, self.out_features, self.bias is not None, device="cpu", dtype=self.weight.dtype
            )
            self.load_state_dict(whole.state_dict())

    @classmethod
    def _of(cls, linear: nn.Linear | _Linear, *places: Any, **options: Any) -> Self:
        if isinstance(linear, _Linear):
            linear = linear.to_linear()
        if not isinstance(linear, nn.Linear):
            raise LayoutError.at(
                f"spt.{cls.__name__}.from_linear",
                argument="linear",
                got=describe(linear),
                need="an nn.Linear, the same on all workers, or another form",
                mend="a layer of another kind has register_shard",
            )
        w, b = linear.weight, linear.bias
        form: Any = cls
        layer = form(
            *places, linear.in_features, linear.out_features, b is not None, device="meta", dtype=w.dtype, **options
        )
        layer.to_empty(device=w.device)
        layer.load_state_dict(linear.state_dict())
        layer.weight.requires_grad_(w.requires_grad)
        if b is not None and layer.bias is not None:
            layer.bias.requires_grad_(b.requires_grad)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The whole as an nn.Linear, on every worker. Collective; it shares no memory with this."""
        w, b = self.weight, self.bias
        whole = nn.Linear(self.in_features, self.out_features, b is not None, device="meta", dtype=w.dtype)
        whole.weight = nn.Parameter(self.gathered("weight"), w.requires_grad)
        if b is not None:
            whole.bias = nn.Parameter(self.gathered("bias"), b.requires_grad)
        return whole.train(self.training)

    def extra_repr(self) -> str:
        named = [
            f"in_features={self.in_features}",
            f"out_features={self.out_features}",
            f"bias={self.bias is not None}",
        ]
        named += [f"{k}={v!r}" for k, v in self._options.items()]
        return ", ".join([*map(repr, self._places), *named])

    def _features(self, x: torch.Tensor, need: int, argument: str = "x") -> None:
        if x.ndim and x.shape[-1] == need:
            return
        raise LayoutError.at(
            f"spt.{type(self).__name__}",
            argument=argument,
            got=f"a block of shape {list(x.shape)}",
            need=f"{need} features in the last dimension, of {self.in_features} in all",
            mend="P_x says how the features are split: spt.Repartition to it before"
            if type(self) is DistributedLinear
            else "spt.pslice(x, axis_name, axis=-1, tiled=True) takes this worker's of a whole x, and "
            "spt.all_gather(x, axis_name, axis=-1, tiled=True) joins those of all",
        )


class DistributedLinear(_Linear):
    """y = x wᵀ + b between partitions: x lies on P_x, y on P_y, and w on a grid P_w of workers, out × in.

    Each block of x goes to the workers that need it, which multiply it by their blocks of w; the products are summed
    to y. The bias is added on one column of P_w, before the sum.

    P_x, P_y: grids for the last dimensions of x and y, of which the last one is the features'. P_w: a `Grid` of two
    numbers, or a `Layout.grid` of (out_features, in_features), with any cuts. Any workers, which may overlap or not.
    Or three specs, whose last entries are the features': P_x = P(..., "c"), P_w = P("r", "c"), P_y = P(..., "r"), with
    a name, a tuple of names or None for r and c. Then x comes Invariant along r, y leaves Invariant along c, and so
    does the bias, which is added after the sum.
    x: this worker's block, of any dimensions before the features; of shape (0, 0, ...) where P_x gives it none. y is
    in balanced blocks, whatever those of x are.

    Parameters: `weight` and `bias`, blocks of (out_features, in_features) and (out_features,); on workers without any
    of shape (0, 0) and (0,). bias, device, dtype: as for `nn.Linear`. generator: as for `spt.drawing`; the whole is the
    same on any mesh: that which nn.Linear draws there. To be made in a body.
    state_dict (collective) and load_state_dict: whole tensors, as `nn.Linear` has them; see `ShardedModule`.

    Gradients: of x in P_x, summed over the rows of P_w; of w and b where they are.
    Cost, of grids: forward a message from each worker to all that lack its block of x, and one to P_y for each block of
    products; backward the same; a meeting that moves no bytes. Of specs one all-reduce forward over c, one backward
    over r. Raises LayoutError where partitions and blocks do not fit. DistDL's `DistributedLinear(P_x, P_y, P_w)`.
    """

    @api_boundary
    def __init__(
        self,
        P_x: Grid | P,
        P_y: Grid | P,
        P_w: Grid | P | Layout,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | int | None = None,
    ):
        super().__init__()
        where, shape = "spt.DistributedLinear", (out_features, in_features)
        worker = here(where)
        axes = common_axes(where, worker, P_x, P_y, P_w)
        self.P_x, self.P_y, self.P_w, self.axes = P_x, P_y, P_w, axes
        if isinstance(P_x, P) and isinstance(P_y, P) and isinstance(P_w, P):
            out, into, self._batch = _spec_form(where, P_x, P_y, P_w)
            specs = (P(out, into), P(out))
            self._rows, self._columns = out, into
        elif isinstance(P_x, Grid) and isinstance(P_y, Grid) and isinstance(P_w, Grid | Layout):
            specs = _grid_form(where, P_x, P_y, layout_for(shape, P_w, axes), shape)
        else:
            raise LayoutError.at(
                where,
                got=f"P_x={P_x!r}, P_y={P_y!r}, P_w={P_w!r}",
                need="three grids, of which P_w may be a Layout.grid of the weights, or three specs",
                mend='P_x=spt.Grid((1, 3)), P_y=spt.Grid((1, 2)), P_w=spt.Grid((2, 3)); or P(None, "c"), '
                'P(None, "r"), P("r", "c")',
            )
        self._hold((P_x, P_y, P_w), {}, in_features, out_features, specs, bias, device, dtype, generator)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear | _Linear, P_x: Grid | P, P_y: Grid | P, P_w: Grid | P | Layout
    ) -> DistributedLinear:
        """The same layer between partitions, of an nn.Linear that all workers have, of which it takes copies; or of
        another form (collective)."""
        return cls._of(linear, P_x, P_y, P_w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._by_specs(x) if isinstance(self.P_w, P) else self._by_grids(x)

    def _by_specs(self, x: torch.Tensor) -> torch.Tensor:
        w, b = self.shard("weight"), None if self.bias is None else self.shard("bias")
        self._features(x, w.shape[1])
        if self._rows:
            x = _pvary(x, self._rows)
        if self._batch:
            w, b = _pvary(w, self._batch), None if b is None else _pvary(b, self._batch)
        if not self._columns:
            return F.linear(x, w, b)
        y = _psum(F.linear(x, w), self._columns)
        return y if b is None else y + b.to(y.dtype)  # under autocast y is narrower

    # The workers exchange shapes, which a compiled graph cannot hold.
    @_uncompiled
    def _by_grids(self, x: torch.Tensor) -> torch.Tensor:
        where = "spt.DistributedLinear"
        worker = here(where)
        shapes = gather_shapes(where, x, tuple(self.axes), worker)
        weights = self.shard_layout("weight")
        src, needed, parts, dst = _layouts(where, shapes, self.P_x, self.P_y, weights, tuple(self.axes.items()))
        x = spmd.repartition(x, src, needed)
        y = F.linear(x, self.shard("weight"))
        bias: Any = self.bias
        if bias is not None and bias.block_layout.positions(bias.block_index) is not None:
            y = y + self.shard("bias").to(y.dtype)
        return spmd.accumulate(y, parts, dst)


def _spec_form(where: str, P_x: P, P_y: P, P_w: P) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The axes over which rows and columns of the weights are split, and those over which samples are."""
    out, into = (*P_w.dims, (), ())[:2]
    last_x, last_y = (P.dims[-1] if P.dims else () for P in (P_x, P_y))
    batch_x, batch_y = (tuple(n for d in P.dims[:-1] for n in d) for P in (P_x, P_y))
    if len(P_w) > 2 or last_x != into or last_y != out or batch_x != batch_y or {*batch_x} & {*out, *into}:
        raise LayoutError.at(
            where,
            got=f"P_x={P_x}, P_y={P_y}, P_w={P_w}",
            need="P_x = P(..., c), P_y = P(..., r), P_w = P(r, c), where the dots are the same",
            mend="grids may be any: spt.Grid in place of specs; or spt.Repartition before or after",
        )
    return out, into, batch_x


def _grid_form(where: str, P_x: Grid, P_y: Grid, weights: Layout, shape: Shape) -> tuple[Layout, Layout]:
    """The layouts of weights and bias on a grid: the bias on its first column."""
    grid = grid_of(weights)
    if weights.shape != shape or weights.has_copies or P_x.copies > 1 or P_y.copies > 1:
        raise LayoutError.at(
            where,
            argument="P_w",
            got=f"{weights}, P_x={P_x}, P_y={P_y}",
            need=f"each block of weights of shape {list(shape)}, of x and of y on one worker",
            mend="spt.Grid((rows, columns)) without copies",
        )
    rows, columns = grid.dims
    first = grid.members[::columns]
    return weights, Layout.grid(shape[:1], (rows,), weights.axes, first, weights.cuts[:1])


@lru_cache(maxsize=256)
def _layouts(
    where: str, shapes: tuple[Shape, ...], P_x: Grid, P_y: Grid, weights: Layout, axes: tuple[tuple[str, int], ...]
) -> tuple[Layout, Layout, Layout, Layout]:
    """The layouts of x, of x on the workers of the weights, of their products, and of y."""
    src = layout_of_shapes(where, shapes, P_x, axes)
    out_features, in_features = weights.shape
    if not src.shape or src.shape[-1] != in_features:
        raise LayoutError.at(
            where,
            argument="x",
            got=f"blocks that join to shape {list(src.shape)}",
            need=f"{in_features} features in the last dimension",
            mend="P_x says how the features are split; on workers without a block x has shape (0, 0, ...)",
        )
    *batch, _ = src.shape
    rows, columns = (len(c) for c in weights.cuts)
    held = grid_of(weights).members
    by_column = [w for c in range(columns) for w in held[c::columns]]
    whole, cuts = (1,) * len(batch), [(n,) for n in batch]
    into, out = weights.cuts[1], weights.cuts[0]
    needed = Layout.grid(src.shape, (*whole, columns, rows), dict(axes), by_column, [*cuts, into])
    parts = Layout.grid((*batch, out_features), (*whole, rows, columns), dict(axes), held, [*cuts, out])
    return src, needed, parts, P_y.layout((*batch, out_features), dict(axes))


class ColumnParallelLinear(_Linear):
    """y_k = x w_kᵀ + b_k: each worker along an axis has some of the output features.

    axis_name: an axis of the mesh, or a tuple. x: whole, and Invariant along the axis, with any dimensions before the
    features. y: this worker's features, Varying along the axis; a `RowParallelLinear` takes them as they are.
    sequence: the dimension, -2 say, in which x comes split over the axis, as the sequence-parallel parts of a network
    have it: it is gathered before the product. gather: join the features of all workers: y is whole and Invariant.

    Other arguments, parameters and state_dict: as for `DistributedLinear`; it is that with P_x=P(), P_y=P(..., axis),
    P_w=P(axis). weight: balanced blocks of rows.
    Gradients: of x the sum over the workers. Cost: forward nothing, or one all-gather (of the sequence), and one with
    gather; backward one all-reduce, or one reduce-scatter. Megatron's f and first layer.
    """

    @api_boundary
    def __init__(
        self,
        axis_name: AxisName,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence: int | None = None,
        gather: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | int | None = None,
    ):
        super().__init__()
        where = f"spt.{type(self).__name__}"
        self.names = here(where).mesh.names(axis_name, where)
        self.sequence, self.gather = _dimension(where, sequence), gather
        options = {"sequence": sequence} if sequence is not None else {}
        options |= {"gather": True} if gather else {}
        specs = P(self.names), P(self.names)
        self._hold((_one(self.names),), options, in_features, out_features, specs, bias, device, dtype, generator)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear | _Linear, axis_name: AxisName, *, sequence: int | None = None, gather: bool = False
    ) -> ColumnParallelLinear:
        """The same layer in this form, of an nn.Linear that all workers have, of which it takes copies; or of another
        form (collective)."""
        return cls._of(linear, axis_name, sequence=sequence, gather=gather)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._features(x, self.in_features)
        if self.sequence is None:
            x = _pvary(x, self.names)
        else:
            x = _all_gather(x, self.names, axis=self.sequence, tiled=True)
        y = F.linear(x, self.shard("weight"), None if self.bias is None else self.shard("bias"))
        return _all_gather(y, self.names, axis=-1, tiled=True, to="invariant") if self.gather else y


class RowParallelLinear(_Linear):
    """y = Σ_k x_k w_kᵀ + b: each worker along an axis has some of the input features.

    axis_name: an axis of the mesh, or a tuple. x: this worker's features, Varying along the axis, in balanced blocks,
    as a `ColumnParallelLinear` gives them. y: whole, and Invariant along the axis.
    sequence: the dimension, -2 say, in which y leaves split over the axis: the sum is scattered, in balanced blocks.

    Other arguments, parameters and state_dict: as for `DistributedLinear`; it is that with P_x=P(..., axis), P_y=P(),
    P_w=P(None, axis). weight: balanced blocks of columns; bias: whole, on all workers.
    Gradients: of x the share of this worker. Cost: forward one all-reduce, or one reduce-scatter (of the sequence);
    backward nothing, or one all-gather, and an all-reduce for the bias. Megatron's second layer and g.
    """

    @api_boundary
    def __init__(
        self,
        axis_name: AxisName,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | int | None = None,
    ):
        super().__init__()
        where = f"spt.{type(self).__name__}"
        self.names = here(where).mesh.names(axis_name, where)
        self.sequence = _dimension(where, sequence)
        options = {} if sequence is None else {"sequence": sequence}
        specs = P(None, self.names), P()
        self._hold((_one(self.names),), options, in_features, out_features, specs, bias, device, dtype, generator)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear | _Linear, axis_name: AxisName, *, sequence: int | None = None
    ) -> RowParallelLinear:
        """The same layer in this form, of an nn.Linear that all workers have, of which it takes copies; or of another
        form (collective)."""
        return cls._of(linear, axis_name, sequence=sequence)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, b = self.shard("weight"), None if self.bias is None else self.shard("bias")
        self._features(x, w.shape[1])
        y = F.linear(x, w)
        if self.sequence is None:
            y = _psum(y, self.names)
        else:
            y = _psum_scatter(y, self.names, scatter_dimension=self.sequence, tiled=True)
            b = None if b is None else _pvary(b, self.names)  # each worker adds it to samples of its own
        return y if b is None else y + b.to(y.dtype)  # under autocast y is narrower


def _one(names: tuple[str, ...]) -> AxisName:
    return names[0] if len(names) == 1 else names


def _dimension(where: str, sequence: int | None) -> int | None:
    if sequence is None or (isinstance(sequence, int) and sequence != -1):
        return sequence
    raise LayoutError.at(
        where,
        argument="sequence",
        got=repr(sequence),
        need="a dimension before the features, or None",
        mend="sequence=-2 for tensors (batch, sequence, features); 0 for (sequence, batch, features)",
    )
