"""Linear layers with sharded weights: between partitions, column-parallel and row-parallel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

import spmd
from spmd.bridge.torch.compiled import compilable
from spmd.bridge.torch.layouts import Shape, common_axes, gather_shapes, grid_of, layout_for
from spmd.bridge.torch.rng import drawing
from spmd.bridge.torch.sharded import ShardedModule
from spmd.errors import LayoutError, describe
from spmd.grid import Grid, layout_of_shapes
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = ["ColumnParallelLinear", "DistributedLinear", "RowParallelLinear"]

_psum, _pvary, _all_gather, _psum_scatter = map(compilable, (spmd.psum, spmd.pvary, spmd.all_gather, spmd.psum_scatter))

_uncompiled: Any = torch.compiler.disable

AxisName = str | Sequence[str]


class _Linear(ShardedModule):
    """y = x wᵀ + b, where each worker holds blocks of w and b."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    _partition: tuple[Any, ...]
    _options: dict[str, Any]

    def _register(
        self,
        partition: tuple[Any, ...],
        options: dict[str, Any],
        in_features: int,
        out_features: int,
        specs: tuple[P | Layout, P | Layout],
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
        generator: torch.Generator | int | None,
    ) -> None:
        """Register this worker's blocks of the weight and the bias, and draw them.

        partition, options: positional and keyword arguments of the subclass, for repr. specs: of weight and bias.
        """
        self._partition, self._options = partition, options
        self.in_features, self.out_features = in_features, out_features
        whole = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        self.register_shard("weight", whole.weight, specs[0])
        if bias:
            self.register_shard("bias", whole.bias, specs[1])
        else:
            self.register_parameter("bias", None)
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | int | None = None) -> None:
        """Draw the parameters that nn.Linear draws, and keep this worker's blocks of them. Nothing is communicated."""
        with drawing(generator):
            whole = nn.Linear(
                self.in_features, self.out_features, self.bias is not None, device="cpu", dtype=self.weight.dtype
            )
            self.load_state_dict(whole.state_dict())

    @classmethod
    def _from_linear(cls, linear: nn.Linear | _Linear, *partition: Any, **options: Any) -> Self:
        if isinstance(linear, _Linear):
            linear = linear.to_linear()
        if not isinstance(linear, nn.Linear):
            raise LayoutError.at(
                f"spt.{cls.__name__}.from_linear",
                argument="linear",
                got=describe(linear),
                need="an nn.Linear that is the same on all workers, or a sharded linear layer",
                mend="for a layer of another kind, write a ShardedModule that calls register_shard",
            )
        w, b = linear.weight, linear.bias
        subclass: Any = cls
        layer = subclass(
            *partition, linear.in_features, linear.out_features, b is not None, device="meta", dtype=w.dtype, **options
        )
        layer.to_empty(device=w.device)
        layer.load_state_dict(linear.state_dict())
        layer.weight.requires_grad_(w.requires_grad)
        if b is not None and layer.bias is not None:
            layer.bias.requires_grad_(b.requires_grad)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The whole layer as an nn.Linear, on every worker. Collective. It shares no memory with this layer."""
        w, b = self.weight, self.bias
        whole = nn.Linear(self.in_features, self.out_features, b is not None, device="meta", dtype=w.dtype)
        whole.weight = nn.Parameter(self.gathered("weight"), w.requires_grad)
        if b is not None:
            whole.bias = nn.Parameter(self.gathered("bias"), b.requires_grad)
        return whole.train(self.training)

    def extra_repr(self) -> str:
        features = {"in_features": self.in_features, "out_features": self.out_features, "bias": self.bias is not None}
        keywords = [f"{name}={value!r}" for name, value in (features | self._options).items()]
        return ", ".join([*map(repr, self._partition), *keywords])

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This worker's blocks of the weight and the bias."""
        return self.shard("weight"), None if self.bias is None else self.shard("bias")

    def _check_features(self, x: torch.Tensor, features: int) -> None:
        """Raise unless the last dimension of x has this many features."""
        if x.ndim and x.shape[-1] == features:
            return
        raise LayoutError.at(
            f"spt.{type(self).__name__}",
            argument="x",
            got=f"a block of shape {list(x.shape)}",
            need=f"{features} features in the last dimension, of {self.in_features} in all",
            mend="P_x says how the features are split: spt.Repartition to it before"
            if type(self) is DistributedLinear
            else "spt.pslice(x, axis_name, axis=-1, tiled=True) takes this worker's features of a whole x, and "
            "spt.all_gather(x, axis_name, axis=-1, tiled=True) joins those of all workers",
        )


