"""Views: other orders, other dimensions, parts, and tensors joined from several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.global_tensors.meeting import (
    WHOLE,
    Dim,
    as_global,
    block_in,
    dims_of,
    layout_of_dims,
    meeting_dims,
)
from spmd.bridge.torch.global_tensors.registry import HANDLERS, handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result
from spmd.functions.movement import relaid
from spmd.mesh import here

_disabled = torch._C.DisableTorchFunctionSubclass


def own_dims(func: Any, x: GlobalTensor, args: Any, kwargs: Any) -> list[Dim]:
    """How each dimension of x lies. Raises where dimensions are joined, or the layout is on a grid."""
    if not x.is_separate:
        raise unhandled(func, args, kwargs, "a layout by a spec, in which each dimension is split by itself")
    return dims_of(x)


def gathered(func: Any, x: GlobalTensor, over: Sequence[int], args: Any, kwargs: Any) -> tuple[GlobalTensor, list[Dim]]:
    """x with some dimensions whole on every worker, as short ones have to be, and how its dimensions lie."""
    dims, shape = own_dims(func, x, args, kwargs), x._layout.shape
    if not any(dims[d].names for d in over):
        return x, dims
    dims = [WHOLE if d in over else dim for d, dim in enumerate(dims)]
    target = layout_of_dims(shape, dims)
    return GlobalTensor(relaid(x._block, x._layout, target), target), dims


def normal(d: int, ndim: int) -> int:
    if not -ndim <= d < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {d})")
    return d % ndim


# Order


def _permuted(func: Any, x: GlobalTensor, order: Sequence[int], args: Any, kwargs: Any) -> Any:
    dims, shape = own_dims(func, x, args, kwargs), x._layout.shape
    layout = layout_of_dims([shape[d] for d in order], [dims[d] for d in order])
    return GlobalTensor(x._block.permute(tuple(order)), layout)


@handles("permute")
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    x, *order = args
    order = order or [kwargs["dims"]]
    order = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
    return _permuted(func, x, [normal(d, x.ndim) for d in order], args, kwargs)


@handles("transpose swapaxes swapdims")
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    x, a, b = (*args, *kwargs.values())
    order = list(range(x.ndim))
    a, b = normal(a, x.ndim), normal(b, x.ndim)
    order[a], order[b] = b, a
    return _permuted(func, x, order, args, kwargs)


@handles("t adjoint")
def _turned(func: Any, args: Any, kwargs: Any) -> Any:
    order = list(range(args[0].ndim))
    order[-2:] = reversed(order[-2:])
    return _permuted(func, args[0], order, args, kwargs)


@handles("movedim moveaxis")
def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    x, source, target = args[0], argument(args, kwargs, 1, "source"), argument(args, kwargs, 2, "destination")
    source, target = ([s] if isinstance(s, int) else list(s) for s in (source, target))
    source, target = ([normal(d, x.ndim) for d in s] for s in (source, target))
    rest = iter(d for d in range(x.ndim) if d not in source)
    place = dict(zip(target, source, strict=True))
    return _permuted(func, x, [place[d] if d in place else next(rest) for d in range(x.ndim)], args, kwargs)


HANDLERS |= {getattr(torch.Tensor, name).__get__: _turned for name in ("T", "mT", "H", "mH")}


# Dimensions of length 1


@handles("unsqueeze")
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    x, d = (*args, *kwargs.values())
    dims, shape = own_dims(func, x, args, kwargs), list(x._layout.shape)
    d = normal(d, len(shape) + 1)
    return GlobalTensor(
        x._block.unsqueeze(d), layout_of_dims([*shape[:d], 1, *shape[d:]], [*dims[:d], WHOLE, *dims[d:]])
    )


@handles("squeeze")
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    x, *where = (*args, *kwargs.values())
    own_dims(func, x, args, kwargs)
    shape = x._layout.shape
    given = range(len(shape)) if not where else [where[0]] if isinstance(where[0], int) else where[0]
    gone = [d for d in (normal(d, len(shape)) for d in given) if shape[d] == 1]
    x, dims = gathered(func, x, gone, args, kwargs)
    kept = [d for d in range(len(shape)) if d not in gone]
    block = x._block.squeeze(tuple(gone)) if gone else x._block
    return result(block, layout_of_dims([shape[d] for d in kept], [dims[d] for d in kept]))


@handles("expand expand_as broadcast_to")
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    x, *size = args
    size = size or list(kwargs.values())
    if len(size) == 1 and not isinstance(size[0], int):
        size = size[0].shape if isinstance(size[0], torch.Tensor) else size[0]
    x = as_global(x)
    if not isinstance(x, GlobalTensor):
        return x.expand(size)
    first, shape = len(size) - x.ndim, list(x.shape)
    if first < 0:
        raise RuntimeError(f"the number of sizes provided ({len(size)}) must be at least that of dimensions ({x.ndim})")
    longer = [d for d, n in enumerate(shape) if n == 1 and size[first + d] not in (1, -1)]
    x, dims = gathered(func, x, longer, args, kwargs)
    shape_, dims_ = [1] * first + shape, [WHOLE] * first + dims
    size = [n if m == -1 else m for n, m in zip(shape_, size, strict=True)]
    if any(m != n != 1 for n, m in zip(shape_, size, strict=True)):
        raise RuntimeError(f"the expanded size {list(size)} must match the existing size {shape}")  # as torch does
    layout = layout_of_dims(size, dims_)
    return result(x._block.expand(layout.block_shape(here("a global tensor").index)), layout)


# Dimensions split and joined


@handles("reshape view flatten unflatten view_as reshape_as ravel")
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    name = func.__name__
    if name == "view" and isinstance(argument(args, kwargs, 1, "dtype"), torch.dtype):
        raise unhandled(func, args, kwargs)
    x = as_global(x)
    if not isinstance(x, GlobalTensor):
        return x.reshape(args[1].shape)
    return reshaped(func, x, _new_shape(name, x, args, kwargs), args, kwargs)


def _new_shape(name: str, x: GlobalTensor, args: Any, kwargs: Any) -> list[int]:
    shape = list(x.shape)
    if name in ("view_as", "reshape_as"):
        return list(args[1].shape)
    if name == "ravel":
        return [-1]
    if name == "flatten":
        start = normal(argument(args, kwargs, 1, "start_dim", 0), len(shape))
        end = normal(argument(args, kwargs, 2, "end_dim", -1), len(shape))
        return [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]]
    if name == "unflatten":
        d = normal(argument(args, kwargs, 1, "dim"), len(shape))
        sizes = list(argument(args, kwargs, 2, "sizes"))
        known = math.prod(n for n in sizes if n != -1)
        return [*shape[:d], *(shape[d] // known if n == -1 else n for n in sizes), *shape[d + 1 :]]
    size = args[1:] or tuple(kwargs.values())
    return list(size[0]) if len(size) == 1 and not isinstance(size[0], int) else list(size)


def reshaped(func: Any, x: GlobalTensor, new: Sequence[int], args: Any, kwargs: Any) -> Any:
    """x in another shape. Dimensions that are joined stay apart in the layout where blocks would not be contiguous."""
    total = math.prod(x._layout.shape)
    if -1 in new:
        known = math.prod(n for n in new if n != -1)
        new = [total // known if n == -1 and known else 0 if n == -1 else n for n in new]
    if math.prod(new) != total:
        raise RuntimeError(f"shape '{list(new)}' is invalid for input of size {total}")
    if x._layout.spec is None:
        raise unhandled(func, args, kwargs, "a layout by a spec")
    old = list(zip(x._layout.shape, dims_of(x), strict=True))
    aligned, pieces = [], []
    for sources, targets in _matched([n for n, _ in old], new):
        made = _regrouped([old[d] for d in sources], [new[d] for d in targets])
        if made is None:
            raise unhandled(func, args, kwargs, f"a shape that the blocks can take: {list(new)} divides them")
        before, after = made
        aligned += before
        pieces += after
    layout = layout_of_dims([n for n, _ in old], aligned)
    block = relaid(x._block, x._layout, layout)
    inner = [part for piece in pieces for part in piece]
    target = layout_of_dims([n for n, _ in inner], [dim for _, dim in inner])
    block = block.reshape(target.block_shape(here("a global tensor").index))
    groups = tuple(map(len, pieces))
    return result(block, target, None if all(n == 1 for n in groups) else groups)


def _matched(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of the two shapes with equal products, as short as possible."""
    runs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        sources, targets, a, b = [], [], 1, 1
        while True:
            if i < len(old) and (not sources or a < b or (a == b == 1 and old[i] == 1 and not targets)):
                a, i = a * old[i], i + 1
                sources.append(i - 1)
            elif j < len(new) and (not targets or b < a):
                b, j = b * new[j], j + 1
                targets.append(j - 1)
            else:
                break
            if a == b and sources and targets:
                break
            if (i == len(old) and j == len(new)) or (a == b == 0):
                break
        runs.append((sources, targets))
        if a != b or 0 in (a, b):  # lengths of 0 leave no other way than all at once
            sources, targets = (
                list(range(sources[0] if sources else 0, len(old))),
                list(range(targets[0] if targets else 0, len(new))),
            )
            runs[-1] = sources, targets
            break
    return runs


