"""Random arrays of the common distributions."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np

from spmd.array import PartitionedArray, layout_of
from spmd.autodiff.static_array import AnyArray
from spmd.autodiff.tracer import value_of
from spmd.errors import SpecError, describe
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Spec
from spmd.mesh import Mesh
from spmd.random.arguments import NO_SHAPE, Shape, as_array, checked_dtype, checked_float
from spmd.random.drawing import draw, place_of
from spmd.tracebacks import api_boundary

__all__ = ["bernoulli", "bits", "exponential", "gumbel", "normal", "randint", "truncated_normal", "uniform"]


def _are_finite_in(dtype: np.dtype, *numbers: float) -> bool:
    """Whether these numbers are finite in a dtype."""
    with np.errstate(over="ignore"):
        return all(math.isfinite(np.asarray(n).astype(dtype)) for n in numbers)


def _check_order(where: str, **numbers: Any) -> None:
    """Raise unless the options are numbers and the first is at most the second."""
    (first, low), (last, high) = numbers.items()
    if not all(isinstance(n, int | float | np.integer | np.floating) for n in (low, high)) or not low <= high:
        raise SpecError.at(
            where,
            argument=f"{first} and {last}",
            got=f"{describe(low)} and {describe(high)}",
            need=f"two numbers, {first} not above {last}",
            mend="draw between 0 and 1, and scale by arrays: low + (high - low) * uniform(key, shape)",
        )


@overload
def bits(key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: None = ..., mesh: Mesh | None = ...) -> AnyArray: ...


@overload
def bits(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: Spec, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@overload
def bits(key: Any, shape: Shape = ..., dtype: Any = ..., *, like: Any, mesh: Mesh | None = ...) -> PartitionedArray: ...


@api_boundary
def bits(
    key: Any,
    shape: Shape = NO_SHAPE,
    dtype: Any = np.uint32,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> Any:
    """Random integers over the full range of a dtype, uint32 or uint64. Arguments as for `uniform`.

    >>> spmd.random.bits(spmd.random.key(0), (3,))
    array([1713891541, 3781805453, 3159862348], dtype=uint32)
    """
    where = "spmd.random.bits"
    checked = checked_dtype(where, dtype, "uint32 or uint64", "np.uint32")
    if checked not in (np.dtype(np.uint32), np.dtype(np.uint64)):
        raise SpecError.at(where, argument="dtype", got=str(checked), need="uint32 or uint64", mend="bits(...) >> 24")
    return draw(where, key, "random_bits", checked, place_of(where, shape, spec, mesh, like))


@overload
def uniform(
    key: Any,
    shape: Shape = ...,
    dtype: Any = ...,
    minval: float = ...,
    maxval: float = ...,
    *,
    spec: None = ...,
    mesh: Mesh | None = ...,
) -> AnyArray: ...


@overload
def uniform(
    key: Any,
    shape: Shape = ...,
    dtype: Any = ...,
    minval: float = ...,
    maxval: float = ...,
    *,
    spec: Spec,
    mesh: Mesh | None = ...,
) -> PartitionedArray: ...


@overload
def uniform(
    key: Any,
    shape: Shape = ...,
    dtype: Any = ...,
    minval: float = ...,
    maxval: float = ...,
    *,
    like: Any,
    mesh: Mesh | None = ...,
) -> PartitionedArray: ...


@api_boundary
def uniform(
    key: Any,
    shape: Shape = NO_SHAPE,
    dtype: Any = float,
    minval: float = 0.0,
    maxval: float = 1.0,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> Any:
    """Uniformly distributed numbers in [minval, maxval).

    key: of `spmd.random`; another one for each use. shape, dtype: of the whole array.
    spec: how it is split, of which a body gets this worker's block; a spec, or a `Layout`. Outside of bodies the result
    is a `PartitionedArray`. None: the whole. mesh: by default that of the enclosing `with mesh:`.
    like: in place of spec and mesh, a global array as which the result lies.

    Each number depends on the key and on its index in the whole only, so it is the same on every mesh. Cost: nothing
    moves. Raises SpecError for options that do not fit.

        >>> with spmd.Mesh(x=2):
        ...     spmd.random.uniform(spmd.random.key(0), (3,), minval=-1.0, spec=P("x")).numpy().round(3)
        array([ 0.761,  0.211, -0.276])
    """
    where, dtype = "spmd.random.uniform", checked_float("spmd.random.uniform", dtype)
    _check_order(where, minval=minval, maxval=maxval)
    bounds = float(minval), float(maxval)
    if not _are_finite_in(dtype, *bounds) or not _are_finite_in(accurate(dtype), bounds[1] - bounds[0]):
        raise SpecError.at(
            where,
            argument="minval and maxval",
            got=f"{minval} and {maxval}",
            need=f"two numbers that {dtype} holds, and not infinitely far apart",
            mend="minval=0.0, maxval=1.0",
        )
    return draw(where, key, "random_uniform", dtype, place_of(where, shape, spec, mesh, like), *bounds)


@overload
def normal(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: None = ..., mesh: Mesh | None = ...
) -> AnyArray: ...


@overload
def normal(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: Spec, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@overload
def normal(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, like: Any, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@api_boundary
def normal(
    key: Any,
    shape: Shape = NO_SHAPE,
    dtype: Any = float,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> Any:
    """Normally distributed numbers with mean 0 and variance 1. Arguments as for `uniform`.

    >>> key = spmd.random.key(0)
    >>> with spmd.Mesh(x=2):
    ...     x = spmd.random.normal(key, (5,), spec=P("x"))
    >>> x.spec, np.array_equal(x.numpy(), spmd.random.normal(key, (5,)))
    (P('x'), True)
    """
    where = "spmd.random.normal"
    return draw(where, key, "random_normal", checked_float(where, dtype), place_of(where, shape, spec, mesh, like))


@overload
def truncated_normal(
    key: Any,
    lower: float,
    upper: float,
    shape: Shape = ...,
    dtype: Any = ...,
    *,
    spec: None = ...,
    mesh: Mesh | None = ...,
) -> AnyArray: ...


@overload
def truncated_normal(
    key: Any, lower: float, upper: float, shape: Shape = ..., dtype: Any = ..., *, spec: Spec, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@overload
def truncated_normal(
    key: Any, lower: float, upper: float, shape: Shape = ..., dtype: Any = ..., *, like: Any, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@api_boundary
def truncated_normal(
    key: Any,
    lower: float,
    upper: float,
    shape: Shape = NO_SHAPE,
    dtype: Any = float,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> Any:
    """Normally distributed numbers, conditioned to lie between lower and upper (which may be infinite).

    Arguments as for `uniform`. The interval must reach within 5 of 0 (8 in float64): beyond that too few numbers are
    available. Raises SpecError for another interval.

        >>> x = spmd.random.truncated_normal(spmd.random.key(0), -1.0, 0.5, (1000,))
        >>> bool(np.all((-1.0 <= x) & (x <= 0.5)))
        True
    """
    where, dtype = "spmd.random.truncated_normal", checked_float("spmd.random.truncated_normal", dtype)
    _check_order(where, lower=lower, upper=upper)
    limit = 8 if dtype.itemsize == 8 else 5
    if lower > limit or upper < -limit or lower == upper:
        raise SpecError.at(
            where,
            argument="lower and upper",
            got=f"{lower} and {upper}",
            need=f"an interval that reaches within {limit} of 0, in {dtype}",
            mend="lower + exponential(key, shape) / lower is near such a tail",
        )
    bounds = float(lower), float(upper)
    return draw(where, key, "random_truncated", dtype, place_of(where, shape, spec, mesh, like), *bounds)


@overload
def exponential(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: None = ..., mesh: Mesh | None = ...
) -> AnyArray: ...


@overload
def exponential(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: Spec, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@overload
def exponential(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, like: Any, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@api_boundary
def exponential(
    key: Any,
    shape: Shape = NO_SHAPE,
    dtype: Any = float,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> Any:
    """Exponentially distributed numbers with mean 1. Arguments as for `uniform`.

    >>> with spmd.Mesh(x=2):
    ...     spmd.random.exponential(spmd.random.key(0), (3,), spec=P("x")).numpy().round(3)
    array([1.431, 0.237, 1.288])
    """
    where = "spmd.random.exponential"
    return draw(where, key, "random_exponential", checked_float(where, dtype), place_of(where, shape, spec, mesh, like))


@overload
def gumbel(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: None = ..., mesh: Mesh | None = ...
) -> AnyArray: ...


@overload
def gumbel(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, spec: Spec, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@overload
def gumbel(
    key: Any, shape: Shape = ..., dtype: Any = ..., *, like: Any, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@api_boundary
def gumbel(
    key: Any,
    shape: Shape = NO_SHAPE,
    dtype: Any = float,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> Any:
    """Gumbel-distributed numbers. Arguments as for `uniform`.

    >>> with spmd.Mesh(x=2):
    ...     spmd.random.gumbel(spmd.random.key(0), (3,), spec=P("x")).numpy().round(3)
    array([-0.359,  1.44 , -0.253])
    """
    where = "spmd.random.gumbel"
    return draw(where, key, "random_gumbel", checked_float(where, dtype), place_of(where, shape, spec, mesh, like))


@overload
def bernoulli(key: Any, p: PartitionedArray, shape: Shape | None = ...) -> PartitionedArray: ...


@overload
def bernoulli(
    key: Any, p: Any = ..., shape: Shape | None = ..., *, spec: None = ..., mesh: Mesh | None = ...
) -> AnyArray: ...


@overload
def bernoulli(
    key: Any, p: Any = ..., shape: Shape | None = ..., *, spec: Spec, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@overload
def bernoulli(
    key: Any, p: Any = ..., shape: Shape | None = ..., *, like: Any, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@api_boundary
def bernoulli(
    key: Any, p: Any = 0.5, shape: Shape | None = None, *, spec: Any = None, mesh: Mesh | None = None, like: Any = None
) -> Any:
    """True with probability p, to 24 bits. p: a number, or an array that broadcasts to the shape.

    shape: by default that of like, else that of p. A global p, without spec and like, stands for like.
    Raises SpecError for a p on the host outside of [0, 1].

        >>> with spmd.Mesh(x=2):
        ...     spmd.random.bernoulli(spmd.random.key(0), 0.5, (6,), spec=P("x"))
        PartitionedArray([ True, False, False, False, False,  True], dtype=bool, spec=P('x'))
    """
    where = "spmd.random.bernoulli"
    p = as_array(where, "p", p)
    _check_probabilities(where, p)
    p_shape = np.shape(p)
    if shape is None:
        shape = p_shape if like is None else NO_SHAPE
    if spec is None and like is None and layout_of(p) is not None:
        like = p
    place = place_of(where, shape, spec, mesh, like)
    drawn = draw(where, key, "random_uniform", np.dtype(np.float32), place, 0.0, 1.0)
    shape_drawn = drawn.shape
    if len(p_shape) > len(shape_drawn) or any(
        n not in (1, m) for n, m in zip(reversed(p_shape), reversed(shape_drawn), strict=False)
    ):
        raise SpecError.at(
            where,
            argument="p",
            got=describe(p),
            need=f"a number, or an array that broadcasts to {list(shape_drawn)}: every entry is drawn by itself",
            mend=f"shape={p_shape}, or no shape",
        )
    return drawn < p


def _check_probabilities(where: str, p: Any) -> None:
    """Raise unless p holds numbers in [0, 1]. Arrays on a device or laid out over workers are not read."""
    value: Any = value_of(p)
    is_readable = isinstance(value, np.ndarray | int | float | np.generic) and np.asarray(value).dtype.kind in "biuf"
    if is_readable and np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)):
        return
    dtype = None if is_readable else getattr(value, "dtype", None)
    if dtype is not None and dtype.kind in "biufV":
        return
    need, mend = "probabilities: numbers from 0 to 1", "np.clip(p, 0, 1)"
    raise SpecError.at(where, argument="p", got=describe(p), need=need, mend=mend)


@overload
def randint(
    key: Any, shape: Shape, minval: int, maxval: int, dtype: Any = ..., *, spec: None = ..., mesh: Mesh | None = ...
) -> AnyArray: ...


@overload
def randint(
    key: Any, shape: Shape, minval: int, maxval: int, dtype: Any = ..., *, spec: Spec, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@overload
def randint(
    key: Any, shape: Shape, minval: int, maxval: int, dtype: Any = ..., *, like: Any, mesh: Mesh | None = ...
) -> PartitionedArray: ...


@api_boundary
def randint(
    key: Any,
    shape: Shape,
    minval: int,
    maxval: int,
    dtype: Any = int,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> Any:
    """Integers from minval to maxval - 1, equally likely to one part in 2^64 / (maxval - minval).

    Arguments as for `uniform`. Raises SpecError for bounds that the dtype cannot hold, or an empty interval.

        >>> with spmd.Mesh(x=2):
        ...     spmd.random.randint(spmd.random.key(0), (6,), 0, 10, spec=P("x"))
        PartitionedArray([8, 6, 3, 0, 3, 2], dtype=int64, spec=P('x'))
    """
    where = "spmd.random.randint"
    dtype = checked_dtype(where, dtype, "an integer dtype", "int")
    bounds = minval, maxval
    are_integers = dtype.kind in "iu" and all(isinstance(n, int | np.integer) for n in bounds)
    if not are_integers or not np.iinfo(dtype).min <= minval < maxval <= np.iinfo(dtype).max + 1:
        raise SpecError.at(
            where,
            argument="minval and maxval",
            got=f"{minval!r} and {maxval!r}, in {dtype}",
            need="two integers that the integer dtype holds, minval below maxval",
            mend="randint(key, shape, 0, 10)",
        )
    low, span = int(minval), int(maxval) - int(minval)

    def scaled(words: Any) -> Any:
        # The upper 64 bits of words * span.
        half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
        s1, s0 = np.uint64(span >> 32 & 0xFFFFFFFF), np.uint64(span & 0xFFFFFFFF)
        shape, words = words.shape, words.reshape(-1)  # scalars would warn when they wrap
        w1, w0 = words >> half, words & mask
        if span == 1 << 64:
            upper = words
        else:
            middle = w1 * s0 + (w0 * s0 >> half)
            upper = w1 * s1 + (middle >> half) + ((middle & mask) + w0 * s1 >> half)
        return (upper + np.uint64(low % (1 << 64))).astype(dtype).reshape(shape)

    words = np.dtype(np.uint64)
    return draw(where, key, "random_bits", words, place_of(where, shape, spec, mesh, like), transform=scaled)
