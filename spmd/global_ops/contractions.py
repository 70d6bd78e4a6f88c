"""Products of global arrays: sums of products over letters, as np.einsum has them.

`assignments` says which axes of the mesh split which letters. A letter of the result stays split; over one that is
summed the workers' sums are added. What a worker needs of an operand it gathers if that is little; else the blocks go
round, see `rings`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmd.array_functions import common_mesh, is_short, of_parts
from spmd.autodiff.dtypes import mean_dtype
from spmd.autodiff.registry import primitive
from spmd.autodiff.rules.linalg import einsum_rule
from spmd.autodiff.tracer import Array
from spmd.errors import LayoutError, describe
from spmd.global_ops.assignments import Product, assign
from spmd.global_ops.call import Arguments, check_gathered, dims_of, global_value, on_blocks
from spmd.global_ops.registry import implements
from spmd.global_ops.rings import Ring, Side, ring_product
from spmd.global_ops.whole import whole
from spmd.layout_rules import Rule
from spmd.operators.reduce import psum
from spmd.operators.splitting import normal_axis
from spmd.settings import gather_limit

__all__ = ["contract"]


@lru_cache(maxsize=1024)
def _parsed(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[str, ...], str] | None:
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
    return tuple(full), result


def contract(where: str, subscripts: str, operands: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
    """np.einsum of global arrays and others. options: of it; by default optimized where dtypes allow any order.

    Over a split letter that is summed the result is unreduced.
    """
    operands = [a if hasattr(a, "dtype") else np.asarray(a) for a in operands]
    options = dict(options or {})
    options.setdefault("optimize", all(np.dtype(a.dtype).kind in "fc" for a in operands))
    dtypes, values = [np.dtype(a.dtype) for a in operands], [global_value(a) for a in operands]
    dtype = np.dtype(options.get("dtype") or np.result_type(*dtypes))
    if is_short(dtype):  # added up in a longer dtype, and rounded once
        options = {name: option for name, option in options.items() if name != "dtype"}
        product = contract(where, subscripts, [a.astype(mean_dtype(dtype)) for a in operands], options)
        return product.astype(np.matmul(*[np.empty((0, 0), dtype)] * 2).dtype if where == "np.matmul" else dtype)
    arguments = Arguments(tuple(operands), {})
    shapes = tuple(tuple(np.shape(a)) for a in operands)
    parsed = _parsed(subscripts, shapes)
    if parsed is None or len(arguments.arrays) != len(operands):
        return whole(np.einsum, (subscripts, *operands), options)
    letters, out = parsed
    product = Product(
        letters,
        out,
        shapes,
        tuple(None if value is None else value.layout.reduced for value in values),
        tuple(dtype.itemsize for dtype in dtypes),
        _summed_as(dtype),
        tuple(arguments.mesh.axes.items()),
    )
    found = assign(product, gather_limit())
    goes_round = found.held != found.used
    text, static = f"{','.join(letters)}->{out}", tuple(sorted(options.items()))
    if not goes_round and any(type(a) is Array for a in operands):
        return _product(*operands, subscripts=text, options=static)
    if (goes_round or found.gathered) and len(letters) > 1:
        words = tuple(_simplified(k, letters, out) for k in range(len(letters)))
        if words != letters:
            pairs = zip(operands, letters, words, strict=True)
            operands = [x if a == b else np.einsum(f"{a}->{b}", x.astype(dtype)) for x, a, b in pairs]
            return contract(where, f"{','.join(words)}->{out}", operands, options)
    gathered = [value for k in found.gathered if (value := values[k]) is not None]
    check_gathered(where, gathered, "lay the operands out alike with spmd.put")
    ring = None
    if goes_round:
        ring = Ring((*map(Side, letters, found.held, found.used), Side(out, found.out, found.out)), static)
    # Of booleans a product is true where any part is: no sum of parts.
    added, unreduced = (found.summed, ()) if dtype.kind == "b" else ((), found.summed)
    out_layout = found.out.with_unreduced(unreduced)
    if ring is None and not added:
        common_mesh(where, arguments.globals)
        result = of_parts(_summing(text, (), static, None), operands, found.held, out_layout, arguments.mesh)
        return result if result.ndim else result.reduced
    specs = [layout.spec if layout.balanced else layout for layout in (*found.held, out_layout)]
    return on_blocks(where, _summing, (text, added, static, ring), operands, specs[:-1], specs[-1], arguments.mesh)


def _simplified(k: int, words: Sequence[str], out: str) -> str:
    """The letters of operand k, each once, without those that nothing else has: they are summed by themselves."""
    others = {*out, *itertools.chain(*words[:k], *words[k + 1 :])}
    return "".join(c for c in dict.fromkeys(words[k]) if c in others)


def _summed_as(dtype: np.dtype) -> np.dtype:
    """The dtype in which workers add their parts: booleans are counted."""
    return np.dtype(np.int64) if dtype.kind == "b" else dtype


def _summing(
    text: str, names: tuple[str, ...], options: tuple[tuple[str, Any], ...], ring: Ring | None
) -> Callable[..., Any]:
    """The product of the blocks, a part of the sum over the workers. names: the axes along which this is taken, of
    booleans. ring: of blocks that go round."""
    product: Any = partial(np.einsum, text, **dict(options))
    if ring is not None:
        product = partial(ring_product, ring=ring)
    elif options == (("optimize", True),) and _is_matmul(text):
        product = np.matmul

    def body(*blocks: Any) -> Any:
        part = product(*blocks)
        return psum(part.astype(np.int64), names) != 0 if names else part

    return body


@lru_cache(maxsize=1024)
def _is_matmul(text: str) -> bool:
    """Whether these subscripts, without ellipses, say np.matmul, which takes less time on small blocks."""
    inputs, _, out = text.partition("->")
    a, b, *more = inputs.split(",") if "," in inputs else (inputs, "")
    if more or not a or not b or len({*a}) < len(a) or len({*b}) < len(b) or a[-1] != b[-2:][0]:
        return False
    lead = a[:-2] or b[:-2]
    return b[:-2] in ("", lead) and out == lead + a[-2:-1] + b[-1:] * (len(b) > 1) and len({*out}) == len(out)


def _rule(k: int, g: Any, ans: Any, *operands: Any, subscripts: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return einsum_rule(k, g, ans, *operands, subscripts=subscripts, optimize=True)


@primitive("np.einsum", variadic=_rule, linear=True)
def _product(*operands: Any, subscripts: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """A product whose derivatives are products too, each laid out by itself."""
    return contract("np.einsum", subscripts, operands, dict(options))


@implements(np.einsum, rule=Rule.PRODUCT)
def einsum(subscripts: Any, /, *operands: Any, out: Any = None, optimize: Any = False, **options: Any) -> Any:
    if not isinstance(subscripts, str):
        return whole(np.einsum, (subscripts, *operands), options)
    given = {k: v for k, v in {**options, "optimize": optimize}.items() if v is not None}
    if isinstance(given.get("optimize"), list):
        given["optimize"] = True
    return contract("np.einsum", subscripts, operands, given)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@implements(np.matmul, rule=Rule.PRODUCT)
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


@implements(np.dot, rule=Rule.PRODUCT)
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


@implements(np.inner, rule=Rule.PRODUCT)
def inner(a: Any, b: Any, /) -> Any:
    m, n = np.ndim(a), np.ndim(b)
    if not m or not n:
        return np.multiply(*(x if hasattr(x, "dtype") else np.asarray(x) for x in (a, b)))
    _check_lengths("np.inner", a, b, [(-1, -1)])
    left, right = _LETTERS[:m], _LETTERS[10 : 10 + n - 1] + _LETTERS[m - 1]
    return contract("np.inner", f"{left},{right}->{left[:-1]}{right[:-1]}", (a, b))


@implements(np.outer, rule=Rule.PRODUCT)
def outer(a: Any, b: Any, out: Any = None) -> Any:
    return contract("np.outer", "i,j->ij", (np.ravel(a), np.ravel(b)))


@implements(np.vdot, rule=Rule.PRODUCT)
def vdot(a: Any, b: Any, /) -> Any:
    a = np.asarray(a) if not hasattr(a, "dtype") else a
    a, b = np.ravel(np.conj(a) if a.dtype.kind == "c" else a), np.ravel(b)
    _check_lengths("np.vdot", a, b, [(0, 0)])
    return contract("np.vdot", "i,i->", (a, b))


@implements(
    *([np.vecdot] if hasattr(np, "vecdot") else []),
    *([np.linalg.vecdot] if hasattr(np.linalg, "vecdot") else []),
    rule=Rule.SUMMED,
)
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1, keepdims: bool = False) -> Any:
    _check_lengths("np.vecdot", x1, x2, [(axis, axis)])
    product = (np.conj(x1) if x1.dtype.kind == "c" else x1) * x2
    return np.sum(product, axis=axis, keepdims=keepdims, dtype=product.dtype)


@implements(np.tensordot, *([np.linalg.tensordot] if hasattr(np.linalg, "tensordot") else []), rule=Rule.PRODUCT)
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


@implements(np.linalg.norm, rule=Rule.REDUCED)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    dims = tuple(range(np.ndim(x))) if axis is None else dims_of("np.linalg.norm", axis, np.ndim(x))
    if axis is not None and len(dims) > 2:
        raise LayoutError.at(
            "np.linalg.norm", argument="axis", got=str(axis), need="one dimension, or two of matrices", mend="axis=None"
        )
    if ord is None or (ord == "fro" and len(dims) == 2):
        return _vector_norm(x, 2, dims, keepdims)
    if len(dims) == 1:
        return _vector_norm(x, ord, dims, keepdims)
    return whole(np.linalg.norm, (x,), {"ord": ord, "axis": axis, "keepdims": keepdims})


if hasattr(np.linalg, "vector_norm"):

    @implements(np.linalg.vector_norm, rule=Rule.REDUCED)
    def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
        return _vector_norm(x, ord, dims_of("np.linalg.vector_norm", axis, np.ndim(x)), keepdims)


def _size(x: Any) -> Any:
    return np.abs(x.astype(np.float64) if x.dtype.kind in "biu" else x)


def _squares(x: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    """The sums of the squares of magnitudes: as a product, which makes no array of squares. Numbers of short floating
    point are added up in a longer dtype."""
    if x.dtype.kind in "biu" or is_short(x.dtype) or not dims:
        return np.sum(np.square(_size(x)), axis=dims, keepdims=keepdims)
    word = _LETTERS[: len(x.shape)]
    out = "".join(c for d, c in enumerate(word) if d not in dims)
    is_complex = x.dtype.kind == "c"
    total = contract("np.linalg.norm", f"{word},{word}->{out}", (x, np.conj(x) if is_complex else x))
    total = np.real(total) if is_complex else total
    return np.expand_dims(total, dims) if keepdims else total


def _vector_norm(x: Any, ord: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    if ord == 2:
        return np.sqrt(_squares(x, dims, keepdims))
    size = _size(x)
    if ord == np.inf:
        return np.max(size, axis=dims, keepdims=keepdims)
    if ord == -np.inf:
        return np.min(size, axis=dims, keepdims=keepdims)
    if ord == 0:
        return np.sum((size != 0).astype(size.dtype), axis=dims, keepdims=keepdims)
    if ord == 1:
        return np.sum(size, axis=dims, keepdims=keepdims)
    return np.sum(size**ord, axis=dims, keepdims=keepdims) ** (1.0 / ord)
