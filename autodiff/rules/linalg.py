"""Rules of products of matrices and tensors, and of norms."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from spmd.autodiff.allocation import product, scaled
from spmd.autodiff.dispatch import by_numpy
from spmd.autodiff.dtypes import is_foreign
from spmd.autodiff.primitive import composite
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.rules.elementwise import nonzero
from spmd.autodiff.rules.reduce import array, conj, expand, largest
from spmd.autodiff.rules.shape import cast
from spmd.errors import DifferentiationError

# np.matmul: a vector on the left is a row, one on the right a column, and the dimensions before the last two are
# a batch. Where only the other operand has a batch, contracting over it at once saves a product per member.


def _matmul_left(g, _ans, _x, y):
    m, n = len(_x.shape), y.ndim
    if m == 1 == n:
        return scaled(g, y)
    if n == 1:
        return g[..., None] * y
    if m == 1 or (m == 2 and n > 2):
        batch = [*range(n - 2)]
        return np.tensordot(g, y, ([*batch, g.ndim - 1], [*batch, n - 1]))
    return product(g, y.T) if n == 2 else g @ y.swapaxes(-1, -2)


def _matmul_right(g, _ans, x, _y):
    m, n = x.ndim, len(_y.shape)
    if m == 1:
        return x[:, None] * g[..., None, :] if n > 1 else scaled(g, x)
    if m == 2:
        return g @ x if n == 1 else product(x.T, g)
    if n < 3:
        batch = [*range(m - 1)]
        return np.tensordot(x, g, (batch, batch))
    return x.swapaxes(-1, -2) @ g


rule(np.matmul, _matmul_left, _matmul_right, early=True).fun = product


@composite(np.linalg.matmul)
def matmul(x1, x2, /):
    return np.matmul(x1, x2)


@primitive("np.dot", lambda g, _ans, x: scaled(2 * g, x))
def _dot_itself(x):
    """A real vector's, whose cotangent is then one array, not a sum of two."""
    return np.dot(x, x)


def _product(fun, composition, a, b):
    """A composition of products of entries: NumPy rounds those of complex entries as its loops happen to run."""
    if np.iscomplexobj(a) or np.iscomplexobj(b):
        return by_numpy(fun, composition, a, b)
    return composition(a, b)


@composite(np.dot)
def dot(a, b, out=None):
    a, b = array(a), array(b)
    if a is b and a.ndim == 1 and a.dtype.char in "fdg":
        return _dot_itself(a)
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return _product(np.dot, np.multiply, a, b)
    plain = (a.ndim == 1 or b.ndim < 3) and not is_foreign(np.result_type(a.dtype, b.dtype))
    if plain:
        return np.matmul(a, b)
    return by_numpy(np.dot, lambda a, b: np.tensordot(a, b, (-1, -min(b.ndim, 2))), a, b)


@composite(np.inner)
def inner(a, b, /):
    a, b = array(a), array(b)
    return np.tensordot(a, b, (-1, -1)) if np.ndim(a) and np.ndim(b) else by_numpy(np.inner, np.multiply, a, b)


@composite(np.vdot)
def vdot(a, b, /):
    return _product(np.vdot, _vdot, a, b)


def _vdot(a, b):
    flat = np.ravel(a)
    return dot(conj(flat), flat if a is b else np.ravel(b))


@composite(np.outer)
def outer(a, b, out=None):
    return _product(np.outer, lambda a, b: np.ravel(a)[:, None] * np.ravel(b), a, b)


@composite(np.linalg.outer)
def linalg_outer(x1, x2, /):
    if np.ndim(x1) != 1 or np.ndim(x2) != 1:
        raise ValueError("np.linalg.outer needs vectors")
    return np.outer(x1, x2)


