"""Random numbers: global arrays that are the same on every mesh, and streams for bodies.

    key = spmd.random.key(0)
    keys = spmd.random.split(key, 3)
    w = spmd.random.normal(keys[0], (1000, 300), np.float32, spec=P(None, "model"))

As in `jax.random`, a key says what is drawn, and each use takes a key of its own. Entry i of an array depends on the
key and on its place i in the whole array, and on nothing else. So with a spec every worker makes its own block, and the
whole is the same on every mesh, by every layout, scheduler and transport, and on every device, to the last bit.

shape, spec, mesh: the shape is that of the whole array. Without a spec it is made whole. With one (or a `Layout`), a
body gets its worker's block, Varying over the axes that split it and Invariant along the others; outside of bodies
they give a `PartitionedArray` on the mesh, of which each process makes its own blocks. `like(x, spec)` gives the layout
of which a block of a body is part. A key that differs between workers gives numbers that differ between them.

The numbers are those of Philox4x32-10 (`spmd.kernels.reference.philox`).
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import kernels
from spmd.array import PartitionedArray
from spmd.autodiff.admission import admit
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import LayoutError, SpecError, StateError, describe, message
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Layout, P, Spec
from spmd.lazy_imports import absent
from spmd.mesh import WORKER, Mesh, here
from spmd.operators.varying import varying
from spmd.placement import mesh_for
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call
from spmd.transport.handles import sealed

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "default_rng",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "like",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]

if not TYPE_CHECKING:  # Type checkers know what is here, and so what is misspelt.

    @api_boundary
    def __getattr__(name: str) -> Any:
        raise absent(__name__, name)


Shape = int | Sequence[int]

_DEFAULT = "spmd.random.default_rng"
_DRAWS, _SPLITS, _FOLDS = 0, 1, 2
"""The streams of a key: what it is used for."""


# Keys


@api_boundary
def key(seed: int) -> np.ndarray:
    """The key of a seed, an integer from 0 to 2^64 - 1: an array of two uint32, to be passed around as other arrays."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise SpecError(
            message(
                "spmd.random.key",
                argument="seed",
                got=describe(seed),
                need="an integer from 0 to 2**64 - 1",
                mend="key(0); spmd.random.fold_in(key, i) takes a second number in",
            )
        )
    return np.array([number & 0xFFFFFFFF, number >> 32], np.uint32)


@api_boundary
def split(key, num: Shape = 2):
    """New keys, (num, 2) of uint32: `a, b = split(key)`. num: how many, or a shape. The old one is used up."""
    shape = (*_shape("spmd.random.split", num, "num"), 2)
    return _whole("spmd.random.split", key, "random_bits", shape, np.uint32, _SPLITS)


@api_boundary
def fold_in(key, data):
    """A new key from a key and an integer from 0 to 2^62: of a step, a layer, or, by `spmd.axis_index`, of a worker."""
    where, bare = "spmd.random.fold_in", value_of(data)
    try:
        number = operator.index(bare.item() if getattr(bare, "shape", None) == () else bare)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise SpecError(
            message(
                where,
                argument="data",
                got=describe(data),
                need="one integer, not negative",
                mend="fold_in(key, step); of several numbers one after the other",
            )
        )
    found = _key(where, key)
    box = ((2 * number, 2 * number + 2),)
    made = kernels.of(found).random_bits(found, (1 << 63,), box, np.uint32, _FOLDS)
    return _stated(made, _axes_of(key) | _axes_of(data))


def _key(where: str, given: Any) -> Any:
    """The two words of a key."""
    found = np.asarray(given) if type(given) is PartitionedArray else value_of(given)
    found = found if on_device(found) else admit(found, where, "key", error=SpecError, need="one key, uint32[2]")
    if getattr(found, "dtype", None) != np.uint32 or found.shape != (2,):
        raise SpecError(
            message(
                where,
                argument="key",
                got=describe(given),
                need="one key, uint32[2]",
                mend="spmd.random.key(seed); of several keys one: keys[i]",
            )
        )
    return found


def _array(where: str, argument: str, x: Any) -> Any:
    """What may be an array, as one."""
    if isinstance(x, list | tuple) or any(hasattr(type(x), name) for name in ("__array__", "toarray")):
        if isinstance(x, np.generic):
            return x
        return x if on_device(x) else admit(x, where, argument, error=SpecError)
    return x


