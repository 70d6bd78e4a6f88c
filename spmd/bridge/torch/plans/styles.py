"""The styles of a plan: how the parameters of a module lie, and how its inputs are laid out.

A style is applied to a module of torch as it is. It replaces parameters by `spt.Parameter`s, and may lay out the
module's inputs. The functions that the module calls then act on the whole, as those of global tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from spmd.bridge.torch.global_tensors.layers import scattered_linear
from spmd.bridge.torch.global_tensors.meeting import Dim, as_global, dims_of, layout_of_dims
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, global_tensor, result
from spmd.bridge.torch.partitioned.parameter import Parameter
from spmd.bridge.torch.tensor_state import is_partitioned
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions.movement import relaid
from spmd.layout import Layout, P
from spmd.mesh import here

__all__ = ["Style", "column", "heads", "keep_ties", "row", "sequence", "spatial", "split_parameter", "vocab", "whole"]

AxisName = str | Sequence[str]

_LINEAR = (nn.Linear,)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_COUNTS = "num_heads n_head n_heads nhead heads num_attention_heads".split()


@dataclass(frozen=True)
class Style:
    """What a plan does with a module.

    text: as the user writes it. apply(module, name) does it, in a body. kinds: the classes of modules that it is for;
    none: any module.

        >>> isinstance(spt.column("model"), spt.Style)
        True
    """

    text: str
    apply: Callable[[nn.Module, str], None] = field(compare=False)
    kinds: tuple[type, ...] = ()

    def __repr__(self) -> str:
        return self.text

    def __call__(self, module: nn.Module, name: str) -> None:
        if self.kinds and not isinstance(module, self.kinds):
            inner = [f"{name}.{n}".lstrip(".") for n, m in module.named_modules() if n and isinstance(m, self.kinds)]
            raise LayoutError.at(
                "spt.parallelize",
                argument="plan",
                got=f"{self} for {name!r}, {describe(module)}",
                need="one of " + ", ".join(f"nn.{kind.__name__}" for kind in self.kinds),
                mend=f"{inner[0]!r}: {self}" if inner else f"{name!r}: spt.whole() leaves it as it is",
            )
        self.apply(module, name)
        module.__dict__["_spmd_style"] = str(self)  # for `plan_report`


def column(axis_name: AxisName, *, parts: int = 1) -> Style:
    """Rows of the weights are split: each worker makes some of the features or channels that come out.

    For nn.Linear, convolutions and their transposes. The bias is split alike. Nothing is sent forward; backward one sum
    of the cotangent of x. parts: how many arrays of features one layer makes, as queries, keys and values: each is
    split. Megatron's first layer of a pair (Shoeybi et al., 2019).

        >>> def body(x):
        ...     net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        ...     net = spt.parallelize(net, {"0": spt.column("model"), "2": spt.row("model")})
        ...     return tuple(net[0].weight.block().shape), net(x).shape
        >>> with spmd.Mesh(model=2):
        ...     spt.map(body, P(), None)(torch.ones(3, 2))
        ((3, 2), torch.Size([3, 2]))
    """
    names = _names(axis_name, "column")

    def apply(module: Any, name: str) -> None:
        if isinstance(module, _TRANSPOSED):
            split_parameter(module, "weight", P(None, names))
            split_parameter(module, "bias", P(names))
            return
        rows = module.weight.shape[0]
        if rows % parts:
            raise LayoutError.at(
                "spt.column",
                argument="parts",
                got=f"{parts} for {name!r}, which makes {rows} features",
                need="a number that divides them",
                mend="parts=3 for queries, keys and values of one length",
            )
        if parts == 1:
            split_parameter(module, "weight", P(names))
            split_parameter(module, "bias", P(names))
            return
        apart = (parts, rows // parts)
        split_parameter(module, "weight", P(None, names), (*apart, *module.weight.shape[1:]))
        split_parameter(module, "bias", P(None, names), apart)

    more = "" if parts == 1 else f", parts={parts}"
    return Style(f"spt.column({axis_name!r}{more})", apply, (*_LINEAR, *_CONVOLUTIONS, *_TRANSPOSED))


def row(axis_name: AxisName, *, sequence: int | None = None) -> Style:
    """Columns of the weights are split: each worker takes some of the features or channels that come in.

    For nn.Linear, convolutions and their transposes. One sum over the workers forward, nothing backward; the bias is
    whole. sequence: a dimension of the result, such as 1, over which the sum is scattered (`spt.sequence`), for
    nn.Linear. Megatron's second layer of a pair.

        >>> def body(x):
        ...     net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        ...     net = spt.parallelize(net, {"0": spt.column("model"), "2": spt.row("model")})
        ...     return tuple(net[2].weight.block().shape)  # some of the columns; one sum completes the result
        >>> with spmd.Mesh(model=2):
        ...     spt.map(body, P(), None)(torch.ones(3, 2))
        (2, 3)
    """
    names = _names(axis_name, "row")

    def apply(module: Any, name: str) -> None:
        split_parameter(module, "weight", P(names) if isinstance(module, _TRANSPOSED) else P(None, names))
        if sequence is not None:
            _scatter_result(module, name, sequence, names)

    more = "" if sequence is None else f", sequence={sequence}"
    kinds = _LINEAR if sequence is not None else (*_LINEAR, *_CONVOLUTIONS, *_TRANSPOSED)
    return Style(f"spt.row({axis_name!r}{more})", apply, kinds)


def vocab(axis_name: AxisName) -> Style:
    """Rows of the table of an nn.Embedding are split; of an nn.Linear those of its weights, as a head that shares them.

    One sum over the workers forward (of an embedding).

        >>> def body(ids):
        ...     net = torch.nn.Sequential(torch.nn.Embedding(8, 4))
        ...     net = spt.parallelize(net, {"0": spt.vocab("model")})
        ...     return tuple(net[0].weight.block().shape), net(ids).shape
        >>> with spmd.Mesh(model=2):
        ...     spt.map(body, P(), None)(torch.tensor([6, 0]))
        ((4, 4), torch.Size([2, 4]))
    """
    names = _names(axis_name, "vocab")

    def apply(module: Any, name: str) -> None:
        split_parameter(module, "weight", P(names))
        if isinstance(module, nn.Linear):
            split_parameter(module, "bias", P(names))

    return Style(f"spt.vocab({axis_name!r})", apply, (nn.Embedding, nn.Linear))


def heads(
    axis_name: AxisName,
    *,
    qkv: str | Sequence[str] | None = None,
    out: str | None = None,
    count: int | None = None,
    kv_count: int | None = None,
) -> Style:
    """The heads of attention are split: those of a worker have their queries, keys, values and part of the projection.

    For nn.MultiheadAttention, and for modules of yours that project by nn.Linear: one layer for queries, keys and
    values together, or one each, and one for the results. They are found by their names and lengths; else qkv names
    the layers ("c_attn", or ["q", "k", "v"]), out the last one, count the heads and kv_count those of keys and values.
    Heads need not divide the workers. One sum over the workers forward, one backward.

        >>> def body(x):
        ...     net = torch.nn.TransformerEncoderLayer(6, 3, 8, batch_first=True)
        ...     net = spt.parallelize(net, {"self_attn": spt.heads("m"), "linear*": spt.whole()})
        ...     return net(x).shape
        >>> with spmd.Mesh(m=2):
        ...     spt.map(body, P(), None)(torch.ones(1, 4, 6))
        torch.Size([1, 4, 6])
    """
    names = _names(axis_name, "heads")

    def apply(module: Any, name: str) -> None:
        if isinstance(module, nn.MultiheadAttention):
            _split_multihead(module, names)
        else:
            _split_attention(module, name, names, qkv, out, count, kv_count)

    return Style(f"spt.heads({axis_name!r})", apply)


def sequence(axis_name: AxisName, dim: int = 1) -> Style:
    """Inputs of the module, and so its results, are split in a dimension, that of positions: norms, dropout, residuals.

    dim: of (sample, position, feature). Between a `column` layer behind it and a `row(..., sequence=dim)` layer the
    positions are whole (Korthikanti et al., 2022).

        >>> def body(x):
        ...     net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
        ...     net = spt.parallelize(net, {"0": spt.sequence("model")})
        ...     return net(x).shape
        >>> with spmd.Mesh(model=2):
        ...     spt.map(body, P(), None)(torch.ones(2, 5, 4))
        torch.Size([2, 5, 4])
    """
    names = _names(axis_name, "sequence")
    text = f"spt.sequence({axis_name!r}, {dim})"
    return Style(text, lambda module, name: _lay_out_inputs(text, module, name, {dim: names}))


def spatial(spec: P) -> Style:
    """Inputs of the module are laid out by a spec, as images by rows: `spt.spatial(P(None, None, "rows"))`.

    What follows stays split until it is laid out otherwise: convolutions, pooling and norms fetch what they need.

        >>> import copy
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.MaxPool2d(2))
        >>> def body(x):
        ...     split = spt.parallelize(copy.deepcopy(net), {"*": spt.spatial(P(None, None, "rows"))})
        ...     return split(spt.put(x, P(None, None, "rows"))).whole()
        >>> x = torch.randn(1, 1, 7, 6)
        >>> with spmd.Mesh(rows=2):
        ...     y = spt.map(body, P(), P())(x)
        >>> torch.allclose(y, net(x), atol=1e-6)
        True
    """
    if not isinstance(spec, P):
        need, mend = "a spec of the inputs", 'spt.spatial(P(None, None, "rows"))'
        raise SpecError.at("spt.spatial", argument="spec", got=describe(spec), need=need, mend=mend)
    dims, text = dict(enumerate(spec.dims)), f"spt.spatial({spec})"
    return Style(text, lambda module, name: _lay_out_inputs(text, module, name, dims, spec))


def whole() -> Style:
    """Inputs of the module are made whole, and every worker computes all of it. Right for any module.

    >>> def body(x):
    ...     net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Dropout(0.0))
    ...     net = spt.parallelize(net, {"0": spt.whole()})
    ...     return tuple(net[0].weight.shape), net(x).shape
    >>> with spmd.Mesh(model=2):
    ...     spt.map(body, P(), None)(torch.ones(3, 2))
    ((6, 2), torch.Size([3, 6]))
    """

    def apply(module: nn.Module, name: str) -> None:
        module.register_forward_pre_hook(_made_whole, with_kwargs=True)

    return Style("spt.whole()", apply)


def _names(axis_name: AxisName, style: str) -> tuple[str, ...]:
    names: Any = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not names or not all(isinstance(n, str) for n in names):
        raise SpecError.at(
            f"spt.{style}",
            argument="axis_name",
            got=describe(axis_name),
            need="the name of an axis of the mesh, or several",
            mend=f'spt.{style}("model")',
        )
    return tuple(names)


# Parameters


def split_parameter(module: nn.Module, name: str, spec: P | Layout, unpacked: Sequence[int] | None = None) -> None:
    """Replace a parameter of a module by this worker's block. One that several modules share stays shared.

    unpacked: as for `spt.Parameter`.
    """
    own: Any = module._parameters.get(name)
    if own is None:
        if is_parametrized(module, name):
            raise _parametrized(name, module)
        return
    if is_partitioned(own):
        raise _split_twice(name, module, spec)
    made, how = vars(own).get("_spmd_split", (None, None))
    if made is None:
        made, how = Parameter(own.detach(), spec, own.requires_grad, unpacked=unpacked), (spec, unpacked)
        own._spmd_split = made, how
    elif how != (spec, unpacked):
        raise _split_twice(name, module, spec)
    module._parameters[name] = made


def keep_ties(net: nn.Module) -> None:
    """Replace parameters that were split also in the modules, outside the plan, that share them."""
    for module in net.modules():
        for name, own in module._parameters.items():
            made, _ = vars(own).get("_spmd_split", (None, None)) if own is not None else (None, None)
            if made is not None:
                module._parameters[name] = made


def _parametrized(name: str, module: nn.Module) -> LayoutError:
    return LayoutError.at(
        "spt.parallelize",
        argument="plan",
        got=f"a style that splits {name!r} of {type(module).__name__}, which a parametrization computes",
        need="a parameter",
        mend="spt.whole() for this module; weight_norm can be applied to the module that spt.parallelize returns",
    )


def _split_twice(name: str, module: nn.Module, spec: Any) -> LayoutError:
    return LayoutError.at(
        "spt.parallelize",
        argument="plan",
        got=f"{spec} for {name!r} of {describe(module)}, which is split otherwise already",
        need="one layout for a parameter, also where modules share it",
        mend='styles that agree: "embed": spt.vocab("model"), "head": spt.vocab("model")',
    )


def _cut_by_heads(shape: Sequence[int], d: int, size: int, names: tuple[str, ...]) -> Layout:
    """A layout of an array whose dimension d, heads of some size, is split between heads."""
    mesh = here("spt.heads").mesh
    axes = {n: mesh.axes[n] for n in mesh.names(names, "spt.heads")}
    each = Layout((shape[d] // size,), P(names), axes).cuts[0]
    cuts = [None] * len(shape)
    cuts[d] = tuple(n * size for n in each)  # type: ignore[call-overload]
    return Layout(tuple(shape), P(*[None] * d, names), axes, cuts)


def _split_rows(
    module: nn.Module, weight: str, bias: str | None, parts: int, size: int, names: tuple[str, ...]
) -> None:
    """Split the rows of a projection between heads of some size. parts: how many such arrays its rows are."""
    for name in (weight, bias or ""):
        own = module._parameters.get(name)
        if own is None:
            continue
        rows, *rest = own.shape
        if parts == 1:
            split_parameter(module, name, _cut_by_heads((rows, *rest), 0, size, names))
        else:
            shape = (parts, rows // parts, *rest)
            split_parameter(module, name, _cut_by_heads(shape, 1, size, names), shape)


def _split_multihead(module: nn.MultiheadAttention, names: tuple[str, ...]) -> None:
    size = module.head_dim
    _split_rows(module, "in_proj_weight", "in_proj_bias", 3, size, names)
    if module.in_proj_weight is None:
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            _split_rows(module, name, None, 1, size, names)
    out = module.out_proj
    split_parameter(out, "weight", _cut_by_heads(out.weight.shape, 1, size, names))


def _split_attention(
    module: nn.Module, name: str, names: tuple[str, ...], qkv: Any, out: Any, count: Any, kv_count: Any
) -> None:
    """Split the projections of a module that is not nn.MultiheadAttention."""
    linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    inputs = _input_projections(linears) if qkv is None else [qkv] if isinstance(qkv, str) else list(qkv)
    rest = [n for n in linears if n not in inputs] if out is None else [out]
    count = count or next((getattr(module, a) for a in _COUNTS if isinstance(getattr(module, a, None), int)), 0)
    if not inputs or len(rest) != 1 or not count or any(n not in linears for n in [*inputs, *rest]):
        raise LayoutError.at(
            "spt.heads",
            got=f"{name!r}, {type(module).__name__}: layers {list(linears)}, {count or 'no number of'} heads",
            need="the layers that make queries, keys and values, the one of the results, and the number of heads",
            mend='spt.heads("model", qkv=["q", "k", "v"], out="proj", count=8)',
        )
    parts = 3 if len(inputs) == 1 else 1
    rows = [linears[n].out_features for n in inputs]
    size = rows[0] // (parts * count)
    kv = (kv_count or rows[-1] // max(1, size)) * size
    if [*rows] != ([3 * count * size] if parts == 3 else [count * size, kv, kv]):
        raise LayoutError.at(
            "spt.heads",
            argument="count",
            got=f"{count} heads, {kv_count or count} of keys and values; {inputs} of {name!r} make {rows} features",
            need="whole heads, of one size in queries, keys and values",
            mend="count= and kv_count= say how many heads there are",
        )
    for each in inputs:
        _split_rows(linears[each], "weight", "bias", parts, size, names)
    split_parameter(linears[rest[0]], "weight", _cut_by_heads(linears[rest[0]].weight.shape, 1, size, names))


def _input_projections(linears: dict[str, nn.Linear]) -> list[str]:
    """The layers that make queries, keys and values; none if their names and lengths do not tell."""
    packed = [n for n, m in linears.items() if m.out_features == 3 * m.in_features]
    if len(packed) == 1:
        return packed
    short = {n: n.rpartition(".")[2].lower() for n in linears}
    found = [[n for n, s in short.items() if s.startswith(start)] for start in ("q", "k", "v")]
    return [f[0] for f in found] if all(len(f) == 1 for f in found) else []


# Inputs and results


def laid_out(x: Any, dims: dict[int, tuple[str, ...]], spec: P | None = None) -> Any:
    """A tensor whose dimensions are split by these axes; other dimensions as they lie, without these axes.

    spec: the layout of all dimensions, in place of that. A tensor that lies so stays as it is, whatever its blocks.
    """
    x = as_global(x)
    if not isinstance(x, torch.Tensor) or not all(-x.ndim <= d < x.ndim for d in dims):
        return x
    dims = {d % x.ndim: names for d, names in dims.items()}
    if not isinstance(x, GlobalTensor):
        return global_tensor(x, spec or P(*(dims.get(d) or None for d in range(x.ndim))))
    taken = {n for names in dims.values() for n in names}
    own = dims_of(x)
    new = []
    for d, dim in enumerate(own):
        names = dims.get(d, () if spec is not None else tuple(n for n in dim.names if n not in taken))
        new.append(dim if names == dim.names else Dim(tuple(names)))
    target = layout_of_dims(x._layout.shape, new)
    return x if target == x._layout else result(relaid(x._block, x._layout, target), target, x._groups)


def _lay_out_inputs(
    text: str, module: nn.Module, name: str, dims: dict[int, tuple[str, ...]], spec: P | None = None
) -> None:
    here(text).mesh.names(tuple(n for names in dims.values() for n in names), text)
    most = max((d + 1 if d >= 0 else -d for d in dims), default=0)

    def before(_: nn.Module, args: Any) -> Any:
        data = [x for x in args if _is_data(x)]
        if data and all(x.ndim < most for x in data):
            raise LayoutError.at(
                text,
                got=f"{name!r} with inputs of shapes {', '.join(str(list(x.shape)) for x in data)}",
                need=f"an input of {most} dimensions or more",
                mend="a style for these dimensions, or for another module",
            )
        return tuple(laid_out(x, dims, spec) if _is_data(x) else x for x in args)

    module.register_forward_pre_hook(before)


def _is_data(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0


def _made_whole(_: nn.Module, args: Any, kwargs: Any) -> Any:
    made = lambda x: x.whole() if isinstance(x, GlobalTensor) else x
    return tuple(map(made, args)), {k: made(v) for k, v in kwargs.items()}


class _ScatteredLinear(nn.Linear):
    """A linear layer whose sum over workers is scattered over a dimension of its result."""

    _scatter: tuple[int, tuple[str, ...]]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return scattered_linear(input, self.weight, self.bias, *self._scatter)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence={self._scatter[0]}"


def _scatter_result(module: Any, name: str, dim: int, names: tuple[str, ...]) -> None:
    if type(module) is not nn.Linear:
        raise LayoutError.at(
            "spt.row",
            argument="sequence",
            got=f"{name!r}, {type(module).__name__}",
            need="an nn.Linear",
            mend="spt.row(axis_name), and spt.sequence(axis_name) for what follows",
        )
    module.__class__ = _ScatteredLinear
    vars(module)["_scatter"] = dim, names
