"""Products of global arrays: sums of products over letters, as np.einsum has them.

Each axis of the mesh splits one letter, in all operands that have it, or none. A letter of the result stays split; over
one that is summed the workers' sums are added. Of all assignments that leave an axis where some operand has it, the one
that moves the fewest bytes is chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.errors import LayoutError, describe
from spmd.global_ops.call import Arguments, as_spec, check_gathered, dims_of, global_value, layout_by, on_blocks
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import Layout, P
from spmd.operators.reduce import psum
from spmd.operators.splitting import normal_axis

__all__ = ["contract"]

_Assignment = tuple[tuple[str, tuple[str, ...]], ...]
"""By letter the axes that split it."""


def _moved_bytes(source: Layout | None, target: Layout, itemsize: int) -> int:
    """The bytes that workers receive when an operand is laid out anew."""
    if source is None or source == target:
        return 0
    total = 0
    for have, want in zip(source.boxes, target.boxes, strict=True):
        volume = math.prod(b - a for a, b in want)
        common = math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(have, want, strict=True))
        total += (volume - common) * itemsize
    return total


@lru_cache(maxsize=1024)
def _plan(
    letters: tuple[str, ...],
    out: str,
    layouts: tuple[Layout | None, ...],
    itemsizes: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    axes: tuple[tuple[str, int], ...],
) -> _Assignment:
    """The assignment of axes to letters that moves the fewest bytes."""
    sizes = dict(axes)
    lengths = {c: n for word, shape in zip(letters, shapes, strict=True) for c, n in zip(word, shape, strict=True)}
    homes: dict[str, set[str]] = {}
    for word, layout in zip(letters, layouts, strict=True):
        if layout is not None:
            for c, names in zip(word, layout.spec.dims, strict=True):
                for name in names:
                    homes.setdefault(name, set()).add(c)
    repeated = {c for word in letters for c in word if word.count(c) > 1}
    names = sorted(homes)
    choices = [[None, *sorted(homes[name] - repeated)] for name in names]
    best: tuple[Any, _Assignment] | None = None
    for assignment in _assignments(names, choices):
        moved = 0
        for word, layout, itemsize, shape in zip(letters, layouts, itemsizes, shapes, strict=True):
            moved += _moved_bytes(layout, _target(word, shape, assignment, sizes), itemsize)
        entries, workers = math.prod(lengths[c] for c in out), math.prod(sizes.values())
        split = math.prod(sizes[n] for c, found in assignment.items() if c in out for n in found)
        summed = math.prod(sizes[n] for c, found in assignment.items() if c not in out for n in found)
        # An all-reduce of large blocks moves 2 (n - 1) / n of the block to each worker.
        moved += int(2 * (summed - 1) / summed * entries / split * max(itemsizes) * workers)
        key = (moved, entries // split, -sum(map(len, assignment.values())), sorted(assignment.items()))
        if best is None or key < best[0]:
            best = key, tuple(sorted(assignment.items()))
    assert best is not None
    return best[1]


def _assignments(names: Sequence[str], choices: Sequence[Sequence[str | None]]) -> Iterator[dict[str, tuple[str, ...]]]:
    """By letter the axes that split it, in every order. choices: for each axis its letters; None: it splits nothing."""
    for picks in itertools.product(*choices):
        found: dict[str, list[str]] = {}
        for name, c in zip(names, picks, strict=True):
            if c is not None:
                found.setdefault(c, []).append(name)
        for orders in itertools.product(*(itertools.permutations(group) for group in found.values())):
            yield dict(zip(found, orders, strict=True))


def _target(
    word: str, shape: tuple[int, ...], assignment: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
) -> Layout:
    """The layout of an operand by an assignment, in balanced blocks."""
    return Layout(shape, P(*(assignment.get(c) for c in word)), sizes)


def _parsed(subscripts: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str] | None:
    """The letters of each operand and of the result, with letters for ellipses. None where a letter has lengths that
    differ."""
    text = subscripts.replace(" ", "")
    inputs, arrow, out = text.partition("->")
    words = inputs.split(",")
    if len(words) != len(shapes):
        raise ValueError(f"{len(words)} subscripts for {len(shapes)} operands: {subscripts!r}")
    used = set(text)
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in used]
    most = max(
        (len(s) - len(w.replace("...", "")) for w, s in zip(words, shapes, strict=True) if "..." in w), default=0
    )
    batch = "".join(spare[:most])
    full = []
    for w, s in zip(words, shapes, strict=True):
        n = len(s) - len(w.replace("...", ""))
        full.append(w.replace("...", batch[most - n :] if n else ""))
        if len(full[-1]) != len(s):
            raise ValueError(f"subscripts {w!r} for an array of {len(s)} dimensions")
    if arrow:
        result = out.replace("...", batch)
        if batch and "..." not in out:
            raise ValueError(f"subscripts {subscripts!r} sum the dimensions of an ellipsis: name it in the result")
        missing = set(result) - set("".join(full))
        if missing:
            raise ValueError(f"subscripts {subscripts!r}: no operand has {sorted(missing)[0]!r}")
    else:
        every = "".join(full)
        result = batch + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in batch))
    lengths: dict[str, int] = {}
    for w, s in zip(full, shapes, strict=True):
        for c, n in zip(w, s, strict=True):
            if lengths.setdefault(c, n) != n:
                return None
    return full, result


def contract(where: str, subscripts: str, operands: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
    """np.einsum of global arrays and others. options: of it; by default optimized where dtypes allow any order."""
    operands = [a if hasattr(a, "dtype") else np.asarray(a) for a in operands]
    arguments = Arguments(tuple(operands), {})
    shapes = [tuple(np.shape(a)) for a in operands]
    parsed = _parsed(subscripts, shapes)
    if parsed is None or len(arguments.arrays) != len(operands):
        return whole(np.einsum, (subscripts, *operands), dict(options or {}))
    letters, out = parsed
    mesh = arguments.mesh
    values = [global_value(a) for a in operands]
    layouts = [None if value is None else layout_by(as_spec(value), value) for value in values]
    itemsizes = tuple(np.dtype(a.dtype).itemsize for a in operands)
    axes = tuple(mesh.axes.items())
    assignment = dict(_plan(tuple(letters), out, tuple(layouts), itemsizes, tuple(shapes), axes))
    specs = [P(*(assignment.get(c) for c in word)) for word in letters]
    gathered = [
        v for word, v in zip(letters, values, strict=True) if v is not None and assignment.keys().isdisjoint(word)
    ]
    check_gathered(where, gathered, "lay the operands out alike with spmd.put")
    out_spec = P(*(assignment.get(c) for c in out))
    names = tuple(n for c, found in assignment.items() if c not in out for n in found)
    text = f"{','.join(letters)}->{out}"
    given = dict(options or {})
    given.setdefault("optimize", all(np.dtype(a.dtype).kind in "fc" for a in operands))
    static = (text, names, tuple(sorted(given.items())))
    return on_blocks(where, _summing, static, operands, specs, out_spec, mesh)


def _summing(text: str, names: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    product = np.matmul if options == (("optimize", True),) and _is_matmul(text) else None

    def body(*blocks: Any) -> Any:
        part = np.einsum(text, *blocks, **dict(options)) if product is None else product(*blocks)
        if names and part.dtype.kind == "b":
            return psum(part.astype(np.int64), names) != 0
        return psum(part, names).astype(part.dtype) if names else part

    return body


def _is_matmul(text: str) -> bool:
    """Whether these subscripts, without ellipses, say np.matmul, which takes less time on small blocks."""
    inputs, _, out = text.partition("->")
    a, b, *more = inputs.split(",") if "," in inputs else (inputs, "")
    if more or not a or not b or len({*a}) < len(a) or len({*b}) < len(b) or a[-1] != b[-2:][0]:
        return False
    lead = a[:-2] or b[:-2]
    return b[:-2] in ("", lead) and out == lead + a[-2:-1] + b[-1:] * (len(b) > 1) and len({*out}) == len(out)


@implements(np.einsum)
def einsum(subscripts: Any, /, *operands: Any, out: Any = None, optimize: Any = False, **options: Any) -> Any:
    if not isinstance(subscripts, str):
        return whole(np.einsum, (subscripts, *operands), options)
    given = {k: v for k, v in {**options, "optimize": optimize}.items() if v is not None}
    if isinstance(given.get("optimize"), list):
        given["optimize"] = True
    return contract("np.einsum", subscripts, operands, given)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@implements(np.matmul)
def matmul(x1: Any, x2: Any, /, **options: Any) -> Any:
    options = {name: option for name, option in options.items() if option is not None}
    if not {*options} <= {"dtype"}:
        return whole(np.matmul, (x1, x2), options)
    m, n = np.ndim(x1), np.ndim(x2)
    if not m or not n:
        raise ValueError("matmul: a number is no matrix")
    _check_lengths("np.matmul", x1, x2, [(-1, -2 if n > 1 else 0)])
    left = ("..." if m > 2 else "") + ("ij" if m > 1 else "j")
    right = ("..." if n > 2 else "") + ("jk" if n > 1 else "j")
    out = ("..." if max(m, n) > 2 else "") + "i" * (m > 1) + "k" * (n > 1)
    if m > 2 and n > 2 and np.shape(x1)[:-2] != np.shape(x2)[:-2]:
        return whole(np.matmul, (x1, x2), options)
    return contract("np.matmul", f"{left},{right}->{out}", (x1, x2), options)


def _check_lengths(where: str, a: Any, b: Any, pairs: Sequence[tuple[int, int]]) -> None:
    """Raise unless the dimensions that are summed have equal lengths."""
    for i, j in pairs:
        if np.shape(a)[i] != np.shape(b)[j]:
            raise LayoutError.at(
                where,
                got=f"{describe(a)} and {describe(b)}",
                need="equal lengths in the dimensions that are summed; "
                f"these are {np.shape(a)[i]} and {np.shape(b)[j]}",
                mend="transpose one of them",
            )


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    m, n = np.ndim(a), np.ndim(b)
    if not m or not n:
        return np.multiply(*(x if hasattr(x, "dtype") else np.asarray(x) for x in (a, b)))
    _check_lengths("np.dot", a, b, [(-1, -2 if n > 1 else 0)])
    left, right = _LETTERS[:m], _LETTERS[10 : 10 + n]
    place = n - 2 if n > 1 else 0
    right = right[:place] + left[-1] + right[place + 1 :]
    result = left[:-1] + right.replace(left[-1], "")
    return contract("np.dot", f"{left},{right}->{result}", (a, b))


@implements(np.inner)
def inner(a: Any, b: Any, /) -> Any:
    m, n = np.ndim(a), np.ndim(b)
    if not m or not n:
        return np.multiply(*(x if hasattr(x, "dtype") else np.asarray(x) for x in (a, b)))
    _check_lengths("np.inner", a, b, [(-1, -1)])
    left, right = _LETTERS[:m], _LETTERS[10 : 10 + n - 1] + _LETTERS[m - 1]
    return contract("np.inner", f"{left},{right}->{left[:-1]}{right[:-1]}", (a, b))


@implements(np.outer)
def outer(a: Any, b: Any, out: Any = None) -> Any:
    return contract("np.outer", "i,j->ij", (np.ravel(a), np.ravel(b)))


@implements(np.vdot)
def vdot(a: Any, b: Any, /) -> Any:
    a, b = np.ravel(np.conj(a)), np.ravel(b)
    _check_lengths("np.vdot", a, b, [(0, 0)])
    return contract("np.vdot", "i,i->", (a, b))


@implements(
    *([np.vecdot] if hasattr(np, "vecdot") else []), *([np.linalg.vecdot] if hasattr(np.linalg, "vecdot") else [])
)
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1, keepdims: bool = False) -> Any:
    _check_lengths("np.vecdot", x1, x2, [(axis, axis)])
    product = (np.conj(x1) if x1.dtype.kind == "c" else x1) * x2
    return np.sum(product, axis=axis, keepdims=keepdims, dtype=product.dtype)


@implements(np.tensordot, *([np.linalg.tensordot] if hasattr(np.linalg, "tensordot") else []))
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    m, n = np.ndim(a), np.ndim(b)
    if np.ndim(axes) == 0:
        pairs = [*zip(range(m - int(axes), m), range(int(axes)), strict=True)]
    else:
        first, second = ((e,) if np.ndim(e) == 0 else tuple(e) for e in axes)
        pairs = [*zip(first, second, strict=True)]
    left, right = [*_LETTERS[:m]], [*_LETTERS[m : m + n]]
    pairs = [(normal_axis("np.tensordot", "axes", i, m), normal_axis("np.tensordot", "axes", j, n)) for i, j in pairs]
    if any(len({*side}) < len(pairs) for side in ([i for i, _ in pairs], [j for _, j in pairs])):
        raise ValueError(f"tensordot: axes {axes} name a dimension twice")
    _check_lengths("np.tensordot", a, b, pairs)
    for i, j in pairs:
        right[j] = left[i]
    summed = {c for c in right if c in left}
    out = "".join(c for c in (*left, *right) if c not in summed)
    return contract("np.tensordot", f"{''.join(left)},{''.join(right)}->{out}", (a, b))


@implements(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    dims = tuple(range(np.ndim(x))) if axis is None else dims_of("np.linalg.norm", axis, np.ndim(x))
    if axis is not None and len(dims) > 2:
        raise LayoutError.at(
            "np.linalg.norm", argument="axis", got=str(axis), need="one dimension, or two of matrices", mend="axis=None"
        )
    if ord is None or (ord == "fro" and len(dims) == 2):
        return _vector_norm(_size(x), 2, dims, keepdims)
    if len(dims) == 1:
        return _vector_norm(_size(x), ord, dims, keepdims)
    return whole(np.linalg.norm, (x,), {"ord": ord, "axis": axis, "keepdims": keepdims})


if hasattr(np.linalg, "vector_norm"):

    @implements(np.linalg.vector_norm)
    def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
        return _vector_norm(_size(x), ord, dims_of("np.linalg.vector_norm", axis, np.ndim(x)), keepdims)


def _size(x: Any) -> Any:
    return np.abs(x.astype(np.float64) if x.dtype.kind in "biu" else x)


def _vector_norm(size: Any, ord: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    if ord == 2:
        return np.sqrt(np.sum(np.square(size), axis=dims, keepdims=keepdims))
    if ord == np.inf:
        return np.max(size, axis=dims, keepdims=keepdims)
    if ord == -np.inf:
        return np.min(size, axis=dims, keepdims=keepdims)
    if ord == 0:
        return np.sum((size != 0).astype(size.dtype), axis=dims, keepdims=keepdims)
    if ord == 1:
        return np.sum(size, axis=dims, keepdims=keepdims)
    return np.sum(size**ord, axis=dims, keepdims=keepdims) ** (1.0 / ord)