def _axes_of(x: Any) -> frozenset[str]:
    other = frontend(x)
    if other is not None:
        return other.state(x).varying
    return x.state.varying if type(x) is Array and x.state is not None else frozenset()


# What is drawn where


def _shape(where: str, given: Any, argument: str = "shape") -> tuple[int, ...]:
    try:
        shape = (operator.index(given),) if np.ndim(given) == 0 else tuple(map(operator.index, given))
    except (TypeError, ValueError):
        shape = (-1,)
    if min(shape, default=0) < 0 or math.prod(shape) >= 1 << 62:
        raise SpecError(
            message(
                where,
                argument=argument,
                got=describe(given),
                need="the lengths of the whole array, less than 2**62 entries",
                mend="shape=(3, 4)",
            )
        )
    return shape


def _dtype(where: str, given: Any, need: str, mend: str) -> np.dtype:
    try:
        return np.dtype(given)
    except TypeError:
        raise SpecError(
            message(where, argument="dtype", got=describe(given), need=need, mend=f"dtype={mend}")
        ) from None


def _float(where: str, dtype: Any) -> np.dtype:
    found = _dtype(where, dtype, "float32, float64, float16 or bfloat16", "np.float32")
    if found.name not in ("float16", "bfloat16", "float32", "float64"):
        raise SpecError(
            message(
                where,
                argument="dtype",
                got=str(found),
                need="float32, float64, float16 or bfloat16",
                mend="dtype=np.float32; of complex numbers draw both parts",
            )
        )
    return found


def _holds(dtype: np.dtype, *numbers: float) -> bool:
    """Whether a dtype has finite numbers for these."""
    with np.errstate(over="ignore"):
        return all(math.isfinite(np.asarray(n).astype(dtype)) for n in numbers)


def _ordered(where: str, **numbers: Any) -> None:
    """Raise where options are no numbers, or the first is greater than the second."""
    (first, low), (last, high) = numbers.items()
    if not all(isinstance(n, int | float | np.integer | np.floating) for n in (low, high)) or not low <= high:
        raise SpecError(
            message(
                where,
                argument=f"{first} and {last}",
                got=f"{describe(low)} and {describe(high)}",
                need=f"two numbers, {first} not above {last}",
                mend="draw between 0 and 1, and scale by arrays: low + (high - low) * uniform(key, shape)",
            )
        )


def _whole(where: str, key: Any, kernel: str, shape: tuple[int, ...], dtype: Any, *more: Any) -> Any:
    return _drawn(where, key, kernel, shape, dtype, None, None, *more)


def _drawn(
    where: str,
    key: Any,
    kernel: str,
    shape: tuple[int, ...],
    dtype: Any,
    spec: Any,
    mesh: Mesh | None,
    *more: Any,
    then: Callable[[Any], Any] = lambda x: x,
) -> Any:
    """What a kernel draws: whole, this worker's block of it, or the blocks of this process."""
    words = _key(where, key)
    worker = WORKER.get()

    def make(box: Any, on: Mesh | None, w: int) -> Any:
        """The numbers of a box, drawn where a worker of a mesh has its blocks."""
        if on is None or on.places is None:
            return then(getattr(kernels.of(words), kernel)(words, shape, box, dtype, *more))
        with on.places.at(w):
            mine = on.places.moved(words, w)
            return then(getattr(kernels.of(mine), kernel)(mine, shape, box, dtype, *more))

    if spec is None:
        whole = tuple((0, n) for n in shape)
        made = make(whole, worker.mesh, worker.index) if worker is not None else make(whole, None, 0)
        return _stated(made, _axes_of(key))
    if not isinstance(spec, Spec):
        raise SpecError(
            message(where, argument="spec", got=describe(spec), need="a P, or a Layout", mend='spec=P("x", None)')
        )
    on = worker.mesh if worker is not None else mesh_for(mesh, where)
    spec.check(on.axes, where, "spec", len(shape))
    layout = on.layout(shape, spec, where)
    if worker is not None:
        return _stated(_block(make, layout, on, worker.index), layout.varying | _axes_of(key))
    return PartitionedArray(on.shared(layout, lambda w: sealed(_block(make, layout, on, w))), layout, on)


def _block(make: Callable[[Any, Mesh, int], Any], layout: Layout, on: Mesh, worker: int) -> Any:
    if not layout.shape and layout.positions(worker) is None:  # a number that another worker holds
        return make((), on, worker).reshape(1)[:0]
    return make(layout.boxes[worker], on, worker)