class DistributedLinear(_Linear):
    """y = x wᵀ + b between partitions: x lies on P_x, y on P_y, and w on a grid P_w of workers, out × in.

    Each block of x goes to the workers that need it. They multiply it by their blocks of w, and the products are summed
    to y. The bias is added on one column of P_w, before the sum.

    P_x, P_y: grids for the last dimensions of x and y. The last dimension is the features. P_w: a `Grid` of two
    numbers, or a `Layout.grid` of (out_features, in_features), with any cuts. The three may be on different workers.
    Or three specs, whose last entries split the features: P_x = P(..., "c"), P_w = P("r", "c"), P_y = P(..., "r"),
    with a name, a tuple of names or None for r and c. Then x is Invariant along r, and y is Invariant along c, as is
    the bias, which is added after the sum.
    x: this worker's block, with any dimensions before the features; of shape (0, 0, ...) where P_x gives it none. y is
    in balanced blocks, whatever the blocks of x are.

    Parameters: `weight` and `bias`, blocks of (out_features, in_features) and (out_features,). Workers without a block
    have shape (0, 0) and (0,). bias, device, dtype: as for `nn.Linear`. generator: as for `spt.drawing`. The whole
    parameters are those that nn.Linear draws there, on any mesh. Construct the layer in a body.
    state_dict (collective) and load_state_dict: whole tensors, as `nn.Linear` has them; see `ShardedModule`.

    Gradients: of x in P_x, summed over the rows of P_w; of w and b as they lie.
    Cost with grids: forward a message from each worker to all that lack its block of x, and one to P_y for each block
    of products; backward the same; and an exchange of shapes. With specs: one all-reduce forward over c, one backward
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
            self._out_axes, self._in_axes, self._batch_axes = _axes_of_specs(where, P_x, P_y, P_w)
            specs = (P(self._out_axes, self._in_axes), P(self._out_axes))
        elif isinstance(P_x, Grid) and isinstance(P_y, Grid) and isinstance(P_w, Grid | Layout):
            specs = _parameter_layouts(where, P_x, P_y, layout_for(shape, P_w, axes), shape)
        else:
            raise LayoutError.at(
                where,
                got=f"P_x={P_x!r}, P_y={P_y!r}, P_w={P_w!r}",
                need="three grids, or three specs; P_w may be a Layout.grid of the weights",
                mend='P_x=spt.Grid((1, 3)), P_y=spt.Grid((1, 2)), P_w=spt.Grid((2, 3)); or P(None, "c"), '
                'P(None, "r"), P("r", "c")',
            )
        self._register((P_x, P_y, P_w), {}, in_features, out_features, specs, bias, device, dtype, generator)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear | _Linear, P_x: Grid | P, P_y: Grid | P, P_w: Grid | P | Layout
    ) -> DistributedLinear:
        """The same layer between partitions, with copies of the parameters of an nn.Linear that all workers have; or of
        a sharded linear layer (collective)."""
        return cls._from_linear(linear, P_x, P_y, P_w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_specs(x) if isinstance(self.P_w, P) else self._forward_grids(x)

    def _forward_specs(self, x: torch.Tensor) -> torch.Tensor:
        w, b = self._blocks()
        self._check_features(x, w.shape[1])
        if self._out_axes:
            x = _pvary(x, self._out_axes)
        if self._batch_axes:
            w, b = _pvary(w, self._batch_axes), None if b is None else _pvary(b, self._batch_axes)
        if not self._in_axes:
            return F.linear(x, w, b)
        return _plus_bias(_psum(F.linear(x, w), self._in_axes), b)

    # The workers exchange shapes, which a compiled graph cannot hold.
    @_uncompiled
    def _forward_grids(self, x: torch.Tensor) -> torch.Tensor:
        where = "spt.DistributedLinear"
        worker = here(where)
        shapes = gather_shapes(where, x, tuple(self.axes), worker)
        weights = self.shard_layout("weight")
        axes = tuple(self.axes.items())
        source, inputs, products, target = _forward_layouts(where, shapes, self.P_x, self.P_y, weights, axes)
        y = F.linear(spmd.repartition(x, source, inputs), self.shard("weight"))
        bias: Any = self.bias
        if bias is not None and bias.block_layout.positions(bias.block_index) is not None:
            y = _plus_bias(y, self.shard("bias"))
        return spmd.accumulate(y, products, target)


def _plus_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype)  # under autocast y is narrower


def _axes_of_specs(where: str, P_x: P, P_y: P, P_w: P) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The axes that split the output features, the input features, and the dimensions before the features."""
    out_axes, in_axes = (*P_w.dims, (), ())[:2]
    last_x, last_y = (spec.dims[-1] if spec.dims else () for spec in (P_x, P_y))
    batch_x, batch_y = (tuple(n for names in spec.dims[:-1] for n in names) for spec in (P_x, P_y))
    if len(P_w) > 2 or (last_x, last_y, batch_x) != (in_axes, out_axes, batch_y) or {*batch_x} & {*out_axes, *in_axes}:
        raise LayoutError.at(
            where,
            got=f"P_x={P_x}, P_y={P_y}, P_w={P_w}",
            need="P_x = P(..., c), P_y = P(..., r), P_w = P(r, c), where the dots are the same",
            mend="spt.Grid in place of specs, which may be any; or spt.Repartition before or after",
        )
    return out_axes, in_axes, batch_x