def _operands(name: str, arrays, ndims, dtype=None, casting: Any = "same_kind", order=None, subok=None, **others):
    """The operands of a generalised ufunc, as arrays of the dtype asked for and of these numbers of dimensions."""
    if others:
        raise DifferentiationError.at(
            name,
            argument=next(iter(others)),
            got="an option that is not supported where the function is differentiated",
            need="no others than axis and keepdims (of vecdot), dtype and casting",
            mend="move the dimensions by np.moveaxis",
        )
    arrays = [cast(array(x), dtype, casting) for x in arrays]
    for x, n in zip(arrays, ndims, strict=True):
        if x.ndim < n:
            raise ValueError(f"{name} needs operands of {ndims} dimensions at least, and one has {x.ndim}")
    return arrays


@composite(np.vecdot, by_numpy=True)
def vecdot(x1, x2, /, *, axis=-1, keepdims=False, **options):
    x1, x2 = (np.moveaxis(x, axis, -1) for x in _operands("np.vecdot", (x1, x2), (1, 1), **options))
    if x1.shape[-1] != x2.shape[-1]:
        raise ValueError(f"np.vecdot needs vectors of one length, not of {x1.shape[-1]} and {x2.shape[-1]}")
    if is_foreign(np.result_type(x1.dtype, x2.dtype)):
        result = (conj(x1)[..., None, :] @ x2[..., None])[..., 0, 0]
    else:
        result = np.sum(conj(x1) * x2, -1)
    return np.expand_dims(result, axis) if keepdims else result


@composite(np.linalg.vecdot, by_numpy=True)
def linalg_vecdot(x1, x2, /, *, axis=-1):
    return vecdot(x1, x2, axis=axis)


if hasattr(np, "matvec"):

    @composite(np.matvec, by_numpy=True)
    def matvec(x1, x2, /, **options):
        x1, x2 = _operands("np.matvec", (x1, x2), (2, 1), **options)
        return np.matmul(x1, x2[..., None])[..., 0]

    @composite(np.vecmat, by_numpy=True)
    def vecmat(x1, x2, /, **options):
        x1, x2 = _operands("np.vecmat", (x1, x2), (1, 2), **options)
        return np.matmul(conj(x1)[..., None, :], x2)[..., 0, :]


@composite(np.kron)
def kron(a, b):
    return _product(np.kron, _kron, a, b)


def _kron(a, b):
    ndim = max(np.ndim(a), np.ndim(b))
    left, right = ((1,) * (ndim - np.ndim(x)) + np.shape(x) for x in (a, b))
    a = np.reshape(a, [m for n in left for m in (n, 1)])
    b = np.reshape(b, [m for n in right for m in (1, n)])
    return np.reshape(a * b, [m * n for m, n in zip(left, right, strict=True)])


@composite(np.cross)
def cross(a, b, axisa=-1, axisb=-1, axisc=-1, axis=None):
    """The third component of a vector of two is zero; of two such vectors, only the third of the product is given."""
    axisa, axisb, axisc = (axisa, axisb, axisc) if axis is None else (axis,) * 3
    a, b = np.moveaxis(array(a), axisa, -1), np.moveaxis(array(b), axisb, -1)
    if not {a.shape[-1], b.shape[-1]} <= {2, 3}:
        raise ValueError("np.cross needs vectors of two or three components")
    if a.shape[-1] == b.shape[-1] == 2:
        return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    a, b = (x if x.shape[-1] == 3 else np.concatenate([x, np.zeros_like(x[..., :1])], -1) for x in (a, b))
    return np.moveaxis(np.roll(a, -1, -1) * np.roll(b, -2, -1) - np.roll(a, -2, -1) * np.roll(b, -1, -1), -1, axisc)


@composite(np.linalg.cross)
def linalg_cross(x1, x2, /, *, axis=-1):
    x1, x2 = array(x1), array(x2)
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ValueError("np.linalg.cross needs vectors of three components")
    return cross(x1, x2, axis=axis)


# np.tensordot: the result has the free dimensions of x, then those of y.