def _stated(x: Any, axes: frozenset[str]) -> Any:
    """A result in a body in its state; outside as it is."""
    worker = WORKER.get()
    if worker is None or not worker.tracked:
        return x
    return varying(sealed(x), tuple(n for n in worker.mesh.axes if n in axes))


@api_boundary
def like(x, spec: P) -> Layout:
    """The layout of the whole of which x is this worker's block, split as spec says: to draw numbers of its shape.

        noise = spmd.random.normal(key, layout.shape, x.dtype, spec=layout)    # layout = spmd.random.like(x, P("data"))

    x: a block of a body, which varies over no other axes than spec names; blocks may be uneven or empty. All workers
    along these axes call it; they tell each other their shapes, and no data moves. Of a `PartitionedArray` it is the
    layout. Raises StateError where x varies over more axes, LayoutError where the blocks do not fit together.
    """
    where = "spmd.random.like"
    if type(x) is PartitionedArray:
        return x.layout
    worker = here(where)
    if not isinstance(spec, P):
        raise SpecError(message(where, argument="spec", got=describe(spec), need="a spec", mend='like(x, P("x"))'))
    if not hasattr(x, "shape"):
        raise SpecError(
            message(where, argument="x", got=describe(x), need="a block, which has a shape", mend="np.asarray(x)")
        )
    spec.check(worker.mesh.axes, where, "spec", len(x.shape))
    more = sorted(_axes_of(x) - spec.varying)
    if more:
        raise StateError(
            message(
                where,
                argument="spec",
                got=f"{spec} for {describe(x)}, which varies over {more[0]!r} too",
                need="the axes that split the array, all that it varies over",
                mend=f"name {more[0]!r} in the spec, or sum or gather x along it first",
            )
        )
    axes, group = spec.axes, worker.group(spec.axes)
    other = frontend(x)
    dtype = np.dtype(x.dtype) if other is None else other.dtype(x)
    call = Call("random.like", axes, dtype, tuple(x.shape), detail=str(spec))
    shapes = worker.comm.shapes(group, call).wait() if axes else [tuple(x.shape)]
    of = {
        tuple(worker.mesh.coordinates(w)[n] for n in axes): tuple(s) for w, s in zip(group.members, shapes, strict=True)
    }
    places = map(worker.mesh.coordinates, range(worker.mesh.size))
    return worker.mesh.joined(tuple(of[tuple(place[n] for n in axes)] for place in places), spec, where)


# Numbers


@api_boundary
def bits(key, shape: Shape = (), dtype: Any = np.uint32, *, spec: Any = None, mesh: Mesh | None = None):
    """Random integers of all values of a dtype, uint32 or uint64."""
    where = "spmd.random.bits"
    found = _dtype(where, dtype, "uint32 or uint64", "np.uint32")
    if found not in (np.dtype(np.uint32), np.dtype(np.uint64)):
        raise SpecError(
            message(where, argument="dtype", got=str(found), need="uint32 or uint64", mend="bits(...) >> 24")
        )
    return _drawn(where, key, "random_bits", _shape(where, shape), found, spec, mesh)


@api_boundary
def uniform(
    key,
    shape: Shape = (),
    dtype: Any = float,
    minval: float = 0.0,
    maxval: float = 1.0,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
):
    """Numbers from minval up to, and without, maxval, evenly spread."""
    where, dtype = "spmd.random.uniform", _float("spmd.random.uniform", dtype)
    _ordered(where, minval=minval, maxval=maxval)
    ends = float(minval), float(maxval)
    if not _holds(dtype, *ends) or not _holds(accurate(dtype), ends[1] - ends[0]):
        raise SpecError(
            message(
                where,
                argument="minval and maxval",
                got=f"{minval} and {maxval}",
                need=f"two numbers that {dtype} holds, and not infinitely far apart",
                mend="minval=0.0, maxval=1.0",
            )
        )
    return _drawn(where, key, "random_uniform", _shape(where, shape), dtype, spec, mesh, *ends)


@api_boundary
def normal(key, shape: Shape = (), dtype: Any = float, *, spec: Any = None, mesh: Mesh | None = None):
    """Numbers of the normal distribution, of mean 0 and variance 1."""
    where = "spmd.random.normal"
    return _drawn(where, key, "random_normal", _shape(where, shape), _float(where, dtype), spec, mesh)