def _parameter_layouts(where: str, P_x: Grid, P_y: Grid, weights: Layout, shape: Shape) -> tuple[Layout, Layout]:
    """The layouts of weight and bias on a grid. The bias lies on the grid's first column."""
    grid = grid_of(weights)
    if weights.shape != shape or weights.has_copies or P_x.copies > 1 or P_y.copies > 1:
        raise LayoutError.at(
            where,
            argument="P_w",
            got=f"{weights}, P_x={P_x}, P_y={P_y}",
            need=f"weights of shape {list(shape)}, and each block of them, of x and of y on one worker",
            mend="spt.Grid((rows, columns)) without copies",
        )
    rows, columns = grid.dims
    first_column = grid.members[::columns]
    return weights, Layout.grid(shape[:1], (rows,), weights.axes, first_column, weights.cuts[:1])


@lru_cache(maxsize=256)
def _forward_layouts(
    where: str, shapes: tuple[Shape, ...], P_x: Grid, P_y: Grid, weights: Layout, axes: tuple[tuple[str, int], ...]
) -> tuple[Layout, Layout, Layout, Layout]:
    """The layouts of x, of x on the workers of the weights, of the products, and of y."""
    source = layout_of_shapes(where, shapes, P_x, axes)
    out_features, in_features = weights.shape
    if not source.shape or source.shape[-1] != in_features:
        raise LayoutError.at(
            where,
            argument="x",
            got=f"blocks that join to shape {list(source.shape)}",
            need=f"{in_features} features in the last dimension",
            mend="P_x says how the features are split; on workers without a block x has shape (0, 0, ...)",
        )
    *batch, _ = source.shape
    out_cuts, in_cuts = weights.cuts
    rows, columns = len(out_cuts), len(in_cuts)
    by_row = grid_of(weights).members
    by_column = [worker for column in range(columns) for worker in by_row[column::columns]]
    whole, cuts = (1,) * len(batch), [(n,) for n in batch]
    inputs = Layout.grid(source.shape, (*whole, columns, rows), dict(axes), by_column, [*cuts, in_cuts])
    products = Layout.grid((*batch, out_features), (*whole, rows, columns), dict(axes), by_row, [*cuts, out_cuts])
    return source, inputs, products, P_y.layout((*batch, out_features), dict(axes))