def _split(axes, m: int, n: int):
    """The contracted dimensions of x and of y, and their free ones."""
    if np.ndim(axes) == 0:
        summed = [*range(m - axes, m)], [*range(axes)]
    else:
        summed = [a % m for a in np.atleast_1d(axes[0])], [a % n for a in np.atleast_1d(axes[1])]
    return *summed, *([i for i in range(k) if i not in s] for k, s in zip((m, n), summed, strict=True))


def _tensordot_left(g, _ans, _x, y, axes=2):
    own, theirs, free, others = _split(axes, len(np.shape(_x)), np.ndim(y))
    placed = free + [own[i] for i in np.argsort(theirs)]
    return np.transpose(np.tensordot(g, y, ([*range(len(free), g.ndim)], others)), np.argsort(placed))


def _tensordot_right(g, _ans, x, _y, axes=2):
    theirs, own, others, free = _split(axes, np.ndim(x), len(np.shape(_y)))
    placed = [own[i] for i in np.argsort(theirs)] + free
    return np.transpose(np.tensordot(x, g, (others, [*range(len(others))])), np.argsort(placed))


rule(np.tensordot, _tensordot_left, _tensordot_right, early=True)


@composite(np.linalg.tensordot)
def tensordot(x1, x2, /, *, axes=2):
    return np.tensordot(x1, x2, axes)


# np.einsum

_LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""What the numbers of lists stand for, in NumPy's order, which an implicit result follows."""


def _explicit(subscripts: str, ndims: list[int]) -> str:
    """The same subscripts with a result and without ellipses."""
    terms, arrow, out = subscripts.replace(" ", "").partition("->")
    labels = terms.split(",")
    unused = [c for c in _LABELS if c not in terms]
    widths = [n - len(t) + 3 if "..." in t else 0 for n, t in zip(ndims, labels, strict=True)]
    letters = unused[: max(widths, default=0)]
    if arrow and letters and "..." not in out:
        raise ValueError("np.einsum: the ellipsis has dimensions, so the result needs an ellipsis too")
    labels = [t.replace("...", "".join(letters[len(letters) - w :])) for t, w in zip(labels, widths, strict=True)]
    if not arrow:
        out = "..." + "".join(sorted(c for c in set(terms) - {",", "."} if terms.count(c) == 1))
    return ",".join(labels) + "->" + out.replace("...", "".join(letters))


def einsum_rule(k, g, _ans, *operands, subscripts, optimize):
    """The einsum of g and the other operands, which has the labels of operand k.

    A label that stands nowhere else was summed, and one that is longer in operand k was broadcast against: it comes
    back by a vector of ones. The second of two equal labels took a diagonal: it comes back by an identity matrix.
    """
    terms, out = subscripts.split("->")
    labels = terms.split(",")
    inputs, arrays = [out, *labels[:k], *labels[k + 1 :]], [g, *operands[:k], *operands[k + 1 :]]
    sizes = {c: n for t, a in zip(inputs, arrays, strict=True) for c, n in zip(t, np.shape(a), strict=True)}
    unused, target = [c for c in _LABELS if c not in subscripts], ""
    for c, n in zip(labels[k], np.shape(operands[k]), strict=True):
        if c in target:
            fresh = unused.pop()
            inputs.append(c + fresh)
            arrays.append(np.diag(np.ones_like(g, shape=n)))
            c = fresh
        elif c not in sizes or sizes[c] == 1 != n:
            inputs.append(c)
            arrays.append(np.ones_like(g, shape=n))
        target += c
    # A path that was given is one for the operands of the function.
    optimize = optimize if isinstance(optimize, bool | str) else True
    return np.einsum(",".join(inputs) + "->" + target, *arrays, optimize=optimize)


@primitive("einsum", variadic=einsum_rule, linear=True)
def _einsum(*operands, subscripts, optimize):
    return np.einsum(subscripts, *operands, optimize=optimize)