@api_boundary
def truncated_normal(
    key,
    lower: float,
    upper: float,
    shape: Shape = (),
    dtype: Any = float,
    *,
    spec: Any = None,
    mesh: Mesh | None = None,
):
    """Numbers of the normal distribution, given that they lie between lower and upper (which may be infinite).

    The interval reaches within 5 of 0 (8 in float64): what lies further out has too few numbers to draw from.
    """
    where, dtype = "spmd.random.truncated_normal", _float("spmd.random.truncated_normal", dtype)
    _ordered(where, lower=lower, upper=upper)
    reach = 8 if dtype.itemsize == 8 else 5
    if lower > reach or upper < -reach or lower == upper:
        raise SpecError(
            message(
                where,
                argument="lower and upper",
                got=f"{lower} and {upper}",
                need=f"an interval that reaches within {reach} of 0, in {dtype}",
                mend="lower + exponential(key, shape) / lower is near such a tail",
            )
        )
    ends = float(lower), float(upper)
    return _drawn(where, key, "random_truncated", _shape(where, shape), dtype, spec, mesh, *ends)


@api_boundary
def exponential(key, shape: Shape = (), dtype: Any = float, *, spec: Any = None, mesh: Mesh | None = None):
    """Numbers of the exponential distribution, of mean 1."""
    where = "spmd.random.exponential"
    return _drawn(where, key, "random_exponential", _shape(where, shape), _float(where, dtype), spec, mesh)


@api_boundary
def gumbel(key, shape: Shape = (), dtype: Any = float, *, spec: Any = None, mesh: Mesh | None = None):
    """Numbers of the Gumbel distribution: the largest of many exponential ones, up to a shift."""
    where = "spmd.random.gumbel"
    return _drawn(where, key, "random_gumbel", _shape(where, shape), _float(where, dtype), spec, mesh)


@api_boundary
def bernoulli(key, p=0.5, shape: Shape | None = None, *, spec: Any = None, mesh: Mesh | None = None):
    """True with probability p, to 24 bits. p: a number, or an array that broadcasts to the shape (default: its own).

    Raises SpecError for a p on the host that is not from 0 to 1.
    """
    where = "spmd.random.bernoulli"
    p = _array(where, "p", p)
    _probabilities(where, p)
    wide = np.shape(p)
    drawn = uniform(key, wide if shape is None else _shape(where, shape), np.float32, spec=spec, mesh=mesh)
    long = drawn.shape
    if len(wide) > len(long) or any(n not in (1, m) for n, m in zip(reversed(wide), reversed(long), strict=False)):
        raise SpecError(
            message(
                where,
                argument="p",
                got=describe(p),
                need=f"a number, or an array that broadcasts to {list(long)}: every entry is drawn by itself",
                mend=f"shape={wide}, or no shape",
            )
        )
    return drawn < p


def _probabilities(where: str, p: Any) -> None:
    """Raise where p is not of numbers from 0 to 1; one on a device, or laid out over workers, is not looked at."""
    bare: Any = value_of(p)
    known = isinstance(bare, np.ndarray | int | float | np.generic) and np.asarray(bare).dtype.kind in "biuf"
    if known and np.all((np.asarray(bare) >= 0) & (np.asarray(bare) <= 1)):
        return
    elsewhere = None if known else getattr(bare, "dtype", None)
    if elsewhere is not None and elsewhere.kind in "biufV":
        return
    need, mend = "probabilities: numbers from 0 to 1", "np.clip(p, 0, 1)"
    raise SpecError(message(where, argument="p", got=describe(p), need=need, mend=mend))