Piece = list[tuple[int, Dim]]


def _regrouped(old: Piece, new: Sequence[int]) -> tuple[list[Dim], list[Piece]] | None:
    """How dimensions lie that take the place of others with the same product.

    Gives how the old ones have to lie first, and for each new one the dimensions of the layout that it joins.
    """
    sizes, dims = [n for n, _ in old], [dim for _, dim in old]
    split = [k for k, dim in enumerate(dims) if dim.names]
    pieces: list[Piece] = [[(n, WHOLE)] for n in new]
    if not split or 0 in sizes:  # without entries it does not matter who has them
        return [WHOLE] * len(old), pieces
    if sizes == list(new):
        return dims, [[(n, dim)] for n, dim in zip(new, dims, strict=True)]
    longer = [k for k, n in enumerate(new) if n != 1]
    if len(longer) <= 1 and new and (not longer or sum(n != 1 for n in sizes) > 1):
        pieces[longer[0] if longer else 0] = _merged(old)
        return dims, pieces
    if not longer:  # one entry, or none, whose dimensions go
        return [WHOLE] * len(old), pieces
    return _divided(old, new, split[0]) if split == [_first_real(old)] else None


def _first_real(old: Piece) -> int:
    return next((k for k, (n, dim) in enumerate(old) if n != 1 or dim.names), 0)