class ColumnParallelLinear(_Linear):
    """y_k = x w_kᵀ + b_k: each worker along an axis has some of the output features.

    axis_name: an axis of the mesh, or a tuple. x: whole, and Invariant along the axis, with any dimensions before the
    features. y: this worker's features, Varying along the axis; a `RowParallelLinear` takes them as they are.
    sequence: the dimension, such as -2, in which x is split over the axis, as in the sequence-parallel parts of a
    network. x is gathered before the product. gather: join the features of all workers: y is whole and Invariant.

    Other arguments, parameters and state_dict: as for `DistributedLinear` with P_x=P(), P_y=P(..., axis), P_w=P(axis).
    weight: balanced blocks of rows.
    Gradients: of x the sum over the workers. Cost: forward nothing, or one all-gather with sequence, and one with
    gather; backward one all-reduce, or one reduce-scatter with sequence. Megatron's f and first layer.
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
        self.sequence, self.gather = _checked_dimension(where, sequence), gather
        options = ({} if sequence is None else {"sequence": sequence}) | ({"gather": True} if gather else {})
        partition, specs = (_axis_argument(self.names),), (P(self.names), P(self.names))
        self._register(partition, options, in_features, out_features, specs, bias, device, dtype, generator)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear | _Linear, axis_name: AxisName, *, sequence: int | None = None, gather: bool = False
    ) -> ColumnParallelLinear:
        """The same layer in this form, with copies of the parameters of an nn.Linear that all workers have; or of a
        sharded linear layer (collective)."""
        return cls._from_linear(linear, axis_name, sequence=sequence, gather=gather)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_features(x, self.in_features)
        if self.sequence is None:
            x = _pvary(x, self.names)
        else:
            x = _all_gather(x, self.names, axis=self.sequence, tiled=True)
        y = F.linear(x, *self._blocks())
        return _all_gather(y, self.names, axis=-1, tiled=True, to="invariant") if self.gather else y


class RowParallelLinear(_Linear):
    """y = Σ_k x_k w_kᵀ + b: each worker along an axis has some of the input features.

    axis_name: an axis of the mesh, or a tuple. x: this worker's features, Varying along the axis, in balanced blocks,
    as a `ColumnParallelLinear` gives them. y: whole, and Invariant along the axis.
    sequence: the dimension, such as -2, in which y is split over the axis: the sum is scattered, in balanced blocks.

    Other arguments, parameters and state_dict: as for `DistributedLinear` with P_x=P(..., axis), P_y=P(),
    P_w=P(None, axis). weight: balanced blocks of columns; bias: whole, on all workers.
    Gradients: of x this worker's features. Cost: forward one all-reduce, or one reduce-scatter with sequence; backward
    nothing, or with sequence one all-gather and an all-reduce for the bias. Megatron's second layer and g.
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
        self.sequence = _checked_dimension(where, sequence)
        options = {} if sequence is None else {"sequence": sequence}
        partition, specs = (_axis_argument(self.names),), (P(None, self.names), P())
        self._register(partition, options, in_features, out_features, specs, bias, device, dtype, generator)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear | _Linear, axis_name: AxisName, *, sequence: int | None = None
    ) -> RowParallelLinear:
        """The same layer in this form, with copies of the parameters of an nn.Linear that all workers have; or of a
        sharded linear layer (collective)."""
        return cls._from_linear(linear, axis_name, sequence=sequence)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, b = self._blocks()
        self._check_features(x, w.shape[1])
        y = F.linear(x, w)
        if self.sequence is None:
            y = _psum(y, self.names)
        else:
            y = _psum_scatter(y, self.names, scatter_dimension=self.sequence, tiled=True)
            b = None if b is None else _pvary(b, self.names)  # each worker adds it to its own samples
        return _plus_bias(y, b)


def _axis_argument(names: tuple[str, ...]) -> AxisName:
    """The names of axes as a user writes them."""
    return names[0] if len(names) == 1 else names


def _checked_dimension(where: str, sequence: int | None) -> int | None:
    if sequence is None or (isinstance(sequence, int) and sequence != -1):
        return sequence
    raise LayoutError.at(
        where,
        argument="sequence",
        got=repr(sequence),
        need="a dimension before the features, or None",
        mend="sequence=-2 for tensors (batch, sequence, features); 0 for (sequence, batch, features)",
    )