@api_boundary
def randint(
    key, shape: Shape, minval: int, maxval: int, dtype: Any = int, *, spec: Any = None, mesh: Mesh | None = None
):
    """Integers from minval to maxval - 1, each as likely as the others to one part in 2^64 / (maxval - minval)."""
    where = "spmd.random.randint"
    dtype = _dtype(where, dtype, "an integer dtype", "int")
    ends = minval, maxval
    fits = dtype.kind in "iu" and all(isinstance(n, int | np.integer) for n in ends)
    if not fits or not np.iinfo(dtype).min <= minval < maxval <= np.iinfo(dtype).max + 1:
        raise SpecError(
            message(
                where,
                argument="minval and maxval",
                got=f"{minval!r} and {maxval!r}, in {dtype}",
                need="two integers that the integer dtype holds, minval below maxval",
                mend="randint(key, shape, 0, 10)",
            )
        )
    low, span = int(minval), int(maxval) - int(minval)

    def scaled(words: Any) -> Any:
        # The upper 64 bits of words * span.
        half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
        s1, s0 = np.uint64(span >> 32 & 0xFFFFFFFF), np.uint64(span & 0xFFFFFFFF)
        shape, words = words.shape, words.reshape(-1)  # numbers without dimensions would warn where they wrap
        w1, w0 = words >> half, words & mask
        if span == 1 << 64:
            found = words
        else:
            middle = w1 * s0 + (w0 * s0 >> half)
            found = w1 * s1 + (middle >> half) + ((middle & mask) + w0 * s1 >> half)
        return (found + np.uint64(low % (1 << 64))).astype(dtype).reshape(shape)

    words = np.dtype(np.uint64)
    return _drawn(where, key, "random_bits", _shape(where, shape), words, spec, mesh, then=scaled)


@api_boundary
def categorical(key, logits, axis: int = -1, *, spec: P | None = None):
    """A class for each row, with probabilities softmax(logits) along an axis: the largest of logits + Gumbel numbers.

    spec: in a body, how the whole of the logits is split; not along the axis.
    """
    where = "spmd.random.categorical"
    logits = _array(where, "logits", logits)
    ndim = len(getattr(logits, "shape", ()))
    if not ndim or not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim or not logits.shape[axis]:
        raise SpecError(
            message(
                where,
                argument="logits and axis" if ndim else "logits",
                got=f"{describe(logits)}, axis={axis!r}",
                need="an array, and that of its axes which counts the classes, of which there is one at least",
                mend="axis=-1",
            )
        )
    layout = layout_of(where, logits, spec)
    dims = layout.spec.dims if layout is not None else ()
    if dims and dims[axis]:
        raise LayoutError(
            message(
                where,
                argument="spec",
                got=f"{spec}, which splits the classes",
                need="whole rows of classes",
                mend="spmd.all_gather(logits, axis_name, axis=..., tiled=True) first",
            )
        )
    shape = logits.shape if layout is None else layout.shape
    noise = gumbel(key, shape, _float(where, logits.dtype), spec=layout)
    return np.argmax(logits + noise, axis=axis)


@api_boundary
def permutation(key, x):
    """The numbers 0 to x - 1, or the rows of an array, in random order. Made whole, on every worker."""
    n, x = _items("spmd.random.permutation", "x", x)
    order = _order(key, n)
    return order if x is None else x[order]


def _items(where: str, argument: str, x: Any) -> tuple[int, Any]:
    """How many there are to choose from: a number, or the rows of an array; and the array."""
    x = _array(where, argument, x)
    if isinstance(x, int | np.integer) and not isinstance(x, bool) and 0 <= x < 1 << 62:
        return int(x), None
    rows: Any = x
    if getattr(rows, "shape", ()):
        return rows.shape[0], rows
    raise SpecError(
        message(
            where,
            argument=argument,
            got=describe(x),
            need="how many numbers, an integer from 0, or an array with rows",
            mend=f"{where.rpartition('.')[2]}(key, len(x)) for places in x",
        )
    )


def _order(key, n: int):
    """An order of n items: that of random words."""
    where = "spmd.random.permutation"
    sort = lambda words: words.argsort(kind="stable") if not kernels.on_device(words) else words.argsort()
    return _drawn(where, key, "random_bits", (n,), np.dtype(np.uint64), None, None, then=sort)