def _merged(old: Piece) -> Piece:
    """The dimensions of a layout that one dimension joins: one, where the first alone is split."""
    first = _first_real(old)
    if [k for k, (_, dim) in enumerate(old) if dim.names] != [first]:
        return [(n, dim) for n, dim in old if n != 1 or dim.names]
    rest = math.prod(n for k, (n, _) in enumerate(old) if k != first)
    n, dim = old[first]
    cut = None if dim.cut is None else tuple(c * rest for c in dim.cut)
    return [(n * rest, Dim(dim.names, cut))]


def _divided(old: Piece, new: Sequence[int], at: int) -> tuple[list[Dim], list[Piece]] | None:
    """Dimensions of which the first is split, as others whose first is split: at multiples of the rest."""
    n, dim = old[at]
    whole = math.prod(m for k, (m, _) in enumerate(old) if k != at)
    first = next(k for k, m in enumerate(new) if m != 1)
    rest = math.prod(m for k, m in enumerate(new) if k != first)
    cut = layout_of_dims((n,), [dim]).cuts[0]
    dims = [d for _, d in old]
    if any(c * whole % rest for c in cut):  # the blocks move, to whole entries of the first new dimension
        if whole != 1:
            return None
        cut = tuple(c * rest for c in layout_of_dims((new[first],), [Dim(dim.names)]).cuts[0])
        dims[at] = Dim(dim.names, cut)
    pieces: list[Piece] = [[(m, WHOLE)] for m in new]
    pieces[first] = [(new[first], Dim(dim.names, tuple(c * whole // rest for c in cut)))]
    return dims, pieces


# Parts


@handles("split chunk tensor_split unbind select narrow split_with_sizes unsafe_chunk unsafe_split hsplit vsplit")
def _parts(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = args[0], func.__name__
    with _disabled():
        ndim = x.ndim
    if name in ("select", "narrow"):
        d = normal(argument(args, kwargs, 1, "dim"), ndim)
        start = argument(args, kwargs, 2, "index" if name == "select" else "start")
        length = 1 if name == "select" else argument(args, kwargs, 3, "length")
        start = int(start) % x.shape[d] if start < 0 else int(start)
        part = sliced(func, x, d, start, start + length, args, kwargs)
        return _dropped(part, d) if name == "select" else part
    if name == "unbind":
        d = normal(argument(args, kwargs, 1, "dim", 0), ndim)
        parts = [sliced(func, x, d, k, k + 1, args, kwargs) for k in range(x.shape[d])]
        return tuple(_dropped(p, d) for p in parts)
    if name in ("hsplit", "vsplit", "tensor_split"):
        raise unhandled(func, args, kwargs)
    d = normal(argument(args, kwargs, 2, "dim", 0), ndim)
    sizes = argument(args, kwargs, 1, "chunks" if "chunk" in name else "split_size")
    sizes = kwargs.get("split_size_or_sections", kwargs.get("split_sizes", sizes)) if sizes is None else sizes
    n = x.shape[d]
    if isinstance(sizes, int):
        step = max(1, -(-n // sizes)) if "chunk" in name else sizes
        sizes = [min(step, n - k) for k in range(0, n, step)] or [0]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(sliced(func, x, d, a, a + m, args, kwargs) for a, m in zip(starts, sizes, strict=True))


def _dropped(x: Any, d: int) -> Any:
    return _squeeze(torch.squeeze, (x, d), {}) if isinstance(x, GlobalTensor) else x.squeeze(d)


def sliced(func: Any, x: GlobalTensor, d: int, start: int, stop: int, args: Any, kwargs: Any, step: int = 1) -> Any:
    """The entries start, start + step, ... before stop along a dimension. Each worker keeps what it has of them."""
    if x._groups[d] > 1:
        return _slice_of_joined(func, x, d, start, stop, step, args, kwargs)
    k = sum(x._groups[:d])
    if x._layout.spec is None:
        raise unhandled(func, args, kwargs, "a layout by a spec")
    dims, shape = dims_of(x), list(x._layout.shape)
    start, stop = min(max(start, 0), shape[k]), min(max(stop, 0), shape[k])
    length = max(0, -(-(stop - start) // step))
    if (start, length, step) == (0, shape[k], 1):
        return x
    shape[k] = length
    if not dims[k].names:
        block = x._block[(slice(None),) * k + (slice(start, max(start, stop), step),)]
        return GlobalTensor(block, layout_of_dims(shape, dims), x._groups)
    cut, low, kept, mine = x._layout.cuts[k], 0, [], slice(0, 0)
    place = (x._layout.positions(here("a global tensor").index) or ())[k]
    for b, c in enumerate(cut):
        first = max(0, -(-(low - start) // step))  # the first entry that lies in this block, and the one after its last
        last = min(length, max(0, -(-(low + c - start) // step)))
        count = max(0, last - first)
        kept.append(count)
        if b == place and count:
            at = start + first * step - low
            mine = slice(at, at + (count - 1) * step + 1, step)
        low += c
    dims[k] = Dim(dims[k].names, tuple(kept))
    return GlobalTensor(x._block[(slice(None),) * k + (mine,)], layout_of_dims(shape, dims), x._groups)


def _slice_of_joined(
    func: Any, x: GlobalTensor, d: int, start: int, stop: int, step: int, args: Any, kwargs: Any
) -> Any:
    """A slice of joined dimensions: whole entries of the first of them, which is not split."""
    k = sum(x._groups[:d])
    dims, shape = dims_of(x), list(x._layout.shape)
    rest = math.prod(shape[k + 1 : k + x._groups[d]])
    if step != 1 or dims[k].names or start % rest or stop % rest:
        raise unhandled(func, args, kwargs, f"slices at multiples of {rest}, where the blocks begin anew")
    block = x._block[(slice(None),) * k + (slice(start // rest, stop // rest),)]
    shape[k] = (stop - start) // rest
    groups = list(x._groups)
    if shape[k] == 1:
        block = block.squeeze(k)
        del shape[k], dims[k]
        groups[d] -= 1
    layout = layout_of_dims(shape, dims)
    return GlobalTensor(block, layout, None if all(n == 1 for n in groups) else groups)


@handles("__getitem__")
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    x, index = args
    index = list(index) if isinstance(index, tuple) else [index]
    basic = all(isinstance(i, int | slice) or i is None or i is ... for i in index)
    if not isinstance(x, GlobalTensor) or not basic:
        raise unhandled(func, args, kwargs, "numbers and slices as indices")
    if ... in index:
        at = index.index(...)
        missing = x.ndim - sum(i is not None and i is not ... for i in index)
        index[at : at + 1] = [slice(None)] * missing
    d = 0
    for k, i in enumerate(index):
        if not isinstance(x, GlobalTensor):  # what split it is gone
            return x[(slice(None),) * d + tuple(index[k:])]
        if i is None:
            x = _unsqueeze(torch.unsqueeze, (x, d), {})
            d += 1
            continue
        n = x.shape[d]
        if isinstance(i, int):
            if not -n <= i < n:
                raise IndexError(f"index {i} is out of bounds for dimension {d} with size {n}")
            x = _dropped(sliced(func, x, d, i % n, i % n + 1, args, kwargs), d)
        else:
            start, stop, step = i.indices(n)
            x = sliced(func, x, d, start, max(start, stop), args, kwargs, step)
            d += 1
    return x


# Several tensors


@handles("cat concat concatenate stack")
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, d = args[0] if args else kwargs["tensors"], argument(args, kwargs, 1, "dim", kwargs.get("axis", 0))
    tensors = [as_global(x) for x in tensors]
    if func.__name__ == "stack":
        tensors = [x.unsqueeze(d) for x in tensors]
    ndim = tensors[0].ndim
    d = normal(d, ndim)
    given = [(x._layout.shape, own_dims(func, x, args, kwargs)) for x in tensors if isinstance(x, GlobalTensor)]
    shape = list(tensors[0].shape)
    shape[d] = 0
    lies = meeting_dims(shape, [([*s[:d], 0, *s[d + 1 :]], [*own[:d], WHOLE, *own[d + 1 :]]) for s, own in given])
    blocks, total = [], 0
    for x in tensors:
        target = layout_of_dims(x.shape, lies)
        blocks.append(block_in(x, tuple(x.shape), target))
        total += x.shape[d]
    shape[d] = total
    return result(torch.cat(blocks, d), layout_of_dims(shape, lies))