@composite(np.einsum)
def einsum(subscripts, *operands, out=None, optimize=False, dtype=None, order="K", casting="safe"):
    if not isinstance(subscripts, str):
        operands = (subscripts, *operands)
        lists = ["".join("..." if i is Ellipsis else _LABELS[i] for i in s) for s in operands[1::2]]
        last = operands[-1] if len(operands) % 2 else None
        operands = operands[: len(lists) * 2 : 2]
        subscripts = ",".join(lists)
        if last is not None:
            subscripts += "->" + "".join("..." if i is Ellipsis else _LABELS[i] for i in last)
    operands = [cast(array(x), dtype, casting) for x in operands]
    return _einsum(*operands, subscripts=_explicit(subscripts, [x.ndim for x in operands]), optimize=optimize)


# Norms. At zero the derivative of a norm is taken as zero.


@primitive("norm", lambda g, ans, x, axis, keepdims, **_: expand(g / nonzero(ans), x, axis, keepdims) * conj(x))
def _two_norm(x, axis, keepdims, **options):
    norm = np.linalg.norm if options else np.linalg.vector_norm
    return norm(x, axis=axis, keepdims=keepdims, **options)


@composite(np.linalg.vector_norm)
def vector_norm(x, /, *, axis=None, keepdims=False, ord: Any = 2):
    if isinstance(ord, str):
        raise ValueError(f"the norm of vectors needs a number as ord, and got {ord!r}")
    if ord in (2, None):
        return _two_norm(x, axis, keepdims)
    if abs(ord) == np.inf:
        return (largest if ord > 0 else np.min)(np.abs(x), axis, keepdims=keepdims)
    if ord == 0:
        return np.sum((x != 0).astype(np.real(x).dtype), axis, keepdims=keepdims)
    if ord == 1:
        return np.sum(np.abs(x), axis, keepdims=keepdims)
    total = np.sum(np.abs(x) ** ord, axis, keepdims=keepdims)
    return total ** (1 / ord) if ord < 0 else nonzero(total) ** (1 / ord) * (total != 0)


@composite(np.linalg.matrix_norm)
def matrix_norm(x, /, *, keepdims=False, ord: Any = "fro"):
    return np.linalg.norm(x, ord, (-2, -1), keepdims)


@composite(np.linalg.norm)
def norm(x, ord: Any = None, axis=None, keepdims=False):
    if axis is None and ord is None:
        return _two_norm(x, axis, keepdims, ord=ord)
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (operator.index(axis),)
    x = x if issubclass(x.dtype.type, np.inexact) else x.astype(float)
    if len(axes) == 1:
        if ord in (None, 2):
            return _two_norm(x, axis, keepdims, ord=ord)
        return vector_norm(x, ord=ord, axis=axes[0], keepdims=keepdims)
    if len(axes) != 2:
        raise ValueError(f"np.linalg.norm needs one axis or two, and got {len(axes)}")
    if ord in (None, "fro", "f"):
        return _two_norm(x, axis, keepdims, ord=ord)
    if ord in (1, -1, np.inf, -np.inf):
        sums = np.sum(np.abs(x), axes[0 if abs(ord) == 1 else 1], keepdims=True)
        return (largest if ord > 0 else np.min)(sums, axes, keepdims=keepdims)
    matrices = np.moveaxis(x, axes, (-2, -1))
    if ord == "nuc":
        # decompose is loaded where it is needed.
        from spmd.autodiff.rules.decompose import nuclear_norm

        result = nuclear_norm(matrices)
    elif ord in (2, -2):
        result = (largest if ord > 0 else np.min)(np.linalg.svd(matrices, compute_uv=False), -1)
    else:
        raise ValueError(f"the norm of matrices needs ord 1, -1, 2, -2, inf, -inf, 'fro' or 'nuc', and got {ord!r}")
    return np.expand_dims(result, axes) if keepdims else result