@api_boundary
def choice(key, a, shape: Shape = (), replace: bool = True, p: Any = None):
    """Random rows of an array, or numbers below an int. p: their probabilities, by default equal. Made whole."""
    where, shape = "spmd.random.choice", _shape("spmd.random.choice", shape)
    (n, rows), count = _items(where, "a", a), math.prod(shape)
    p = _array(where, "p", p)
    if n < 1 or not replace and count > n or p is not None and np.shape(p) != (n,):
        raise SpecError(
            message(
                where,
                argument="a" if p is None or np.shape(p) == (n,) else "p",
                got=f"{count} of {n} items, replace={replace}" + ("" if p is None else f", p: {describe(p)}"),
                need="items to choose from, as many without replacement, and a probability for each",
                mend="replace=True, or a smaller shape",
            )
        )
    if type(p) is np.ndarray and not (
        p.dtype.kind in "biuf"
        and np.all(p >= 0)
        and np.isfinite(p).all()
        and (p > 0).sum() >= (count if not replace else 1)
    ):
        raise SpecError(
            message(
                where,
                argument="p",
                got=f"{p}",
                need="a probability for each item, and enough items that have one above 0",
                mend="p=None for equal ones; replace=True",
            )
        )
    if p is not None and replace:
        below = np.cumsum(p)
        at = np.searchsorted(below, uniform(key, shape) * below[-1], side="right")
    elif p is not None:
        logs = np.where(p > 0, np.log(np.where(p > 0, p, 1)), -np.inf)
        at = np.argsort(-(logs + gumbel(key, (n,))))[:count].reshape(shape)
    elif replace:
        at = randint(key, shape, 0, n)
    else:
        at = _order(key, n)[:count].reshape(shape)
    return at if rows is None else rows[at]


def layout_of(where: str, x: Any, spec: P | None) -> Layout | None:
    """The layout of which x is a block; None where x is all there is."""
    worker = WORKER.get()
    if worker is None:
        return None
    if spec is None and (not worker.tracked or _axes_of(x)):
        raise SpecError(
            message(
                where,
                argument="spec",
                got=f"none, for {describe(x)}"
                + (f", which varies over {sorted(_axes_of(x))}" if worker.tracked else ""),
                need="how the whole is split, so that each worker has its own part of the random numbers",
                mend=f'{where}(..., spec=P("x", None)); P() for an array that all workers have',
            )
        )
    return like(x, P() if spec is None else spec)


# Streams for bodies


class Generator:
    """A `numpy.random.Generator` of a body, whose results carry their state. See `default_rng`."""

    __slots__ = ("axes", "rng")

    def __init__(self, rng: np.random.Generator, axes: tuple[str, ...]):
        self.rng = rng
        self.axes = axes

    def __reduce__(self):
        return Generator, (self.rng, self.axes)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.rng, name)
        if name.startswith("_") or not callable(found):
            return found
        if name == "spawn":
            return lambda n_children: [Generator(rng, self.axes) for rng in self.rng.spawn(n_children)]

        def draw(*args, **kwargs):
            drawn = found(*args, **kwargs)
            return varying(drawn, self.axes) if isinstance(drawn, np.ndarray | np.generic | int | float) else drawn

        draw.__name__, draw.__doc__ = name, found.__doc__
        return draw

    def __repr__(self) -> str:
        return f"<{_DEFAULT}, {f'varying over {self.axes}' if self.axes else 'the same on all workers'}>"


@api_boundary
def default_rng(seed: int | Sequence[int], axis_name: str | Sequence[str] = ()) -> Any:
    """A random generator, as `numpy.random.default_rng`: in a body, where NumPy's global state is not for use.

    seed: one or several non-negative integers; one for each use, such as (seed, step). axis_name: every place along
    these axes has a stream of its own, and what is drawn is Varying over them; without axes all workers draw the same
    numbers, and they are Invariant.
    The numbers depend on the seed and on the place along the axes only: not on timing, schedulers or transports.

        def body(x):
            keep = spmd.random.default_rng((seed, step), "data").random(x.shape) < 0.9
            return np.where(keep, x / 0.9, 0)

    Outside of bodies it is NumPy's own. Raises SpecError for a seed that is none, MeshError for an unknown axis.
    """
    seeds = [seed] if isinstance(seed, int | np.integer) else seed
    if not isinstance(seeds, Sequence) or not all(isinstance(s, int | np.integer) and s >= 0 for s in seeds):
        raise SpecError(
            message(
                _DEFAULT,
                argument="seed",
                got=describe(seed),
                need="a non-negative integer, or a sequence of them: a stream that can be drawn again",
                mend="default_rng(0)",
            )
        )
    if WORKER.get() is None and not axis_name:
        return np.random.default_rng([int(s) for s in seeds])
    worker = here(_DEFAULT)
    axes = worker.mesh.names(axis_name, _DEFAULT)
    # The names tell apart streams along different axes.
    place = (zlib.crc32(" ".join(axes).encode()), worker.group(axes).index) if axes else ()
    stream = np.random.SeedSequence([int(s) for s in seeds], spawn_key=place)
    return Generator(np.random.default_rng(stream), axes)
