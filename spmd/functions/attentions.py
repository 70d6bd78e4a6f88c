"""Attention over heads or sequences that are split over workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions.arguments import as_number, layer
from spmd.functions.attention_plans import Options, Ring, attention_plan, with_dimensions
from spmd.functions.attention_tiles import Part, runs_of_heads
from spmd.functions.layouts import dtype_of
from spmd.functions.local import local
from spmd.functions.planned import Operand, is_split, run_layer
from spmd.layout import P, Spec
from spmd.mesh import here
from spmd.operators.reduce import AxisName
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["attention"]

_WHERE = "spmd.functions.attention"
_METHODS = ("heads", "sequence", "ring")
_NAMES = ("q", "k", "v", "mask", "bias")
_ARGUMENTS = ("spec", "kv_spec", "v_spec", "mask_spec", "bias_spec")
_SHAPES = {
    "q": "shape (..., heads, n, d)",
    "k": "shape (..., key heads, m, d), of as many dimensions as q",
    "v": "shape (..., key heads, m, e), of as many dimensions as q",
}


@api_boundary
@layer
def attention(
    q: Tree,
    k: Any,
    v: Any,
    mask: Any = None,
    bias: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    axis_name: AxisName | None = None,
    method: str | None = None,
    spec: Spec | None = None,
    kv_spec: Spec | None = None,
    v_spec: Spec | None = None,
    mask_spec: Spec | None = None,
    bias_spec: Spec | None = None,
    out_spec: Spec | None = None,
) -> Tree:
    """softmax(scale q kᵀ + bias) v, where the mask is true. Arrays of NumPy, CuPy or PyTorch.

    q: (..., heads, n, d). k: (..., key heads, m, d); v: (..., key heads, m, e), where heads is a multiple of key heads:
    head i uses head i // (heads / key heads) of k and v. Gives (..., heads, n, e). Floating; short dtypes are computed
    in float32.
    mask: booleans, true where a query sees a key. bias: floating, differentiated. Both broadcast to (..., heads, n, m).
    causal: query i sees keys 0 to i. scale: by default 1 / sqrt(d). A query that sees no key gives zeros.

    spec, kv_spec, mask_spec, bias_spec: in a body, how the whole arrays are split, of which q, of which k and v, mask
    and bias are this worker's blocks: specs, or a `Layout` on some of the workers, which saves the exchange of lengths.
    kv_spec None: as spec; the others: the whole. v_spec: of v, if another than kv_spec. Global arrays have layouts.
    axis_name: in place of spec, the axes that split the heads; with method "sequence" or "ring", the sequences.
    out_spec: how the result is to lie. None: where the queries are computed, or with "sequence" as q.
    method: what is computed where.
    - "heads": each worker computes the queries that it holds. It fetches the keys and values of their heads, of all
      positions that they may see. Nothing moves where the heads alone are split, and those of the keys lie with them.
    - "sequence": the workers that share a sequence bring it to whole sequences of some of the heads, which need not
      divide evenly, and bring the result back (DeepSpeed-Ulysses). Four all-to-alls; backward four.
    - "ring": each worker keeps its queries, and blocks of keys and values go round. With n blocks, n - 1 messages of k
      and as many of v from each worker; backward also n of each of their cotangents. No worker holds more than its own
      blocks and those that pass. If it is causal, the workers at places i and n - 1 - i of the ring first swap the
      second halves of their blocks, so that all have as much to compute: a message each of q, k and v, and of the
      result, which goes back; backward five and three. While a worker computes it also holds the half of q, and of the
      cotangent of the result, that it got. Blocks of uneven lengths are made even before, and the result is as q.
    - None: "heads" where no sequence of q is split; else "sequence" if there are as many heads as workers, or "ring".

    The score matrix is never held: it is computed by tiles, backward again, from the log-sum-exp of each row. Tiles
    that a causal mask leaves empty are skipped. Derivatives of second order hold it.
    Adjoint: with p the weights and s = p (g vᵀ - sum(g out)): of q scale s k, of k scale sᵀ q, of v pᵀ g, of bias s.
    Raises SpecError and LayoutError for arguments that do not fit. Source: Vaswani et al., "Attention is all you
    need", 2017; Dao et al., "FlashAttention", 2022; Jacobs et al., "DeepSpeed Ulysses", 2023; Liu, Zaharia, Abbeel,
    "Ring attention with blockwise transformers", 2023.

        >>> with spmd.Mesh(x=2):
        ...     q = k = v = spmd.put(np.array([[[0.0], [2.0]]]), P(None, "x"))
        ...     spmd.functions.attention(q, 0 * k, v, causal=True, method="ring").numpy()
        array([[[0.],
                [1.]]])
    """
    return _attention(
        (q, k, v, mask, bias), causal, scale, method, axis_name, (spec, kv_spec, v_spec, mask_spec, bias_spec), out_spec
    )


def _attention(arrays: tuple, causal: bool, scale: Any, method: Any, axis_name: Any, specs: tuple, out: Any) -> Any:
    """`attention`: local without specs and global arrays, else by a plan."""
    operands, options = checked_operands(arrays, causal, scale, method, axis_name, specs)

    def plan(*layouts: Any) -> Any:
        check_lengths([None if layout is None else layout.shape for layout in layouts])
        return attention_plan(_WHERE, *layouts, options, out)

    return run_layer(_WHERE, plan, operands) if out is not None or is_split(*operands) else _local(arrays, options)


def checked_operands(
    arrays: tuple, causal: bool, scale: Any, method: Any, axis_name: Any, specs: tuple
) -> tuple[list[Operand], Options]:
    """The operands and options of an attention, checked but for the lengths of split arrays."""
    for name, array in zip(_NAMES, arrays, strict=True):
        _check(name, array, arrays[0])
    scale = None if scale is None else as_number(_WHERE, "scale", scale, 0, math.inf)
    if method is not None and method not in _METHODS:
        need, mend = f"one of {', '.join(_METHODS)}, or None", f'method="{closest(str(method), _METHODS)}"'
        raise SpecError.at(_WHERE, argument="method", got=repr(method), need=need, mend=mend)
    spec = _spec_along(axis_name, method, specs[0], arrays[0].ndim)
    kv_spec = spec if specs[1] is None else specs[1]
    v_spec = kv_spec if specs[2] is None else specs[2]
    operands = [Operand(*each) for each in zip(_ARGUMENTS, arrays, (spec, kv_spec, v_spec, *specs[3:]), strict=True)]
    return operands, Options(bool(causal), scale, method)


def _local(arrays: tuple, options: Options) -> Any:
    """Of whole arrays."""
    q, k, v, mask, bias = arrays
    check_lengths([None if a is None else tuple(a.shape) for a in arrays])
    mask, bias = (None if a is None else with_dimensions(a, q.ndim) for a in (mask, bias))
    heads, (rows, columns) = q.shape[-3], (q.shape[-2], k.shape[-2])
    runs = runs_of_heads((0, heads), heads // k.shape[-3] if heads else 1)
    part = Part(((0, rows),), ((0, columns),), runs, options.causal, options.scale_for(q.shape[-1]))
    return local(q, "attentions").ruled(Ring(((part,),)), q, k, v, bias, mask)


def _check(name: str, array: Any, q: Any) -> None:
    """Raise unless an operand has the dimensions and the dtype of an attention. Lengths are checked with layouts."""
    optional = name in ("mask", "bias")
    if array is None and optional:
        return
    ndim, first = getattr(array, "ndim", None), getattr(q, "ndim", 0)
    if ndim is None or (ndim > first if optional else ndim < 3 or ndim != first):
        need = f"an array that broadcasts to (..., heads, n, m), or {name}=None" if optional else _SHAPES[name]
        mend = f"np.asarray({name}) of these dimensions; x[None] for one head"
        raise SpecError.at(_WHERE, argument=name, got=describe(array), need=need, mend=mend)
    dtype = dtype_of(array)
    if not (dtype.kind == "b" if name == "mask" else _is_floating(dtype)):
        need = "booleans, true where a query sees a key" if name == "mask" else "real floating-point numbers"
        mend = "mask > 0, or bias= for numbers that are added" if name == "mask" else f"{name}.astype(float)"
        raise SpecError.at(_WHERE, argument=name, got=describe(array), need=need, mend=mend)


def _is_floating(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name[0] in "bf")


def check_lengths(shapes: list[Any]) -> None:
    """Raise unless these shapes of the whole arrays fit."""
    q, k, v, mask, bias = shapes
    if k[:-3] != q[:-3] or k[-1] != q[-1] or (q[-3] % k[-3] if k[-3] else q[-3]):
        need = "(..., key heads, m, d) for q of (..., heads, n, d), heads a multiple of key heads"
        raise _misfit("k", k, need, q, "k of the batch and features of q")
    if v[:-1] != k[:-1]:
        raise _misfit(
            "v", v, "(..., key heads, m, e) for k of (..., key heads, m, d)", k, "v of as many keys as k", "k"
        )
    full = (*q[:-1], k[-2])
    for name, shape in (("mask", mask), ("bias", bias)):
        if shape is not None and any(n not in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)):
            raise _misfit(
                name, shape, f"a shape that broadcasts to {list(full)}, (..., heads, n, m)", q, f"reshape {name}"
            )


def _misfit(argument: str, shape: Any, need: str, other: Any, mend: str, of: str = "q") -> LayoutError:
    got = f"shape {list(shape)} for {of} of shape {list(other)}"
    return LayoutError.at(_WHERE, argument=argument, got=got, need=need, mend=mend)


def _spec_along(axis_name: AxisName | None, method: str | None, spec: Spec | None, ndim: int) -> Spec | None:
    """The spec of q: that which is given, or that which splits the heads, or the sequences, along these axes."""
    if axis_name is None:
        return spec
    if spec is not None:
        got, need = f"{axis_name!r}, and spec={spec}", "one of the two"
        raise SpecError.at(_WHERE, argument="axis_name", got=got, need=need, mend="leave axis_name out")
    names = here(_WHERE).mesh.names(axis_name, _WHERE)
    return P(*[None] * (ndim - 3), *((None, names) if method in ("sequence", "ring") else (names,)))
